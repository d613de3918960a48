"""`hf-paged eval tasks`: the tasks of lm-eval, through the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_paged import cli_eval_support as support
from hf_paged import cli_support as cli
from hf_paged.config import EngineConfig


def tasks(
    model: cli.Model,
    names: Annotated[str, typer.Option("--tasks", help="Tasks of lm-eval with commas, e.g. arc_easy,hellaswag.")],
    kv_cache_dtype: support.KVFormats = None,
    naive: support.Naive = False,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder of further tasks (YAML).", exists=True, file_okay=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per task; default: all.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt; default: the task's.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of context and answer; default: 4096.")] = None,
    kv_scales: support.KVScales = "auto",
    kv_error_budget: support.KVErrorBudget = "auto",
    block_size: cli.BlockSize = EngineConfig.block_size,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    as_json: cli.JSONOutput = False,
    plot: support.PlotFile = None,
) -> None:
    """Accuracy and other metrics of lm-eval tasks for several KV formats."""
    options = support.engine_options(block_size, kv_scales, kv_error_budget)
    caches = support.caches_of(support.formats_of(kv_cache_dtype, default="auto,int8"), naive)
    support.check_plot(plot)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError('eval tasks needs the package lm-eval: pip install "hf_paged[tasks]"') from error
    from hf_paged.eval.tasks import PagedLM

    wanted = [name.strip() for name in names.split(",")]
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in wanted if not manager.match_tasks([name])]:
        raise ValueError(f"lm-eval knows no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    support.config_of(model)
    loaded, tokenizer = support.load(model, dtype, device)

    def rows_of(cache: dict[str, Any]) -> list[dict[str, Any]]:
        """One format; its engines and their blocks are gone when this returns."""
        paged = PagedLM(loaded, tokenizer, max_length=max_length, **{**options, **cache})
        found = lm_eval.simple_evaluate(
            model=paged, tasks=wanted, num_fewshot=num_fewshot, limit=limit, apply_chat_template=chat,
            task_manager=manager, log_samples=False,
        )  # fmt: skip
        cost = paged.bytes_per_token
        return [{"kv_cache": support.name_of(cache), "bytes_per_token": cost, **row} for row in metrics(found)]

    rows = [row for cache in caches for row in rows_of(cache)]
    if as_json:
        print(json.dumps({"model": model, "limit": limit, "results": rows}))
    else:
        _print(f"{model}: lm-eval {lm_eval.__version__}", rows)
    if plot is not None:  # last: a picture that fails costs no result
        from hf_paged.eval.plots import plot_tasks

        plot_tasks(rows, plot)


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric", "KV", "bytes/token", "value"):
        table.add_column(column, justify="right" if column in ("bytes/token", "value") else "left", overflow="fold")
    for row in sorted(rows, key=lambda row: (row["task"], row["metric"])):
        stderr = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
        cost = f"{row['bytes_per_token']:,.0f}"
        table.add_row(row["task"], row["metric"], row["kv_cache"], cost, f"{row['value']:.4f}{stderr}")
    cli.OUT.print(table, highlight=False)


def metrics(found: dict[str, Any]) -> list[dict[str, Any]]:
    """`task`, `metric`, `filter`, `value` and `stderr` (None: there is none) of all results of lm-eval."""
    rows = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr"):
                continue
            stderr = values.get(f"{metric}_stderr,{chosen}")
            known = isinstance(stderr, float) and stderr == stderr  # lm-eval writes "N/A" or NaN
            row = {
                "task": task,
                "metric": metric,
                "filter": chosen,
                "value": value,
                "stderr": stderr if known else None,
            }
            rows.append(row)
    return rows
