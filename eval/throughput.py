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

from hf_paged.config import EngineConfig
from hf_paged.eval.machine import Machine, Timing, measure_machine, timed_together
from hf_paged.eval.workload import Workload, least_seconds
from hf_paged.kv_cache import group_layers
from hf_paged.llm import LLM
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel
from hf_paged.sampling_params import SamplingParams

Run = Callable[[], int]

_DENSE_BATCH = 16
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


@dataclass(frozen=True, kw_only=True)
class _System:
    """Something that can run a workload. `prompt_lens` are those that it computes, padding included."""

    name: str
    kv_cache: str
    kv_bytes_per_token: float
    prompt_lens: Sequence[int]
    run: Run


def measure_throughput(
    model: PreTrainedModel,
    workload: Workload,
    *,
    baselines: Sequence[str] = (),
    engine_options: dict[str, Any] | None = None,
    repeats: int = 5,
) -> tuple[Machine, list[Result]]:
    """Measure the engine and each of `baselines`: "dense" (`generate`) or "native" (`generate_batch`, two systems: with
    its defaults, and tuned).

    Raises:
        ValueError: the workload is longer than the model's context, or has outputs of different lengths, which the
            native path cannot be asked for.
        RuntimeError: a system generated another number of tokens than it was asked.
    """
    llm = make_llm(model, workload, engine_options or {})
    machine = measure_machine(model.device, model.dtype)
    systems = [_paged(llm, workload)]
    for name in baselines:
        systems += [_dense(llm, workload)] if name == "dense" else _natives(llm, workload)
    runs = [_checked(system, workload) for system in systems]
    timings = timed_together(runs, model.device, repeats=repeats)
    results = [_result(system, timing, workload, machine, model) for system, timing in zip(systems, timings)]
    return machine, results


def make_llm(model: PreTrainedModel, workload: Workload, engine_options: dict[str, Any]) -> LLM:
    """An engine without prefix caching whose pool holds `workload`, so that the other systems find memory too.

    Raises:
        ValueError: the workload is longer than the model's context.
    """
    block_size = engine_options.get("block_size", EngineConfig.block_size)
    running = sorted(workload.total_lens)[-(workload.max_num_seqs or 0) :]
    blocks = sum(-(-length // block_size) for length in running)
    groups = len(group_layers(PackedModel(build_view(model)).specs))
    options = {"enable_prefix_caching": workload.common_prefix > 0, "num_blocks": blocks * groups + 1, **engine_options}
    if workload.max_num_seqs is not None:
        options = {"max_num_seqs": workload.max_num_seqs, **options}
    llm = LLM(model, **options)
    if workload.longest > llm.engine.max_model_len:
        raise ValueError(f"{workload.longest} tokens are more than the context of {llm.engine.max_model_len}")
    return llm


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


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


def _paged(llm: LLM, workload: Workload) -> _System:
    """Every run starts cold: a prefix is shared within it only."""
    prompts = workload.prompts(llm.engine.vocab_size)
    params = [greedy(length) for length in workload.output_lens]

    def run() -> int:
        llm.engine.scheduler.reset_prefix_cache()
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False))

    return _System(
        name="hf_paged",
        kv_cache=llm.engine.config.kv_cache_dtype,
        kv_bytes_per_token=llm.engine.kv_cache.bytes_per_token,
        prompt_lens=workload.prompt_lens,
        run=run,
    )


def _dense(llm: LLM, workload: Workload) -> _System:
    """Static batches in the order of the prompts, each padded on the left and run to its longest output."""
    prompts = workload.prompts(llm.engine.vocab_size)
    batches = [slice(at, at + _DENSE_BATCH) for at in range(0, len(prompts), _DENSE_BATCH)]
    generate: Any = llm.model.generate

    def run_batch(batch: slice) -> int:
        longest = max(workload.prompt_lens[batch])
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts[batch]], device=llm.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts[batch]], device=ids.device)
        with torch.inference_mode():
            out = generate(ids, attention_mask=mask, max_new_tokens=max(workload.output_lens[batch]), do_sample=False)
        return sum(min(length, out.shape[1] - longest) for length in workload.output_lens[batch])

    return _System(
        name="dense",
        kv_cache="auto",
        kv_bytes_per_token=dense_bytes_per_token(llm),
        prompt_lens=[max(workload.prompt_lens[batch]) for batch in batches for _ in prompts[batch]],
        run=lambda: sum(map(run_batch, batches)),
    )


def _natives(llm: LLM, workload: Workload) -> list[_System]:
    """`generate_batch` as a user calls it, and with prefix sharing off, which these prompts have no use for.

    In both the pool is sized by the work, and a step holds the 8,192 tokens of the default: left alone, pool or step
    take most of the memory, which on a CPU takes minutes to fill and leaves none to the other systems.
    """
    return [
        _native(llm, workload, "native, defaults", allow_block_sharing=True),
        _native(llm, workload, "native, tuned", allow_block_sharing=False),
    ]


def _native(llm: LLM, workload: Workload, name: str, *, allow_block_sharing: bool) -> _System:
    prompts = workload.prompts(llm.engine.vocab_size)
    new_tokens = max(workload.output_lens)
    if min(workload.output_lens) != new_tokens:
        raise ValueError(f"workload {workload.name} has outputs of different lengths; native allows one max_new_tokens")
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = sum(-(-(len(prompt) + new_tokens) // _NATIVE_BLOCK_SIZE) for prompt in prompts)
    batching = ContinuousBatchingConfig(
        block_size=_NATIVE_BLOCK_SIZE,
        num_blocks=blocks + 8,
        max_batch_tokens=8192,
        allow_block_sharing=allow_block_sharing,
    )
    generate_batch: Any = llm.model.generate_batch

    def run() -> int:
        out = generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
        return sum(len(request.generated_tokens) for request in out.values())

    return _System(
        name=name,
        kv_cache="auto",
        kv_bytes_per_token=dense_bytes_per_token(llm),
        prompt_lens=workload.prompt_lens,
        run=run,
    )


def _checked(system: _System, workload: Workload) -> Callable[[], None]:
    def checked() -> None:
        if (count := system.run()) != workload.generated_tokens:
            raise RuntimeError(f"{system.name} generated {count} tokens, not {workload.generated_tokens}")

    return checked


def _result(system: _System, timing: Timing, workload: Workload, machine: Machine, model: PreTrainedModel) -> Result:
    kv_bytes = system.kv_bytes_per_token
    least = least_seconds(
        machine, system.prompt_lens, workload.output_lens, kv_bytes_per_token=kv_bytes,
        max_num_seqs=workload.max_num_seqs, common_prefix=workload.common_prefix, **weight_sizes(model),
    )  # fmt: skip
    return Result(
        system=system.name,
        kv_cache=system.kv_cache,
        seconds=timing.median,
        fastest=min(timing.runs),
        slowest=max(timing.runs),
        tokens_per_s=workload.generated_tokens / timing.median,
        ceiling=workload.generated_tokens / least,
    )
