"""`hf-paged quantize`: a checkpoint of fewer bits that Transformers, vLLM and this package load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_paged import cli_eval_support as support
from hf_paged import cli_support as cli

if TYPE_CHECKING:
    from hf_paged.quant.quantize_config import QuantizeConfig
    from hf_paged.quant.quantize_report import QuantizeReport

_MIB = 2**20
_FEWEST_TOKENS = 16  # of a text to evaluate on
_Switch = bool | None  # None: the method's default


_Output = Annotated[Path, typer.Option("--output", "-o", help="The new folder; nothing is overwritten.")]
_GroupSize = Annotated[
    int | None, typer.Option(help="Input channels per scale, -1: all.  [default: 128; fp8 and int8: -1]")
]
_Sym = Annotated[
    _Switch, typer.Option("--sym/--asym", help="Without or with zero points.  [default: --sym; awq: --asym]")
]
_Form = Annotated[
    str, typer.Option("--format", help="auto, awq, gptq, gptq_v2 or compressed-tensors: what is written.")
]
_ActOrder = Annotated[
    _Switch, typer.Option("--act-order/--no-act-order", help="gptq: large activations first.  [default: gptq yes]")
]
_Asymmetry = Annotated[
    float | None, typer.Option(help="gptq, awq: share of earlier layers' errors to make up for.  [default: 0.5]")
]
_Damping = Annotated[float, typer.Option(help="gptq, awq: share of the Hessian's mean added to its diagonal.")]
_Descent = Annotated[
    bool, typer.Option(help="gptq, awq: then move codes one by one to where the output's error is least.")
]
_ActivationsFrom = Annotated[
    int, typer.Option(help="fp8: inputs are rounded from this layer on, those before keep 16 bits.")
]
_Skip = Annotated[
    list[str] | None, typer.Option(help="A regular expression; linears whose name has it stay plain. Repeatable.")
]
_Calibration = Annotated[
    str | None, typer.Option(help="awq, gptq: a text or JSONL file, or a data set as NAME[:CONFIG].")
]
_Samples = Annotated[
    int | None, typer.Option(help="Windows of calibration text.  [default: 262,144 tokens, so 128 of 2048]")
]
_Seqlen = Annotated[int | None, typer.Option(help="Tokens per window.  [default: 2048, or the model's context]")]
_Evaluate = Annotated[
    Path | None, typer.Option(help="A text: its perplexity before and after.", exists=True, dir_okay=False)
]


def quantize(
    model: cli.Model,
    output: _Output,
    method: Annotated[str, typer.Option(help="awq, gptq, rtn, fp8 or int8.")] = "gptq",
    bits: Annotated[int | None, typer.Option(help="2, 3, 4 or 8.  [default: 4; fp8 and int8: 8]")] = None,
    group_size: _GroupSize = None,
    sym: _Sym = None,
    form: _Form = "auto",
    act_order: _ActOrder = None,
    static_groups: Annotated[bool, typer.Option(help="gptq with act-order: groups lie in the natural order.")] = True,
    mse: Annotated[_Switch, typer.Option(help="gptq, rtn: search each group's range.  [default: gptq yes]")] = None,
    scale: Annotated[bool, typer.Option("--scale", help="gptq: scale channels first, as awq does.")] = False,
    asymmetry: _Asymmetry = None,
    damping: _Damping = 0.01,
    true_sequential: Annotated[bool, typer.Option(help="gptq, awq: linears see what those before became.")] = True,
    clip: Annotated[bool, typer.Option(help="awq: search each group's range.")] = True,
    descent: _Descent = True,
    activations_from: _ActivationsFrom = 1,
    skip: _Skip = None,
    calibration: _Calibration = None,
    samples: _Samples = None,
    seqlen: _Seqlen = None,
    seed: Annotated[int, typer.Option(help="Which windows are drawn.")] = 0,
    device: cli.Device = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run into the same output.")] = False,
    evaluate: _Evaluate = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the error of each layer: a .png, .svg or .pdf file.")] = None,
    as_json: cli.JSONOutput = False,
) -> None:
    """Quantize a model's weights, layer by layer, on one GPU or a CPU.

    A model larger than the memory works: one layer is held at a time. A run that was stopped goes on with --resume.
    """
    options = {
        "method": method, "bits": bits, "group_size": group_size, "sym": sym, "format": form, "act_order": act_order,
        "static_groups": static_groups, "mse": mse, "scale": scale, "asymmetry": asymmetry, "damping": damping,
        "true_sequential": true_sequential, "clip": clip, "descent": descent, "activations_from": activations_from,
        "skip": tuple(skip or ()), "seed": seed, "samples": samples, "seqlen": seqlen,
    }  # fmt: skip
    support.check_plot(plot)
    from hf_paged.quant.quantize import quantize as run
    from hf_paged.quant.quantize_config import QuantizeConfig
    from hf_paged.quant.quantize_report import plot_errors

    config = cli.checked(QuantizeConfig, options)
    _check_calibration(config, calibration)
    cli.quiet_unless_terminal()
    text_ids = None if evaluate is None else _token_ids(cli.existing(model), evaluate)
    with _telling_how_to_go_on(output):
        report = run(cli.existing(model), config, calibration, output=output, device=cli.usable(device), resume=resume)
    if evaluate is not None and text_ids is not None:
        change = _evaluate(model, output, text_ids, device)
        report = replace(report, evaluation={"text": evaluate.name, **change})
        report.write(output / "quantize_report.json")
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    if plot is not None:
        plot_errors(report, plot)


def _check_calibration(config: QuantizeConfig, calibration: str | None) -> None:
    method = config.method
    if calibration is not None and not config.calibrated:
        raise typer.BadParameter(f"--calibration does not go with --method {method}, which looks at no activations")
    if calibration is None and config.calibrated:
        raise typer.BadParameter(f"--method {method} needs --calibration: a text or JSONL file, or a data set")


@contextmanager
def _telling_how_to_go_on(output: Path) -> Iterator[None]:
    """After Ctrl-C, where something was finished."""
    from hf_paged.quant.partial_output import partial_folder

    try:
        yield
    except KeyboardInterrupt:
        if partial_folder(output).exists():
            message = f"finished layers are in {partial_folder(output)}: --resume continues"
            cli.ERR.print(message, markup=False, highlight=False)
        raise


def _token_ids(model: str, text: Path) -> list[int]:
    """The text to evaluate on, read before the work that it is to judge."""
    from transformers import AutoTokenizer

    from hf_paged.eval.texts import read_text, token_ids_of

    ids = token_ids_of(AutoTokenizer.from_pretrained(model), read_text(text))
    if len(ids) < _FEWEST_TOKENS:
        raise ValueError(f"--evaluate {text} has {len(ids)} tokens; a perplexity needs {_FEWEST_TOKENS} or more")
    return ids


def _evaluate(model: str, output: Path, ids: list[int], device: str | None) -> dict[str, Any]:
    """Perplexity of both, as they load, over the whole text."""
    from hf_paged.eval.perplexity import measure_perplexity
    from hf_paged.eval.texts import context_of, windows_of

    window = min(2048, context_of(support.config_of(model)) or 2048, len(ids))
    results = []
    for path in (model, str(output)):
        loaded, _ = support.load(path, cli.DType.auto, device)
        total = sum(w.num_scored for w in windows_of(ids, window, None, None))
        with support.progress_bar(f"perplexity {Path(path).name}", total) as progress:
            results.append(measure_perplexity(loaded, ids, window=window, progress=progress))
        del loaded
    before, after = results
    change, stderr = after.change_from(before)
    return {
        "tokens": after.num_tokens,
        "window": after.window,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "change": change,
        "change_stderr": stderr,
    }


def _print(report: QuantizeReport) -> None:
    settings = report.settings
    measured = report.calibration is not None  # a layer's own error needs activations
    table = Table(title=f"{report.output}: {settings['method']}, {settings['bits']} bits", title_justify="left")
    for column in ("layer", *(["error"] if measured else []), "worst linear", "its error", "seconds"):
        table.add_column(column, justify="left" if column == "worst linear" else "right", overflow="fold")
    for layer in report.layers:
        if layer.linears:
            own = [f"{layer.error:.2e}"] if measured else []
            worst = layer.worst
            table.add_row(str(layer.index), *own, worst.name, f"{worst.error:.2e}", f"{layer.seconds:.1f}")
    cli.OUT.print(table, highlight=False)
    for name, reason in report.plain.items():
        cli.ERR.print(f"left plain: {name}: {reason}", markup=False, highlight=False)
    for note, names in report.notes().items():
        cli.ERR.print(f"{len(names)} linears, {names[0]} among them: {note}", markup=False, highlight=False)
    device = "" if report.peak_device_bytes is None else f", peak {report.peak_device_bytes / 2**30:.2f} GiB on the GPU"
    cli.OUT.print(
        f"{report.bytes_before / _MIB:,.1f} MiB became {report.bytes_after / _MIB:,.1f} MiB in {report.seconds:,.0f} s "
        f"on {report.device}{device}",
        highlight=False,
    )
    if report.calibration is not None:
        c = report.calibration
        cli.OUT.print(f"calibrated on {c['source']}, {c['samples']} windows of {c['seqlen']:,} tokens", highlight=False)
    if report.evaluation is not None:
        e = report.evaluation
        cli.OUT.print(
            f"perplexity on {e['text']}, {e['tokens']:,} tokens: {e['perplexity_before']:.4f} before, "
            f"{e['perplexity_after']:.4f} after ({e['change']:+.2%} ± {e['change_stderr']:.2%})",
            highlight=False,
        )
