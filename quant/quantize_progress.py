"""A bar while layers are quantized: which layer, its error, and how long it will take yet."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_paged.quant.quantize_report import LayerReport


class QuantizeProgress:
    """Shown on a terminal's stderr only; logs and pipes stay clean."""

    def __init__(self, layers: int, *, shown: bool) -> None:
        columns = (
            TextColumn("layer {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()))
        self._task = self._bar.add_task("", total=layers)

    def __enter__(self) -> QuantizeProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, report: LayerReport) -> None:
        error = report.error if report.error is not None else (report.worst.error if report.linears else 0.0)
        self._bar.update(self._task, advance=1, description=f"error {error:.2e}")
