"""Generated tokens per second of the paged engine, beside dense `generate` and the native `generate_batch`.

All systems run the same model object in the same process on the same greedy work: every prompt gets the same number of
new tokens, prefix caching is off. The figure is wall time from prompts to token ids, prefill included: the median of
the repeats after a warm-up, in rounds of all systems. A decode step is what remains of it without a run that
ends at the first token of each prompt, divided by the tokens that follow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_paged.config import EngineConfig
from hf_paged.eval.figures import CacheFigures, facts_of
from hf_paged.eval.machine import Machine, Timing, timed, timed_together
from hf_paged.eval.workload import Workload, least_seconds
from hf_paged.kv_cache import group_layers
from hf_paged.llm import LLM
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel
from hf_paged.quant.experts import PackedStack
from hf_paged.quant.linear import PackedLinear
from hf_paged.sampling_params import SamplingParams

Run = Callable[[], int]

_WARM_UP_TOKENS = 1 << 15
_DENSE_BATCH = 16
_NATIVE_BLOCK_SIZE = 256  # its default


@dataclass(frozen=True, kw_only=True)
class Result:
    """One system on one workload, beside its roof (see `least_seconds`): `ceiling`, tokens per second, and
    `step_ceiling`, milliseconds. A decode step is known of our engine, where all outputs are equally long.
    """

    system: str
    kv_cache: str
    workload: str
    seconds: float
    fastest: float
    slowest: float
    tokens_per_s: float
    ceiling: float
    prefill: float | None = None  # seconds
    step_ms: float | None = None
    step_ceiling: float | None = None

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
    warm_up: Run
    prefill: Run | None = None  # to the first token of every prompt


def measure_throughput(
    llm: LLM,
    workload: Workload,
    machine: Machine,
    *,
    baselines: Sequence[str] = (),
    sampled: bool = False,
    repeats: int = 5,
    tell: Callable[[str], object] = lambda doing: None,
) -> Iterator[Result]:
    """Measure an engine of `make_llm` and each of `baselines`: "paged-generate" (`generate` with our cache, all prompts
    in one call), "dense" (`generate`), "native" (`generate_batch`, two systems: with a bounded pool, and tuned),
    "native-tuned" or "native-as-called" (with nothing set).

    Ours warms up on the whole work, or on shorter outputs where that is long, a baseline on its first requests.

    Args:
        sampled: measure our engine also at temperature 0.8 and top-p 0.95.
        tell: told what runs now, before every run.

    Raises:
        ValueError: the workload has outputs of different lengths, which the native path cannot be asked for.
        RuntimeError: a system generated another number of tokens than it was asked.
    """
    systems = [_paged(llm, workload)]
    if sampled:
        systems.append(_paged(llm, workload, name="hf_paged, sampled", temperature=0.8, top_p=0.95))
    for name in baselines:
        systems += _baselines(llm, workload, name)
    for system in systems:
        tell(f"{workload.name}: {system.name} warms up")
        system.warm_up()
    runs = [_checked(system, workload, repeats, tell) for system in systems]
    timings = timed_together(runs, llm.model.device, repeats=repeats, warmup=0)
    for system, timing in zip(systems, timings, strict=True):
        tell(f"{workload.name}: {system.name}, to the first tokens")
        yield _result(system, timing, workload, machine, llm.model, repeats)


def make_llm(model: PreTrainedModel, workloads: Sequence[Workload], engine_options: dict[str, Any]) -> LLM:
    """An engine whose pool holds each of `workloads`, so that the other systems find memory too; without prefix caching
    where no workload has a common prefix.

    Raises:
        ValueError: a workload is longer than the model's context, or has more requests than another lets run.
    """
    block_size = engine_options.get("block_size", EngineConfig.block_size)
    groups = len(group_layers(PackedModel(build_view(model)).specs))
    options = {
        "enable_prefix_caching": any(workload.common_prefix for workload in workloads),
        "num_blocks": groups * max(workload.most_blocks(block_size) for workload in workloads) + 1,
        **engine_options,
    }
    limit = min((workload.max_num_seqs for workload in workloads if workload.max_num_seqs is not None), default=None)
    if limit is not None:
        together = max((len(work.prompt_lens) for work in workloads if work.max_num_seqs is None), default=0)
        if together > limit:
            raise ValueError(f"{together} requests at once and at most {limit} running need an engine each")
        options = {"max_num_seqs": limit, **options}
    llm = LLM(model, **options)
    longest = max(workload.longest for workload in workloads)
    if longest > llm.engine.max_model_len:
        raise ValueError(f"{longest} tokens are more than the context of {llm.engine.max_model_len}; see max_model_len")
    return llm


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def weight_sizes(model: PreTrainedModel) -> dict[str, int]:
    """`linear_parameters` and `weight_bytes` that one step reads, all but an input embedding that is only looked up; of
    these what the head has, `head_parameters` and `head_bytes`.
    """
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    skipped = embedding if output is None or output.weight is not embedding else None
    weights = [weight for weight in model.parameters() if weight is not skipped]  # tied ones once
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    stacks = [module for module in model.modules() if isinstance(module, PackedStack)]
    words = {id(parameter) for module in (*packed, *stacks) for parameter in module.parameters()}
    plain = sum(weight.numel() for weight in weights if weight.dim() > 1 and id(weight) not in words)
    return {
        "head_parameters": 0 if output is None else output.in_features * output.out_features,
        "head_bytes": 0 if output is None else sum(parameter.nbytes for parameter in output.parameters()),
        "linear_parameters": plain
        + sum(linear.in_features * linear.out_features for linear in packed)
        + sum(stack.experts * stack.layout.in_features * stack.layout.out_features for stack in stacks),
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
    }


def dense_bytes_per_token(llm: LLM) -> float:
    """Bytes per token of a cache in the model's dtype."""
    specs = llm.engine.kv_cache.specs
    return sum(spec.kv_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize for spec in specs)


