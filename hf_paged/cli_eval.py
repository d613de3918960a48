"""`hf-paged eval divergence`: what a KV format costs a model, measured through the pages that serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from hf_paged import cli_support as cli
from hf_paged.config import EngineConfig, parse_kv_cache_dtype

evaluate = typer.Typer(
    name="eval", help="Measure quality through the stored pages.", no_args_is_help=True, rich_markup_mode=None
)


@evaluate.callback()
def group() -> None:
    """Commands of this group measure quality; `bench` measures speed."""


@evaluate.command()
@cli.plain_errors
def divergence(
    model: cli.Model,
    text: Annotated[Path, typer.Option(help="A UTF-8 text file to score.", exists=True, dir_okay=False)],
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="A format to compare; may be repeated.  [default: auto, fp8, int8]")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window; windows do not overlap.")] = 1024,
    max_windows: Annotated[int, typer.Option(min=1, help="Windows to score, from the start of the text.")] = 8,
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
) -> None:
    """Top-1 agreement with the dense model and the change of log-probabilities, teacher-forced over a text.

    The row "auto" is the rounding of the weights' dtype alone: 0 in fp32, not in 16 bits.
    """
    formats = kv_cache_dtype or ["auto", "fp8", "int8"]
    for name in formats:
        cli.checked(lambda name=name: parse_kv_cache_dtype(name), {})
    from transformers import AutoTokenizer

    from hf_paged.eval.bench_models import load_bench_model
    from hf_paged.eval.divergence import measure_divergence, windows_of

    cli.quiet_unless_terminal()
    loaded = load_bench_model(cli.existing(model), dtype=dtype.value, device=cli.usable(device))
    tokenizer = AutoTokenizer.from_pretrained(model)
    windows = windows_of(tokenizer(text.read_text(encoding="utf-8"), verbose=False).input_ids, window, max_windows)
    scored = measure_divergence(loaded, windows, formats, block_size=block_size, max_model_len=window + 1)
    results = list(track(scored, total=len(formats), description="scoring", console=cli.ERR))
    if as_json:
        for result in results:
            typer.echo(json.dumps(result.as_dict()))
        return
    table = Table(title=f"{model} on {text.name}: {len(windows)} windows of {window} tokens")
    for column in ("KV", "bytes/token", "tokens", "top-1", "|d logprob|", "perplexity", "dense ppl"):
        table.add_column(column, justify="left" if column == "KV" else "right")
    for r in results:
        table.add_row(
            r.kv_cache_dtype,
            f"{r.bytes_per_token:,.0f}",
            f"{r.num_tokens:,}",
            f"{r.top1_agreement:.2%}",
            f"{r.mean_abs_delta:.5f}",
            f"{r.perplexity:.4f}",
            f"{r.dense_perplexity:.4f}",
        )
    cli.OUT.print(table)
