"""`hf-paged eval kv-error`: which layers and heads a KV format hurts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hf_paged import cli_eval_support as support
from hf_paged import cli_support as cli
from hf_paged.config import EngineConfig, refuse

if TYPE_CHECKING:
    from hf_paged.eval.kv_error import LayerError


def kv_error(
    model: cli.Model,
    text: support.TextFile = None,
    dataset: support.DatasetName = None,
    kv_cache_dtype: support.KVFormats = None,
    naive: support.Naive = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens to read, from the start of the text; default: 1024, or the context of a shorter model."
        ),
    ] = None,
    kv_scales: support.KVScales = "auto",
    kv_error_budget: support.KVErrorBudget = "auto",
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
    plot: support.PlotFile = None,
) -> None:
    """Errors of K, V, scores and attention's output by layer and head, each layer fed with exact inputs.

    K is relative to the keys' deviation from their mean, V and the output to themselves, scores are in units of a
    logit. The table shows the worst head of each layer; --json and --plot show all of them.
    """
    options = support.engine_options(block_size, kv_scales, kv_error_budget)
    caches = support.caches_of(support.formats_of(kv_cache_dtype, default="fp8,int8"), naive)
    support.check_source(text, dataset)
    support.check_plot(plot)
    from hf_paged.eval.kv_error import measure_kv_error
    from hf_paged.eval.texts import context_of, token_ids_of, windows_of

    context = context_of(support.config_of(model))
    if tokens is not None and context is not None and tokens > context:
        refuse("tokens", tokens, f"2..{context}, the context of the model")
    tokens = tokens or min(1024, context or 1024)
    content = support.text_of(text, dataset)
    loaded, tokenizer = support.load(model, dtype, device)
    (window,) = windows_of(token_ids_of(tokenizer, content), tokens, limit=1)
    results = {}
    with support.progress_bar(model, len(caches)) as progress:
        for cache in caches:
            results[support.name_of(cache)] = measure_kv_error(loaded, window.token_ids, **{**options, **cache})
            progress(1)
    if as_json:
        rows = {name: [error.as_dict() for error in errors] for name, errors in results.items()}
        print(json.dumps({"model": model, "tokens": tokens, "results": rows}))
    else:
        for name, errors in results.items():
            _print(f"{model}, KV {name}, {tokens:,} tokens: worst head of each layer", errors)
    if plot is not None:  # last: a picture that fails costs no result
        from hf_paged.eval.plots import plot_kv_error

        plot_kv_error(results, plot)


def _print(title: str, errors: list[LayerError]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("layer", "bytes/token", "K", "V", "score", "output"):
        table.add_column(column, justify="right", overflow="fold")
    for error in errors:
        worst = [max(heads) for heads in (error.key, error.value, error.score, error.output)]
        table.add_row(
            str(error.layer_idx),
            f"{error.bytes_per_token:,}",
            f"{worst[0]:.2%}",
            f"{worst[1]:.2%}",
            f"{worst[2]:.4f}",
            f"{worst[3]:.2%}",
        )
    cli.OUT.print(table, highlight=False)
