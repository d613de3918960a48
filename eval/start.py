"""How long an engine takes from a model in memory to its first token, with calibration, memory profile and capture."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_paged.eval.machine import synchronize
from hf_paged.eval.throughput import greedy
from hf_paged.llm import LLM

_PROMPT = [1, 2, 3, 4]


@dataclass(frozen=True, kw_only=True)
class StartResult:
    """Seconds from the call of `LLM(...)` to its return and to the first token, and how many tokens its pages hold."""

    system: str
    kv_cache: str
    cold: bool
    engine: float
    first_token: float
    kv_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Triton's cache folder, where NVRTC's kernels lie too, is a new one; what this process has loaded stays loaded.

    Raises:
        ValueError: Triton, which exists on Linux only, is not installed.
    """
    try:
        import triton
    except ModuleNotFoundError as error:
        raise ValueError("a cold start empties the cache of Triton's kernels, and Triton is not installed") from error
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def measure_start(model: PreTrainedModel, *, cold: bool = False, engine_options: dict[str, Any]) -> StartResult:
    """`cold`: how the caches are, for the record; see `empty_kernel_cache`."""
    synchronize(model.device)
    start = time.perf_counter()
    llm = LLM(model, **engine_options)
    made = time.perf_counter()
    llm.generate([_PROMPT], greedy(1), use_tqdm=False)
    first = time.perf_counter()
    config = llm.engine.config
    assert config.num_blocks is not None
    return StartResult(
        system="hf_paged",
        kv_cache=config.kv_cache_dtype,
        cold=cold,
        engine=made - start,
        first_token=first - start,
        kv_tokens=(config.num_blocks - 1) * config.block_size // len(llm.engine.kv_cache.groups),
    )
