"""Requests that arrive over time: how long until the first token and between tokens while others come and go.

Arrivals are a Poisson process of a given rate, seed 0; an infinite rate lets all come at once, and a load is a share
of the rate at which those are served. The engine is stepped by this loop alone, so a figure holds scheduling, launches,
the device and the way of tokens back to the host.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_paged.eval.machine import Machine, measure_machine
from hf_paged.eval.throughput import greedy, make_llm, weight_sizes
from hf_paged.eval.workload import Workload, least_seconds
from hf_paged.llm import LLM

_WARM_UP = 16  # requests
_LEAST_RATE = 1e-6  # requests per second: one in eleven days


@dataclass(frozen=True, kw_only=True)
class OnlineResult:
    """Milliseconds over all requests and repeats; `rate` in requests per second, `tokens_per_s` from first to last.

    `between` holds the percentiles 0..100 of the times between tokens, None where no request has two tokens. `ceiling`,
    tokens per second, is the roof of requests that all come at once (see `least_seconds`).
    """

    system: str
    kv_cache: str
    requests: int
    rate: float
    tokens_per_s: float
    ceiling: float | None
    first_mean: float
    first_p50: float
    first_p99: float
    between_p50: float | None
    between_p99: float | None
    between: tuple[float, ...] | None

    def as_dict(self) -> dict[str, Any]:
        rate = None if math.isinf(self.rate) else self.rate  # JSON has no infinity
        return asdict(self) | {"rate": rate}


def check_rate(rate: float) -> None:
    """Raise ValueError for a rate at which requests never come."""
    if not rate >= _LEAST_RATE:
        raise ValueError(f"rate={rate} is not allowed; allowed: requests per second, {_LEAST_RATE:g} or more")


def check_load(load: float) -> None:
    """Raise ValueError for a share of the highest rate that no queue survives, or none."""
    if not 0 < load < 1:
        raise ValueError(
            f"load={load} is not allowed; allowed: a share of the rate of all at once, above 0 and below 1"
        )


def measure_online(
    model: PreTrainedModel,
    workload: Workload,
    *,
    rate: float = math.inf,
    load: float | None = None,
    arrivals: int | None = None,
    engine_options: dict[str, Any] | None = None,
    repeats: int = 1,
) -> tuple[Machine, list[OnlineResult]]:
    """Serve `workload` with its requests arriving at `rate` per second; every run starts cold.

    Before, either all graphs are captured and the first requests served together, which compiles kernels, or, where all
    come at once and so always meet the same steps, the work is done once.

    Args:
        load: first all at once, then (the second result) arriving at this share of the rate that was reached.
        arrivals: how many of the requests arrive over time; None = all.

    Raises:
        ValueError: `rate` or `load` is none of `check_rate` or `check_load`, or the workload is longer than the model's
            context.
    """
    check_rate(rate)
    llm = make_llm(model, [workload], engine_options or {})
    machine = measure_machine(model.device, model.dtype)
    if math.isinf(rate) and load is None:
        _serve(llm, workload, math.inf, len(workload.prompt_lens))
    else:
        llm.engine.runner.capture_graphs()
        _serve(llm, workload, math.inf, min(_WARM_UP, len(workload.prompt_lens)))
    count = len(workload.prompt_lens)
    if load is None:
        return machine, [_measured(llm, workload, machine, rate, arrivals or count, repeats)]
    check_load(load)
    at_once = _measured(llm, workload, machine, math.inf, count, repeats)
    rate = load * at_once.tokens_per_s / (workload.generated_tokens / count)
    return machine, [at_once, _measured(llm, workload, machine, rate, arrivals or count, repeats)]


def _measured(llm: LLM, workload: Workload, machine: Machine, rate: float, count: int, repeats: int) -> OnlineResult:
    runs = [_serve(llm, workload, rate, count) for _ in range(repeats)]
    first = np.concatenate([[times[0] - at for at, times in run] for run in runs]) * 1e3
    between = np.concatenate([np.diff(times) for run in runs for _, times in run]) * 1e3
    percentiles: tuple[float, ...] = tuple(np.percentile(between, range(101)).tolist()) if between.size else ()
    tokens = sum(len(times) for run in runs for _, times in run)
    least = least_seconds(
        machine, workload.prompt_lens, workload.output_lens, max_num_seqs=workload.max_num_seqs,
        kv_bytes_per_token=llm.engine.kv_cache.bytes_per_token, common_prefix=workload.common_prefix,
        **weight_sizes(llm.model),
    )  # fmt: skip
    return OnlineResult(
        system="hf_paged",
        kv_cache=llm.engine.config.kv_cache_dtype,
        requests=count,
        rate=rate,
        tokens_per_s=tokens / sum(max(times[-1] for _, times in run) for run in runs),
        ceiling=workload.generated_tokens / least if math.isinf(rate) and count == len(workload.prompt_lens) else None,
        first_mean=float(first.mean()),
        first_p50=float(np.percentile(first, 50)),
        first_p99=float(np.percentile(first, 99)),
        between_p50=percentiles[50] if percentiles else None,
        between_p99=percentiles[99] if percentiles else None,
        between=percentiles or None,
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


def _serve(llm: LLM, workload: Workload, rate: float, count: int) -> list[tuple[float, list[float]]]:
    """Of each of the first `count` requests: when it arrived and when its tokens did, in seconds after the start."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    prompts, arrivals = workload.prompts(engine.vocab_size)[:count], _arrivals(count, rate)
    times: list[list[float]] = [[] for _ in prompts]
    start, coming = time.perf_counter(), 0
    while coming < count or engine.has_work:
        now = time.perf_counter() - start
        while coming < count and arrivals[coming] <= now:
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
            times[index] += [arrived] * new
    return list(zip(arrivals, times, strict=True))
