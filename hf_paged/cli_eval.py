"""`hf-paged eval`: what KV formats cost a model, measured through the pages that serve."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hf_paged import cli_eval_support as support
from hf_paged import cli_support as cli
from hf_paged.cli_eval_kv_error import kv_error
from hf_paged.cli_eval_longcontext import longcontext
from hf_paged.cli_eval_tasks import tasks
from hf_paged.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_paged.eval.divergence import Divergence
    from hf_paged.eval.perplexity import PerplexityResult

evaluate = typer.Typer(
    name="eval", help="Measure quality through the stored pages.", no_args_is_help=True, rich_markup_mode=None
)


@evaluate.callback()
def group() -> None:
    """Commands of this group measure quality; `bench` measures speed."""


@evaluate.command()
@cli.plain_errors
def perplexity(
    models: support.Models,
    text: support.TextFile = None,
    dataset: support.DatasetName = None,
    kv_cache_dtype: support.KVFormats = None,
    naive: support.Naive = False,
    recent: support.Recent = False,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window; default: 2048, or the context of a shorter model.")
    ] = None,
    stride: support.Stride = None,
    max_windows: support.MaxWindows = None,
    chunk: support.Chunk = None,
    kv_scales: support.KVScales = "auto",
    kv_error_budget: support.KVErrorBudget = "auto",
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
    plot: support.PlotFile = None,
) -> None:
    """Perplexity of a text for several KV formats and models, and the change that each format makes.

    The text is one stretch of tokens, cut into windows; without a stride they do not overlap. Every window is read
    through the engine's pages: what a format loses is in the figure. A change is relative to "auto", or to the first
    format if that is not listed, with the standard error of the paired differences.
    """
    options = support.engine_options(block_size, kv_scales, kv_error_budget)
    caches = support.caches_of(support.formats_of(kv_cache_dtype, default="auto,fp8,int8"), naive, recent)
    support.check_source(text, dataset)
    support.check_plot(plot)
    from hf_paged.eval.texts import check_windows, context_of

    windows: dict[str, int] = {}
    for model in dict.fromkeys(models):
        context = context_of(support.config_of(model))
        windows[model] = window or min(2048, context or 2048)
        check_windows(windows[model], stride, max_windows, context)
    content = support.text_of(text, dataset)
    results = {}
    for model in windows:
        settings = {"window": windows[model], "stride": stride, "limit": max_windows, "chunk": chunk, **options}
        results[model] = _measure(*support.load(model, dtype, device), content, model, caches, settings)
    source = str(text) if text is not None else str(dataset)
    if as_json:
        print(json.dumps({"text": source, "results": _perplexity_rows(results)}))
    else:
        _print_perplexity(source, results)
    if plot is not None:  # last: a picture that fails costs no result
        from hf_paged.eval.plots import plot_perplexity

        plot_perplexity(_perplexity_rows(results), plot)


def _measure(
    model: PreTrainedModel, tokenizer: Any, text: str, name: str, caches: list[dict[str, Any]], settings: dict[str, Any]
) -> list[PerplexityResult]:
    """One result per cache; `name` is the model's, for the progress bar."""
    from hf_paged.eval.perplexity import measure_perplexity
    from hf_paged.eval.texts import token_ids_of, windows_of

    ids = token_ids_of(tokenizer, text)
    total = sum(w.num_scored for w in windows_of(ids, settings["window"], settings["stride"], settings["limit"]))
    results = []
    for cache in caches:
        with support.progress_bar(f"{name} {support.name_of(cache)}", total) as progress:
            results.append(measure_perplexity(model, ids, progress=progress, **{**settings, **cache}))
    return results


def _change(result: PerplexityResult, rows: list[PerplexityResult]) -> tuple[float, float]:
    return result.change_from(_base(rows))


def _base(rows: list[PerplexityResult]) -> PerplexityResult:
    return next((row for row in rows if row.kv_cache_dtype == "auto"), rows[0])


def _perplexity_rows(results: dict[str, list[PerplexityResult]]) -> list[dict[str, Any]]:
    found = []
    for model, rows in results.items():
        for row in rows:
            change, stderr = _change(row, rows)
            found.append({"model": model, **row.as_dict(), "change": change, "change_stderr": stderr})
    return found


def _print_perplexity(source: str, results: dict[str, list[PerplexityResult]]) -> None:
    for model, rows in results.items():
        windows = f"{rows[0].num_windows:,} windows of {rows[0].window:,}, stride {rows[0].stride:,}"
        table = Table(
            title=f"{model} on {source}: {rows[0].num_tokens:,} tokens scored, {windows}", title_justify="left"
        )
        for column in ("KV", "bytes/token", "protected", "perplexity", "change"):
            table.add_column(column, justify="left" if column == "KV" else "right", overflow="fold")
        for row in rows:
            change, stderr = _change(row, rows)
            table.add_row(
                row.name,
                f"{row.bytes_per_token:,.0f}",
                f"{row.protected_layers} layers" if row.protected_layers else "",
                f"{row.perplexity:.4f} ± {row.stderr:.4f}",
                "" if row is _base(rows) else f"{change:+.3%} ± {stderr:.3%}",
            )
        cli.OUT.print(table, highlight=False)


