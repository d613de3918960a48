"""While layers are quantized: which layer, what in it, its error, and how long it will take yet."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_paged.quant.quantize_report import LayerReport

_SILENCE = 20.0  # seconds after which a log is told what is at work


class QuantizeProgress:
    """On stderr: a bar on a terminal, in a log or a pipe a line per layer, and more where a layer takes long."""

    def __init__(self, layers: int, *, shown: bool) -> None:
        columns = (
            TextColumn("layer {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        terminal = sys.stderr.isatty()
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not (shown and terminal))
        self._task = self._bar.add_task("", total=layers)
        self._layers, self._lines, self._done, self._seconds = layers, shown and not terminal, 0, 0.0
        self._error = ""  # of the last layer
        self._spoke = time.monotonic()

    def __enter__(self) -> QuantizeProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """`what` is at work now: beside the bar, and in a log that has been silent for a while."""
        self._bar.update(self._task, description=f"{self._error}{what}")
        if time.monotonic() - self._spoke > _SILENCE:
            self._line(f"layer {self._done + 1}/{self._layers}: {what}")

    def advance(self, report: LayerReport) -> None:
        error = report.error if report.error is not None else (report.worst.error if report.linears else 0.0)
        self._error = f"error {error:.2e}, "
        self._bar.update(self._task, advance=1, description=f"error {error:.2e}")
        self._done += 1
        self._seconds += report.seconds
        left = self._seconds / self._done * (self._layers - self._done)
        self._line(f"layer {self._done}/{self._layers}: error {error:.2e}, {report.seconds:.1f} s, ETA {left:.0f} s")

    def _line(self, text: str) -> None:
        if self._lines:
            print(text, file=sys.stderr, flush=True)
            self._spoke = time.monotonic()
