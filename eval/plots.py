"""Pictures of what the eval commands measured. matplotlib is imported when a picture is drawn, and never its `pyplot`:
no global state, no window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.eval.perplexity import PerplexityResult

_DPI = 150


def plot_perplexity(results: Mapping[str, Sequence[tuple[PerplexityResult, float, float]]], file: Path) -> None:
    """Change of the perplexity against bytes per token, one panel per model.

    Args:
        results: by model, each format's result, its change and the standard error of that.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, (model, rows) in zip(panels, results.items(), strict=True):
        for row, change, stderr in rows:
            panel.errorbar(row.bytes_per_token, 100 * change, 100 * stderr, fmt="o", capsize=3)
            panel.annotate(row.kv_cache_dtype, (row.bytes_per_token, 100 * change), (6, 6), textcoords="offset points")
        panel.axhline(0, color="0.7", linewidth=0.8)
        panel.margins(x=0.25, y=0.2)
        panel.set_title(Path(model).name, fontsize=10)
        panel.set_xlabel("KV bytes per token")
    panels[0].set_ylabel("change of perplexity, %")
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
