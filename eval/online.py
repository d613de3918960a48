"""Requests that arrive over time: how long until the first token and between tokens while others come and go.

Arrivals are a Poisson process of a given rate, seed 0; an infinite rate lets all come at once. The engine is stepped by
this loop alone, so a figure holds scheduling, launches, the device and the way of tokens back to the host.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_paged.eval.machine import Machine, measure_machine
from hf_paged.eval.throughput import greedy, make_llm
from hf_paged.eval.workload import Workload
from hf_paged.llm import LLM

_WARM_UP = 16  # requests
_LEAST_RATE = 1e-6  # requests per second: one in eleven days


@dataclass(frozen=True, kw_only=True)
class OnlineResult:
    """Milliseconds over all requests and repeats; `rate` in requests per second, `tokens_per_s` from first to last.

    `between` holds the percentiles 0..100 of the times between tokens.
    """

    system: str
    kv_cache: str
    rate: float
    tokens_per_s: float
    first_mean: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    between: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        rate = None if math.isinf(self.rate) else self.rate  # JSON has no infinity
        return asdict(self) | {"rate": rate}


def check_rate(rate: float) -> None:
    """Raise ValueError for a rate at which requests never come."""
    if not rate >= _LEAST_RATE:
        raise ValueError(f"rate={rate} is not allowed; allowed: requests per second, {_LEAST_RATE:g} or more")


def measure_online(
    model: PreTrainedModel,
    workload: Workload,
    *,
    rate: float = math.inf,
    engine_options: dict[str, Any] | None = None,
    repeats: int = 1,
) -> tuple[Machine, OnlineResult]:
    """Serve `workload` with its requests arriving at `rate` per second; every run starts cold.

    Before, all graphs are captured and the first requests served together, which compiles kernels.

    Raises:
        ValueError: `rate` is not one of `check_rate`, or the workload is longer than the model's context.
    """
    check_rate(rate)
    llm = make_llm(model, [workload], engine_options or {})
    machine = measure_machine(model.device, model.dtype)
    prompts, arrivals = workload.prompts(llm.engine.vocab_size), _arrivals(len(workload.prompt_lens), rate)
    llm.engine.runner.capture_graphs()
    _serve(llm, workload, prompts[:_WARM_UP], _arrivals(_WARM_UP, math.inf))
    runs = [_serve(llm, workload, prompts, arrivals) for _ in range(repeats)]
    first = np.concatenate([[times[0] for times in run] for run in runs]) * 1e3
    between = np.concatenate([np.diff(times) for run in runs for times in run]) * 1e3
    spans = [max(a + times[-1] for a, times in zip(arrivals, run, strict=True)) for run in runs]
    percentiles = tuple(np.percentile(between if between.size else [0.0], range(101)).tolist())
    return machine, OnlineResult(
        system="hf_paged",
        kv_cache=llm.engine.config.kv_cache_dtype,
        rate=rate,
        tokens_per_s=workload.generated_tokens * len(runs) / sum(spans),
        first_mean=float(first.mean()),
        first_p50=float(np.percentile(first, 50)),
        first_p99=float(np.percentile(first, 99)),
        between_p50=percentiles[50],
        between_p99=percentiles[99],
        between=percentiles,
    )


def _arrivals(count: int, rate: float) -> list[float]:
    """Seconds after the start."""
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(0)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += generator.expovariate(rate)
        arrivals.append(at)
    return arrivals


def _serve(llm: LLM, workload: Workload, prompts: Sequence[list[int]], arrivals: Sequence[float]) -> list[list[float]]:
    """Seconds from its arrival to each token of every request."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    times: list[list[float]] = [[] for _ in prompts]
    start, coming = time.perf_counter(), 0
    while coming < len(prompts) or engine.has_work:
        now = time.perf_counter() - start
        while coming < len(prompts) and arrivals[coming] <= now:
            engine.add_request(str(coming), prompts[coming], greedy(workload.output_lens[coming]), stream=True)
            coming += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[coming] - now))
            continue
        for output in engine.step():
            index, arrived = int(output.request_id), time.perf_counter() - start
            if output.error is not None:
                raise RuntimeError(f"request {index} failed: {output.error}")
            new = len(output.outputs[0].token_ids) - len(times[index])
            times[index] += [arrived - arrivals[index]] * new
    return times
