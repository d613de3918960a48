"""What this machine can do at best, and how long a call takes: the figures that stand beside every benchmark.

Both roofs are measured in the same process as the benchmark, so they share its clocks, threads and neighbours.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # far larger than any last-level cache
_GEMM_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured roofs: bytes per second of a large copy (read + write), FLOP/s of a large square matrix product."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    def __str__(self) -> str:
        gb, tflop = self.bytes_per_s / 1e9, self.flops_per_s / 1e12
        return f"{self.name}: copy {gb:,.1f} GB/s, matrix product {tflop:,.3g} TFLOP/s"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of repeated runs."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device, *, repeats: int = 5, warmup: int = 1) -> Timing:
    """Wall time of `run()`, device work included; the warm-up runs are not counted."""
    runs = []
    for i in range(warmup + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if i >= warmup:
            runs.append(time.perf_counter() - start)
    return Timing(runs=tuple(runs))


def timed_together(
    runs: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 5, warmup: int = 1
) -> list[Timing]:
    """The timing of each run, taken in rounds, so that whatever else the machine does slows all of them alike."""
    seconds: list[list[float]] = [[] for _ in runs]
    for i in range(warmup + repeats):
        for own, run in zip(seconds, runs, strict=True):
            timing = timed(run, device, repeats=1, warmup=0)
            own += timing.runs if i >= warmup else ()
    return [Timing(runs=tuple(own)) for own in seconds]


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure both roofs, the best of five runs each; `dtype` is that of the matrix product."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), device)
    size = _GEMM_SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    product = timed(lambda: a @ a, device)
    return Machine(
        name=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {platform.processor()}".rstrip(", "),
        bytes_per_s=2 * source.numel() / min(copy.runs),
        flops_per_s=2 * size**3 / min(product.runs),
    )
