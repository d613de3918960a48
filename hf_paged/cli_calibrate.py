"""`hf-paged calibrate`: how to smooth a model's keys and values, once, into a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hf_paged import cli_support as cli
from hf_paged.config import EngineConfig

if TYPE_CHECKING:
    from hf_paged.kv_scales import KVScales


def calibrate(
    model: cli.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", dir_okay=False)],
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text like those to be served; default: tokens of the model's own.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the text to read, from its start.  [default: 2048]")
    ] = None,
    perplexity_budget: Annotated[
        float, typer.Option(min=0.0, help='What kv_cache_dtype="auto-quality" may cost: 0.005 allows 0.5%.')
    ] = EngineConfig.kv_perplexity_budget,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
) -> None:
    """Measure a model's keys and values once, into a file.

    It holds offsets and factors for every format, the error of each, and the mix of formats for a budget.
    `kv_scales=FILE` (LLM, cache_config, eval) then starts without a calibration.
    """
    from hf_paged.eval.texts import read_text
    from hf_paged.kv_mix import CALIBRATION_TOKENS, calibrated_file

    cli.checked(EngineConfig, {"kv_perplexity_budget": perplexity_budget})
    if max_tokens is not None and text is None:
        raise typer.BadParameter(f"--max-tokens {max_tokens} is of a text; allowed: nothing, or --text FILE with it")
    cli.check_writable("--output", output)
    cli.quiet_unless_terminal()
    scales = calibrated_file(
        cli.existing(model),
        output,
        text=None if text is None else read_text(text),
        max_tokens=max_tokens or CALIBRATION_TOKENS,
        perplexity_budget=perplexity_budget,
        dtype=dtype.value,
        device=cli.usable(device),
    )
    cli.OUT.print(_errors(model, scales))
    cli.OUT.print(f"auto-quality: {scales.mix}", highlight=False)
    cli.OUT.print(f"written to {output}, from {scales.source}", highlight=False)


def _errors(model: str, scales: KVScales) -> Table:
    """Relative error of each layer's output by side and format."""
    formats = [name for name in ("fp8", "int8", "int4") if name in scales.k_formats | scales.v_formats]
    table = Table(title=f"{model}: relative error of attention's output", title_justify="left")
    table.add_column("layer", justify="right")
    for side in "KV":
        for name in formats:
            table.add_column(f"{side} {name}", justify="right")
    for index, layer in scales.layers.items():
        errors = [side[name].error if name in side else None for side in (layer.keys, layer.values) for name in formats]
        table.add_row(str(index), *("-" if error is None else f"{error:.4f}" for error in errors))
    return table