@evaluate.command()
@cli.plain_errors
def divergence(
    model: cli.Model,
    text: support.TextFile = None,
    dataset: support.DatasetName = None,
    kv_cache_dtype: support.KVFormats = None,
    naive: support.Naive = False,
    recent: support.Recent = False,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window; default: 1024, or the context of a shorter model.")
    ] = None,
    stride: support.Stride = None,
    max_windows: support.MaxWindows = None,
    worst: Annotated[int, typer.Option(min=0, help="Tokens to show per format, those of the largest KL.")] = 5,
    chunk: support.Chunk = None,
    kv_scales: support.KVScales = "auto",
    kv_error_budget: support.KVErrorBudget = "auto",
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
    plot: support.PlotFile = None,
) -> None:
    """KL divergence, top-1 agreement and worst tokens of KV formats.

    Against 16-bit pages, teacher-forced: every token is predicted from the text before it.
    """
    options = support.engine_options(block_size, kv_scales, kv_error_budget)
    caches = support.caches_of(support.formats_of(kv_cache_dtype, default="fp8,int8"), naive, recent)
    support.check_source(text, dataset)
    support.check_plot(plot)
    from hf_paged.eval.divergence import measure_divergence
    from hf_paged.eval.texts import check_windows, context_of, token_ids_of, windows_of

    context = context_of(support.config_of(model))
    window = window or min(1024, context or 1024)
    check_windows(window, stride, max_windows, context)
    content = support.text_of(text, dataset)
    loaded, tokenizer = support.load(model, dtype, device)
    ids = token_ids_of(tokenizer, content)
    total = sum(w.num_scored for w in windows_of(ids, window, stride, max_windows))
    with support.progress_bar(model, total) as progress:
        results = measure_divergence(
            loaded, ids, caches, window=window, stride=stride, limit=max_windows, num_worst=worst, chunk=chunk,
            progress=progress, **options,
        )  # fmt: skip
    source = str(text) if text is not None else str(dataset)
    rows = [result.as_dict() for result in results]
    if as_json:
        facts = {"model": model, "text": source, "window": window, "stride": stride or window}
        print(json.dumps({**facts, "results": rows}))
    else:
        scored = f"{results[0].num_tokens:,} tokens scored in windows of {window:,}, stride {stride or window:,}"
        reference = f"perplexity over 16-bit pages {results[0].reference_perplexity:.4f}"
        _print_divergence(f"{model} on {source}: {scored}; {reference}", results)
        _print_worst(results, ids, tokenizer)
    if plot is not None:  # last: a picture that fails costs no result
        from hf_paged.eval.plots import plot_divergence

        plot_divergence(rows, plot)


def _print_divergence(title: str, results: list[Divergence]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("KV", "bytes/token", "top-1", "mean KL", "99% KL", "max KL", "|d logprob|", "perplexity"):
        table.add_column(column, justify="left" if column == "KV" else "right", overflow="fold")
    for r in results:
        table.add_row(
            r.name,
            f"{r.bytes_per_token:,.0f}",
            f"{r.top1_agreement:.2%}",
            f"{r.mean_kl:.2e}",
            f"{r.p99_kl:.2e}",
            f"{r.max_kl:.2e}",
            f"{r.mean_abs_delta:.4f}",
            f"{r.perplexity:.4f}",
        )
    cli.OUT.print(table, highlight=False)


def _print_worst(results: list[Divergence], ids: list[int], tokenizer: Any) -> None:
    table = Table(title="worst tokens, by KL", title_justify="left")
    for column in ("KV", "position", "after", "token", "KL", "logprob", "16-bit"):
        table.add_column(column, justify="left" if column in ("KV", "after", "token") else "right")
    for r in results:
        for token in r.worst:
            before = tokenizer.decode(ids[max(0, token.position - 8) : token.position])
            table.add_row(
                r.name,
                f"{token.position:,}",
                Text(repr(before)[-32:]),  # brackets in a text are no markup
                Text(repr(tokenizer.decode([token.token_id]))),
                f"{token.kl:.3f}",
                f"{token.logprob:.3f}",
                f"{token.reference_logprob:.3f}",
            )
    if table.row_count:
        cli.OUT.print(table, highlight=False)


evaluate.command()(cli.plain_errors(longcontext))
evaluate.command()(cli.plain_errors(kv_error))
evaluate.command()(cli.plain_errors(tasks))
