"""`hf-paged eval longcontext`: is a key found, however long the text and wherever it stands?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hf_paged import cli_eval_support as support
from hf_paged import cli_support as cli
from hf_paged.config import EngineConfig

if TYPE_CHECKING:
    from hf_paged.eval.longcontext import RetrievalResult


def longcontext(
    model: cli.Model,
    kv_cache_dtype: support.KVFormats = None,
    naive: support.Naive = False,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens, e.g. 512,2048; default: a quarter, half and all of the context."),
    ] = None,
    depths: Annotated[str, typer.Option(help="Where the key stands, in percent of the text.")] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(min=1, help="Texts per length and depth, each with its own key.")] = 4,
    filler: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text to hide the key in; default: five sentences, repeated.", dir_okay=False, exists=True
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the keys.")] = 0,
    chunk: support.Chunk = None,
    kv_scales: support.KVScales = "auto",
    kv_error_budget: support.KVErrorBudget = "auto",
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
    plot: support.PlotFile = None,
) -> None:
    """Passkey retrieval by length and depth: the share of keys found, and their mean log-probability."""
    options = support.engine_options(block_size, kv_scales, kv_error_budget)
    caches = support.caches_of(support.formats_of(kv_cache_dtype, default="auto,fp8,int8"), naive)
    percents = [float(depth) for depth in _numbers("depths", depths, maximum=100)]
    asked = None if lengths is None else _numbers("lengths", lengths, maximum=2**31)
    support.check_plot(plot)
    from hf_paged.eval.longcontext import FILLER, make_cases, measure_retrieval
    from hf_paged.eval.texts import context_of, read_text

    context = context_of(support.config_of(model)) or 2048
    usual = [length for length in (context // 4, context // 2, context) if length >= 256]  # room for the question
    wanted = asked or usual or [context]
    if max(wanted) > context:
        raise typer.BadParameter(f"--lengths {max(wanted)} is not allowed; allowed: at most {context}, the context")
    text = FILLER if filler is None else read_text(filler)
    loaded, tokenizer = support.load(model, dtype, device)
    cases = make_cases(
        tokenizer, lengths=wanted, depths=[p / 100 for p in percents], trials=trials, seed=seed, filler=text
    )
    results = []
    for cache in caches:
        with support.progress_bar(
            f"{model} {support.name_of(cache)}", sum(case.window.num_scored for case in cases)
        ) as progress:
            results.append(measure_retrieval(loaded, cases, chunk=chunk, progress=progress, **{**options, **cache}))
    if as_json:
        print(json.dumps({"model": model, "seed": seed, "results": [result.as_dict() for result in results]}))
    else:
        for result in results:
            _print(f"{model}, KV {result.name}", result, wanted, percents)
    if plot is not None:  # last: a picture that fails costs no result
        _plot(results, wanted, percents, plot)


def _numbers(name: str, text: str, *, maximum: int) -> list[int]:
    """The integers of a list with commas, in 0..maximum, each once."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) <= maximum for word in words):
        raise typer.BadParameter(f"--{name} {text!r} is not allowed; allowed: integers in 0..{maximum} with commas")
    return list(dict.fromkeys(int(word) for word in words))


def _print(title: str, result: RetrievalResult, lengths: list[int], depths: list[float]) -> None:
    table = Table(title=f"{title}: {result.retrieved:.1%} of the keys found", title_justify="left")
    table.add_column("tokens", justify="right", overflow="fold")
    for depth in depths:
        table.add_column(f"{depth:g}%", justify="right", overflow="fold")
    cells = {(cell.length, cell.depth): cell for cell in result.cells}
    for length in lengths:
        row = [cells[length, depth / 100] for depth in depths]
        table.add_row(f"{length:,}", *(f"{cell.retrieved:.0%} {cell.logprob:.2f}" for cell in row))
    cli.OUT.print(table, highlight=False)
    cli.OUT.print(
        f"Each cell: the share of {result.trials} keys found, and the mean log-probability of a token of the key"
    )


def _plot(results: list[RetrievalResult], lengths: list[int], depths: list[float], file: Path) -> None:
    from hf_paged.eval.plots import plot_heat_maps

    panels = {}
    for result in results:
        cells = {(cell.length, cell.depth): cell.retrieved for cell in result.cells}
        panels[result.name] = [[cells[length, depth / 100] for length in lengths] for depth in depths]
    plot_heat_maps(
        panels, file, rows=[f"{depth:g}%" for depth in depths], columns=lengths,
        labels=("depth of the key", "tokens", "keys found"), limits=(0.0, 1.0),
    )  # fmt: skip