def _paged(llm: LLM, workload: Workload, *, name: str = "hf_paged", **sampling: Any) -> _System:
    """Every run starts cold: a prefix is shared within it only."""
    prompts = workload.prompts(llm.engine.vocab_size)
    share = min(1.0, _WARM_UP_TOKENS / workload.generated_tokens)  # of each output: meets nearly all sizes of steps

    def run(lengths: Sequence[int]) -> int:
        llm.engine.scheduler.reset_prefix_cache()
        params = [replace(greedy(length), **sampling) for length in lengths]
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False))

    return _System(
        name=name,
        kv_cache=CacheFigures(**facts_of(llm.engine, llm.engine.config.kv_cache_dtype)).name,
        kv_bytes_per_token=llm.engine.kv_cache.bytes_per_token,
        prompt_lens=workload.prompt_lens,
        run=lambda: run(workload.output_lens),
        warm_up=lambda: run([math.ceil(length * share) for length in workload.output_lens]),
        prefill=lambda: run([1] * len(prompts)),
    )


def _baselines(llm: LLM, workload: Workload, name: str) -> list[_System]:
    if name == "dense":
        return [_generate(llm, workload, name, batch_size=_DENSE_BATCH)]
    if name == "paged-generate":
        config = {"kv_cache_dtype": llm.engine.config.kv_cache_dtype, "block_size": llm.engine.config.block_size}
        options = {"cache_implementation": "paged", "cache_config": config}
        return [_generate(llm, workload, "generate, paged", batch_size=len(workload.prompt_lens), **options)]
    return _natives(llm, workload, name)


def _generate(llm: LLM, workload: Workload, name: str, *, batch_size: int, **options: Any) -> _System:
    """Static batches in the order of the prompts, each padded on the left and run to its longest output."""
    prompts = workload.prompts(llm.engine.vocab_size)
    batches = [slice(at, at + batch_size) for at in range(0, len(prompts), batch_size)]
    generate: Any = llm.model.generate

    def run_batch(batch: slice) -> int:
        longest = max(workload.prompt_lens[batch])
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts[batch]], device=llm.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts[batch]], device=ids.device)
        count = max(workload.output_lens[batch])
        with torch.inference_mode():
            out = generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
        return sum(min(length, out.shape[1] - longest) for length in workload.output_lens[batch])

    padded = [max(workload.prompt_lens[batch]) for batch in batches for _ in prompts[batch]]
    paged = "cache_implementation" in options  # pages hold no padding
    return _System(
        name=name,
        kv_cache=llm.engine.config.kv_cache_dtype if paged else "auto",
        kv_bytes_per_token=llm.engine.kv_cache.bytes_per_token if paged else dense_bytes_per_token(llm),
        prompt_lens=workload.prompt_lens if paged else padded,
        run=lambda: sum(map(run_batch, batches)),
        warm_up=lambda: run_batch(batches[0]),
    )


