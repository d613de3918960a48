"""What a step of running requests takes: by the clock, of the host's own time, and how long the device is idle in it.

Requests decode in every step; beside them, each step may take one whole prompt in, as it does when others arrive. The
clock and the host are timed without a profiler, the device's pauses with one: kernels that overlap count once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_paged.config import EngineConfig
from hf_paged.engine import Engine
from hf_paged.eval.machine import Machine, synchronize, timed
from hf_paged.eval.throughput import greedy, weight_sizes
from hf_paged.eval.workload import Workload, least_products
from hf_paged.llm import LLM

_WARM_UP = 6  # steps: graphs are captured, and one step is always launched ahead
_STEPS = 12  # in each of the timings
_REPEATS = 3
_WAITING = 4  # prompts beside the others that may hold blocks at once
_MOST_STEPS = _WARM_UP + (_REPEATS + 3) * _STEPS + 2


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Milliseconds per step of `running` decodes and a prompt of `beside` tokens.

    `wall`: steps behind one another. `host`: what the host does for a step, while the device waits for it. `idle` and
    `busy`: how long no kernel runs in a step, and the share of time in which one does. These three are None without a
    GPU. `ceiling`: weights read once, or the products, whichever takes longer, and live KV read.
    """

    system: str
    kv_cache: str
    running: int
    beside: int
    wall: float
    host: float | None
    idle: float | None
    busy: float | None
    ceiling: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def steps_workload(most_running: int, *, context: int, beside: int) -> Workload:
    """What an engine must hold for `measure_steps` of at most so many requests."""
    lens = (context,) * most_running + (max(beside, 1),) * _WAITING
    most = _most_tokens(most_running, context, EngineConfig.max_num_batched_tokens)
    return Workload(name="steps", prompt_lens=lens, output_lens=(most,) * len(lens))


def measure_steps(llm: LLM, machine: Machine, *, running: int, context: int, beside: int = 0) -> StepResult:
    """Time steps of `running` requests of `context` prompt tokens, each step beside a new prompt of `beside` tokens.

    Raises:
        RuntimeError: a request failed, or fewer than `running` found a place.
    """
    engine, device = llm.engine, llm.model.device
    names = [f"decode-{i}" for i in range(running)]
    generator = random.Random(0)
    prompts = [[generator.randrange(engine.vocab_size) for _ in range(context)] for _ in names]
    others = [[generator.randrange(engine.vocab_size) for _ in range(beside)] for _ in range(_WAITING)]
    most = _most_tokens(running, context, engine.config.max_num_batched_tokens)
    count = itertools.count()

    def step() -> None:
        if beside:
            number = next(count)
            engine.add_request(f"beside-{number}", others[number % _WAITING], greedy(1))
        _checked_step(engine)

    def steps() -> None:
        for _ in range(_STEPS):
            step()

    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, greedy(most))
        while any(request.num_computed_tokens < context for request in engine.scheduler.requests.values()):
            _checked_step(engine)
        for _ in range(_WARM_UP):
            step()
        wall = timed(steps, device, repeats=_REPEATS, warmup=0).median / _STEPS
        host = idle = busy = None
        if device.type == "cuda":
            host = _host_milliseconds(step, device)
            idle, busy = _idle_and_busy(steps)
        if (ran := sum(request.request_id.startswith("decode-") for request in engine.scheduler.running)) < running:
            raise RuntimeError(f"only {ran} of {running} requests ran to the end of the timing")
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_work:
            engine.step()
    live = running * (context + most / 2)
    return StepResult(
        system="hf_paged",
        kv_cache=engine.config.kv_cache_dtype,
        running=running,
        beside=beside,
        wall=wall * 1e3,
        host=host,
        idle=idle,
        busy=busy,
        ceiling=_least_seconds(llm, machine, tokens=running, live=live, beside=beside) * 1e3,
    )


def _most_tokens(running: int, context: int, budget: int) -> int:
    """Of a request: the first ones decode while the last prompts are computed, `budget` tokens a step in all."""
    return _MOST_STEPS + -(-running * context // max(budget - running, 1)) + 1


def _checked_step(engine: Engine) -> None:
    for output in engine.step():
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")


def _host_milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """Of one step: when the device has done all that it was given, nothing in a step waits for it."""
    seconds = 0.0
    for _ in range(_STEPS):
        synchronize(device)
        start = time.perf_counter()
        step()
        seconds += time.perf_counter() - start
    synchronize(device)
    return seconds / _STEPS * 1e3


def _idle_and_busy(steps: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of a step without a kernel, and the share of time with one, in the second half of two `steps`: the
    profiler holds up a graph's first replays.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps()
        steps()
        torch.cuda.synchronize()
    on_device = (event for event in profile.events() if event.device_type.name == "CUDA")
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_device)
    spans = spans[len(spans) // 2 :]
    first = end = spans[0][0]
    idle = 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / 1e3 / _STEPS, 1 - idle / (end - first)


def _least_seconds(llm: LLM, machine: Machine, *, tokens: int, live: float, beside: int) -> float:
    head_tokens = tokens + (beside > 0)  # of a prompt only the last token goes through the head
    products = least_products(machine, tokens + beside, head_tokens, **weight_sizes(llm.model))
    return products + live * llm.engine.kv_cache.bytes_per_token / machine.bytes_per_s
