"""Time to the first token and between tokens for one prompt: the paged engine and dense `generate`, streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_paged.eval.machine import Machine, measure_machine
from hf_paged.eval.throughput import dense_bytes_per_token, make_llm, weight_sizes
from hf_paged.eval.workload import Workload, least_seconds
from hf_paged.layer_probe import LayerSpec
from hf_paged.llm import LLM
from hf_paged.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class LatencyResult:
    """Milliseconds. `ceiling` is the least time between tokens (all weights and live KV read once), `first_ceiling`
    that to the first one (products and causal attention at the FLOP roof).
    """

    system: str
    kv_cache: str
    first_token: float
    p50: float
    p90: float
    p99: float
    ceiling: float
    first_ceiling: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Clock(BaseStreamer):
    """Notes when each token arrives; `generate` hands the prompt over first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        del self.times[0]


def measure_latency(
    model: PreTrainedModel,
    workload: Workload,
    *,
    dense: bool = False,
    engine_options: dict[str, Any] | None = None,
    repeats: int = 5,
) -> tuple[Machine, list[LatencyResult]]:
    """Measure the first prompt of `workload`, after one warm-up run; percentiles are over the tokens of all repeats."""
    llm = make_llm(model, [workload], engine_options or {})
    machine = measure_machine(model.device, model.dtype)
    prompt, new_tokens = workload.prompts(llm.engine.vocab_size)[0], workload.output_lens[0]
    kv_cache = llm.engine.config.kv_cache_dtype
    systems: list[tuple[str, str, float, Callable[[], list[float]]]] = [
        ("hf_paged", kv_cache, llm.engine.kv_cache.bytes_per_token, lambda: _paged(llm, prompt, new_tokens))
    ]
    if dense:
        dense_bytes = dense_bytes_per_token(llm)
        systems.append(("dense", "auto", dense_bytes, lambda: _dense(model, prompt, new_tokens)))
    results = []
    for name, kv, kv_bytes, run in systems:
        runs = [run() for _ in range(repeats + 1)][1:]
        sizes: dict[str, Any] = {"kv_bytes_per_token": kv_bytes, **weight_sizes(model)}
        first, both = (least_seconds(machine, [len(prompt)], [count], **sizes) for count in (1, 2))
        attention = _attention_flops(llm.engine.kv_cache.specs, len(prompt)) / machine.flops_per_s
        results.append(_result(name, kv, runs, ceiling=both - first, first_ceiling=first + attention))
    return machine, results


def _attention_flops(specs: Sequence[LayerSpec], length: int) -> float:
    """Of a prompt's queries with the keys that each sees, and of the weighted values."""
    flops = 0.0
    for spec in specs:
        window = min(spec.window or length, length)
        seen = window * (window / 2 + length - window)  # pairs of a query and a key
        flops += 2 * spec.num_heads * (spec.head_dim + spec.v_head_dim) * seen
    return flops


def _paged(llm: LLM, prompt: list[int], new_tokens: int) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    times: list[float] = []
    for output in llm.stream(prompt, params):
        arrived = time.perf_counter()
        times += [arrived] * (len(output.outputs[0].token_ids) - len(times))
    return [start, *times]


def _dense(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[float]:
    ids = torch.tensor([prompt], device=model.device)
    clock = _Clock()
    generate: Any = model.generate
    start = time.perf_counter()
    with torch.inference_mode():
        generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, streamer=clock)
    return [start, *clock.times]


def _result(
    name: str, kv_cache: str, runs: Sequence[list[float]], *, ceiling: float, first_ceiling: float
) -> LatencyResult:
    """`runs`: seconds of the start and of each token; the ceilings are in seconds."""
    gaps = np.concatenate([np.diff(times)[1:] for times in runs]) * 1e3
    p50, p90, p99 = np.percentile(gaps, [50, 90, 99])
    return LatencyResult(
        system=name,
        kv_cache=kv_cache,
        first_token=float(np.median([times[1] - times[0] for times in runs])) * 1e3,
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        ceiling=ceiling * 1e3,
        first_ceiling=first_ceiling * 1e3,
    )
