"""Generated tokens per second of the paged engine, beside dense `generate` and the native `generate_batch`.

All systems run the same model object in the same process on the same greedy work: every prompt gets the same number of
new tokens, prefix caching is off. The figure is wall time from prompts to token ids, prefill included: the median
of the repeats after a warm-up, in rounds of all systems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_paged.eval.machine import Machine, Timing, measure_machine, timed_together
from hf_paged.eval.workload import Workload, least_seconds
from hf_paged.llm import LLM
from hf_paged.sampling_params import SamplingParams

Run = Callable[[], int]

_NATIVE_BLOCK_SIZE = 256  # its default


@dataclass(frozen=True, kw_only=True)
class Result:
    """One system on one workload. `ceiling` is the tokens per second of the roof (see `least_seconds`)."""

    system: str
    kv_cache: str
    seconds: float
    fastest: float
    slowest: float
    tokens_per_s: float
    ceiling: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_throughput(
    model: PreTrainedModel,
    workload: Workload,
    *,
    baselines: Sequence[str] = (),
    engine_options: dict[str, Any] | None = None,
    repeats: int = 5,
) -> tuple[Machine, list[Result]]:
    """Measure the engine and each of `baselines`: "dense" (`generate`) or "native" (`generate_batch`).

    Raises:
        ValueError: the workload is longer than the model's context.
        RuntimeError: a system generated another number of tokens than it was asked.
    """
    options = {"enable_prefix_caching": False, **(engine_options or {})}
    llm = LLM(model, **options)
    machine = measure_machine(model.device, model.dtype)
    prompts = workload.prompts(llm.engine.vocab_size)
    per_token = llm.engine.kv_cache.bytes_per_token
    auto_per_token = dense_bytes_per_token(llm)
    systems: list[tuple[str, str, float, Sequence[int], Run]] = [
        (
            "hf_paged",
            options.get("kv_cache_dtype", "auto"),
            per_token,
            workload.prompt_lens,
            _paged(llm, prompts, workload),
        )
    ]
    for baseline in baselines:
        if baseline == "dense":
            padded = [max(workload.prompt_lens)] * len(prompts)
            systems.append(("dense", "auto", auto_per_token, padded, _dense(model, prompts, workload)))
        else:
            run = _native(model, prompts, workload)
            systems.append(("native", "auto", auto_per_token, workload.prompt_lens, run))
    runs = [_checked(name, run, workload) for name, _, _, _, run in systems]
    results = []
    for system, timing in zip(systems, timed_together(runs, model.device, repeats=repeats), strict=True):
        name, kv_cache, kv_bytes, lens, _ = system
        least = least_seconds(machine, lens, workload.new_tokens, kv_bytes_per_token=kv_bytes, **weight_sizes(model))
        results.append(_result(name, kv_cache, timing, workload, least))
    return machine, results


def weight_sizes(model: PreTrainedModel) -> dict[str, int]:
    """`linear_parameters` and `weight_bytes` that one step reads: all but an input embedding that is only looked up."""
    weights = list(model.parameters())  # tied ones once
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    if output is None or output.weight is not embedding:
        weights = [weight for weight in weights if weight is not embedding]
    return {
        "linear_parameters": sum(weight.numel() for weight in weights if weight.dim() > 1),
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
    }


def dense_bytes_per_token(llm: LLM) -> float:
    """Bytes per token of a cache in the model's dtype."""
    specs = llm.engine.kv_cache.specs
    return sum(spec.kv_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize for spec in specs)


def _paged(llm: LLM, prompts: list[list[int]], workload: Workload) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True, detokenize=False)
    return lambda: sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False))


def _dense(model: PreTrainedModel, prompts: list[list[int]], workload: Workload) -> Run:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    generate: Any = model.generate

    def run() -> int:
        with torch.inference_mode():
            out = generate(ids, attention_mask=mask, max_new_tokens=workload.new_tokens, do_sample=False)
        return int(out.shape[0] * (out.shape[1] - longest))

    return run


def _native(model: PreTrainedModel, prompts: list[list[int]], workload: Workload) -> Run:
    """The pool is sized by the work: left alone, it takes most of the memory, which on a CPU takes minutes to fill."""
    generation = GenerationConfig(max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = sum(-(-(len(prompt) + workload.new_tokens) // _NATIVE_BLOCK_SIZE) for prompt in prompts)
    batching = ContinuousBatchingConfig(
        block_size=_NATIVE_BLOCK_SIZE, num_blocks=blocks + 8, max_batch_tokens=8192, allow_block_sharing=False
    )
    generate_batch: Any = model.generate_batch

    def run() -> int:
        out = generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
        return sum(len(request.generated_tokens) for request in out.values())

    return run


def _checked(name: str, run: Run, workload: Workload) -> Callable[[], None]:
    def checked() -> None:
        if (count := run()) != workload.generated_tokens:
            raise RuntimeError(f"{name} generated {count} tokens, not {workload.generated_tokens}")

    return checked


def _result(name: str, kv_cache: str, timing: Timing, workload: Workload, least: float) -> Result:
    return Result(
        system=name,
        kv_cache=kv_cache,
        seconds=timing.median,
        fastest=min(timing.runs),
        slowest=max(timing.runs),
        tokens_per_s=workload.generated_tokens / timing.median,
        ceiling=workload.generated_tokens / least,
    )
