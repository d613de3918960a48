"""A scheduler without a model, and one step of it."""

from __future__ import annotations

from typing import Any

from hf_paged.config import EngineConfig, KVGroup
from hf_paged.request import Request, SchedulerOutput
from hf_paged.sampling_params import SamplingParams
from hf_paged.scheduler import Scheduler

EOS = 0


def make(
    num_blocks: int = 100,
    *,
    windows: tuple[int | None, ...] = (None,),
    num_cpu_blocks: int = 0,
    max_model_len: int = 512,
    **options: Any,
) -> Scheduler:
    config = EngineConfig(block_size=16, max_model_len=max_model_len, **options)
    return Scheduler(config, [KVGroup(window=window) for window in windows], num_blocks, num_cpu_blocks, [EOS])


def add(scheduler: Scheduler, prompt: int | list[int], parent: Request | None = None, **params: Any) -> Request:
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    request = Request(f"r{scheduler._num_added}", tokens, SamplingParams(**params), parent=parent)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(output, [token if entry.samples else None for entry in output.scheduled])
    scheduler.check_integrity()
    return output


def shares(output: SchedulerOutput) -> list[tuple[Request, int, int, bool]]:
    return [tuple(entry) for entry in output.scheduled]  # type: ignore[misc]
