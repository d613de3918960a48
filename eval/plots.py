"""Pictures of what the eval and bench commands measured. matplotlib is imported when a picture is drawn, and never its
`pyplot`: no global state, no window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.eval.kv_error import LayerError

_DPI = 150


def plot_perplexity(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Change of the perplexity against bytes per token, one panel per model; `rows` as in the JSON of the command.

    A format has one colour; hollow is naive. The scale of changes is linear up to 0.1%, then logarithmic.
    """
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4.2 * len(models) + 1.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for panel, model in zip(panels, models, strict=True):
        for row in rows:
            if row["model"] == model:
                change, stderr = 100 * row["change"], 100 * row["change_stderr"]
                panel.errorbar(row["bytes_per_token"], change, stderr, **_style(row, rows))
        panel.axhline(0, color="0.7", linewidth=0.8)
        panel.set_yscale("symlog", linthresh=0.1)
        panel.set_title(Path(model).name, fontsize=10)
        panel.set_xlabel("KV bytes per token")
    panels[0].set_ylabel("change of perplexity, %")
    _add_legend(figure, panels)
    figure.savefig(file, dpi=_DPI)


def plot_divergence(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Mean KL divergence, with a line up to that of 99% of the tokens, and the share of other top-1 tokens, against
    bytes per token; `rows` as in the JSON of the command. A format has one colour; hollow is naive.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for row in rows:
        size, upwards = row["bytes_per_token"], [[0.0], [max(row["p99_kl"] - row["mean_kl"], 0.0)]]
        panels[0].errorbar(size, row["mean_kl"], upwards, **_style(row, rows))
        panels[1].errorbar(size, 100 * (1 - row["top1_agreement"]), **_style(row, rows))
    panels[0].set_yscale("log")
    panels[0].set_ylabel("KL divergence, nats: mean to 99%")
    panels[1].set_ylim(bottom=0)
    panels[1].set_ylabel("other top-1 tokens, %")
    for panel in panels:
        panel.set_xlabel("KV bytes per token")
    _add_legend(figure, panels[:1])
    figure.savefig(file, dpi=_DPI)


def plot_tasks(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """The value of every metric by KV cache, with its standard error; `rows` as in the JSON of the command."""
    from matplotlib.figure import Figure

    names = [f"{row['task']}\n{row['metric']}" for row in rows]
    titles, caches = list(dict.fromkeys(names)), list(dict.fromkeys(row["kv_cache"] for row in rows))
    figure = Figure(figsize=(1.6 + 2.4 * len(titles), 1.4 + 0.3 * len(caches)), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    for name, row in zip(names, rows, strict=True):
        place = caches.index(row["kv_cache"])
        panels[titles.index(name)].errorbar(row["value"], place, xerr=row["stderr"], fmt="o", capsize=3, color="C0")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=9)
    panels[0].set_yticks(range(len(caches)), caches, fontsize=8)
    panels[0].set_ylim(len(caches) - 0.5, -0.5)
    figure.savefig(file, dpi=_DPI)


def _style(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the cache of a row looks among those of `rows`."""
    name = row["kv_cache_dtype"]
    formats = list(dict.fromkeys(other["kv_cache_dtype"] for other in rows))
    is_naive = row["kv_scales"] == "off" and name != "auto"
    return {
        "fmt": "s" if row.get("kv_recent_block") else "o",
        "capsize": 3,
        "color": f"C{formats.index(name)}",
        "markerfacecolor": "none" if is_naive else None,
        "label": f"{name}{' naive' if is_naive else ''}{' + recent block' if row.get('kv_recent_block') else ''}",
    }


def _add_legend(figure: Any, panels: Any) -> None:
    """One for all panels, none of which need have all."""
    named = (zip(*reversed(panel.get_legend_handles_labels()), strict=True) for panel in panels)
    handles = dict(pair for pairs in named for pair in pairs)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)


def plot_throughput(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Tokens per second, one panel per workload and a bar per system, with its roof as a mark; `rows` as in the JSON of
    the command. A row without a `ceiling` (a figure from elsewhere) has a pale bar.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(f"{row['system']}, {row['kv_cache']}" for row in rows))
    figure = Figure(figsize=(1.5 + 2.6 * len(workloads), 1.2 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        shown = [row for row in rows if row["workload"] == workload]
        limit = 1.25 * max(row.get("ceiling") or row["tokens_per_s"] for row in shown)
        for row in shown:
            place, ceiling = names.index(f"{row['system']}, {row['kv_cache']}"), row.get("ceiling")
            speed, inside = row["tokens_per_s"], row["tokens_per_s"] > 0.15 * limit
            panel.barh(place, speed, color="C0" if ceiling else "0.75")
            panel.text(
                speed, place, f" {speed:,.0f} ", va="center", ha="right" if inside else "left", fontsize=7,
                color="white" if ceiling and inside else "black",
            )  # fmt: skip
            if ceiling:
                panel.plot([ceiling, ceiling], [place - 0.4, place + 0.4], color="C3")
        panel.set_title(workload, fontsize=9)
        panel.set_xlim(0, limit)
        panel.set_xlabel("tokens per second", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.locator_params(axis="x", nbins=4)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    figure.savefig(file, dpi=_DPI)


def plot_online(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Which share of the times between tokens is at most so long; `rows` as in the command's JSON, with `label`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    for row in (row for row in rows if row["between"]):
        axis.step(row["between"], range(len(row["between"])), where="post", label=row["label"])
    axis.set_xscale("log")
    axis.set_xlabel("time between tokens, ms")
    axis.set_ylabel("% of tokens")
    axis.legend(fontsize=8)
    figure.savefig(file, dpi=_DPI)


def plot_heat_maps(
    panels: Mapping[str, Sequence[Sequence[float]]],
    file: Path,
    *,
    rows: Sequence[object],
    columns: Sequence[object],
    labels: tuple[str, str, str],
    limits: tuple[float, float] | None = None,
) -> None:
    """Tables of numbers `[rows][columns]` as colours on one scale, side by side.

    Args:
        panels: by title.
        labels: of the rows, the columns and the colours.
        limits: of the colours; None = those of the numbers.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(1.2 + (1.6 + 0.32 * len(columns)) * len(panels), 1.8 + 0.28 * len(rows)), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    flat = [x for table in panels.values() for row in table for x in row]
    low, high = limits or (min(flat), max(flat))
    image: Any = None
    for axis, (title, table) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(table, vmin=low, vmax=high, aspect="auto", cmap="viridis")
        axis.set_xticks(range(len(columns)), [str(c) for c in columns], fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(labels[1])
    axes[0].set_yticks(range(len(rows)), [str(r) for r in rows], fontsize=7)
    axes[0].set_ylabel(labels[0])
    figure.colorbar(image, ax=axes, label=labels[2])
    figure.savefig(file, dpi=_DPI)


def plot_kv_error(results: Mapping[str, Sequence[LayerError]], file: Path) -> None:
    """A map [layer, head] of each kind of error, one row of maps per format; colours are logarithmic."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    kinds = {"key": "K", "value": "V", "score": "scores", "output": "output"}
    num_layers = len(next(iter(results.values())))
    figure = Figure(figsize=(12, len(results) * (1.4 + 0.12 * num_layers)), layout="constrained")
    grid = figure.subplots(len(results), len(kinds), squeeze=False)
    for j, (kind, title) in enumerate(kinds.items()):
        tables = [[getattr(error, kind) for error in errors] for errors in results.values()]
        positive = [x for table in tables for heads in table for x in heads if x > 0] or [1.0]
        norm = LogNorm(min(positive), max(max(positive), 1.01 * min(positive)))
        image: Any = None
        for axis, name, table in zip(grid[:, j], results, tables, strict=True):
            image = axis.imshow(table, norm=norm, aspect="auto", cmap="viridis")
            axis.set_title(f"{name}: {title}", fontsize=9)
            axis.set_xlabel("KV head" if kind in ("key", "value") else "head", fontsize=8)
            axis.set_ylabel("layer", fontsize=8)
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=list(grid[:, j]))
    figure.savefig(file, dpi=_DPI)