def _natives(llm: LLM, workload: Workload, baseline: str) -> list[_System]:
    """`generate_batch` with nothing set ("native-as-called"), or bounded and tuned ("native").

    With nothing set, its pool and the mask of its steps are sized by 90% of all memory, whatever the work: the mask of
    8,192 tokens times the whole pool is filled at every call, and other systems find little left. Bounded is the same
    with a pool of the size of the work. Tuned is without prefix sharing too, which these prompts have no use for, and
    on a CPU with steps of 512 tokens: it computes scores of all tokens of a step with all keys of the batch.
    """
    if baseline == "native-as-called":
        return [_native(llm, workload, "native, as called", None)]
    lengths = (prompt + max(workload.output_lens) for prompt in workload.prompt_lens)
    blocks = sum(-(-length // _NATIVE_BLOCK_SIZE) for length in lengths) + 8
    step = 512 if llm.model.device.type == "cpu" else 8192  # its default
    bounded = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=8192)
    tuned = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step, allow_block_sharing=False)
    systems = [_native(llm, workload, "native, tuned", tuned)]
    if baseline == "native":
        systems.insert(0, _native(llm, workload, "native, bounded", bounded))
    return systems


def _native(llm: LLM, workload: Workload, name: str, batching: ContinuousBatchingConfig | None) -> _System:
    prompts = workload.prompts(llm.engine.vocab_size)
    new_tokens = max(workload.output_lens)
    if min(workload.output_lens) != new_tokens:
        raise ValueError(f"workload {workload.name} has outputs of different lengths; native allows one max_new_tokens")
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    generate_batch: Any = llm.model.generate_batch

    def run(some: Sequence[list[int]]) -> int:
        out = generate_batch(some, generation_config=generation, continuous_batching_config=batching)
        return sum(len(request.generated_tokens) for request in out.values())

    return _System(
        name=name,
        kv_cache="auto",
        kv_bytes_per_token=dense_bytes_per_token(llm),
        prompt_lens=workload.prompt_lens,
        run=lambda: run(prompts),
        warm_up=lambda: run(prompts[:2]),
    )


def _checked(system: _System, workload: Workload, repeats: int, tell: Callable[[str], object]) -> Callable[[], None]:
    numbers = itertools.count(1)

    def checked() -> None:
        tell(f"{workload.name}: {system.name}, run {next(numbers)} of {repeats}")
        if (count := system.run()) != workload.generated_tokens:
            raise RuntimeError(f"{system.name} generated {count} tokens, not {workload.generated_tokens}")

    return checked


def _result(
    system: _System, timing: Timing, workload: Workload, machine: Machine, model: PreTrainedModel, repeats: int
) -> Result:
    def least(output_lens: Sequence[int]) -> float:
        return least_seconds(
            machine, system.prompt_lens, output_lens, kv_bytes_per_token=system.kv_bytes_per_token,
            max_num_seqs=workload.max_num_seqs, common_prefix=workload.common_prefix, **weight_sizes(model),
        )  # fmt: skip

    result = Result(
        system=system.name,
        kv_cache=system.kv_cache,
        workload=workload.name,
        seconds=timing.median,
        fastest=min(timing.runs),
        slowest=max(timing.runs),
        tokens_per_s=workload.generated_tokens / timing.median,
        ceiling=workload.generated_tokens / least(workload.output_lens),
    )
    steps = max(workload.output_lens) - 1
    if system.prefill is None or steps == 0 or min(workload.output_lens) <= steps:
        return result
    prefill = timed(system.prefill, model.device, repeats=repeats, warmup=0).median
    one_each = [1] * len(workload.prompt_lens)
    return replace(
        result,
        prefill=prefill,
        step_ms=(timing.median - prefill) / steps * 1e3,
        step_ceiling=(least(workload.output_lens) - least(one_each)) / steps * 1e3,
    )
