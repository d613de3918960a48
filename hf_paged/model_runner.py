"""Run the model over the tokens of one scheduled step: store their keys and values, return the wanted logits.

The model is an ordinary Transformers model seen through `model_view.py`. All tokens of a step form one packed row
`[1, num_tokens]`; attention finds its pages through the `StepContext` passed down as a keyword. Nothing here waits for
the device: a token sampled by an earlier step is read from `last_token` where it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention import AttentionCall
from hf_paged.config import EngineConfig
from hf_paged.cuda_graph import StepGraphs, StepTensors
from hf_paged.fused_modules import RotaryCall, RotaryContext, leaves_tokens_out
from hf_paged.kernels.cpu_launch import has_kernels
from hf_paged.kernels.fused_ops import input_tokens, likeliest_tokens, rope_write
from hf_paged.kernels.layout import AttentionMetadata, LayerKV, RecentRows
from hf_paged.kernels.paged_attention import paged_attention
from hf_paged.kernels.reshape_and_cache import write_kv
from hf_paged.kv_cache import KVCache
from hf_paged.model_inputs import InputBuilder, ModelInputs, StepPacking, StepSizes, of_last_tokens
from hf_paged.packed_model import PackedModel
from hf_paged.request import ScheduledRequest, SchedulerOutput


class StepContext(RotaryContext):
    """The attention context of an engine step: write this step's tokens to their slots, attend over block tables."""

    def __init__(
        self, kv_cache: KVCache, metadata: tuple[AttentionMetadata, ...], wanted: Tensor | None = None
    ) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata
        self.wanted = wanted

    def attend(self, call: AttentionCall) -> Tensor:
        layer, meta = self._pages(call.layer_idx)
        query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        if layer.transform is not None:
            query = layer.transform.query(query)
            key, value = layer.transform.stored_key(key), layer.transform.stored_value(value)
        write_kv(layer, key, value, meta.slot_mapping, meta.derived)
        recent = _recent_rows(layer, meta, key, value)
        if recent is not None:
            assert layer.recent is not None
            recent.key.copy_(key)
            recent.value.copy_(value)
            write_kv(layer.recent, recent.key, recent.value, recent.slot_mapping)
        return self._attended(query, layer, meta, call, recent).unsqueeze(0)

    def attend_rotary(self, call: RotaryCall) -> Tensor:
        layer, meta = self._pages(call.layer_idx)
        recent = _recent_rows(layer, meta, call.key, call.value)
        query = rope_write(
            call.query, call.key, call.value, call.cos, call.sin, layer, meta.slot_mapping,
            rope=call.rope, q_norm=call.q_norm, k_norm=call.k_norm, derived=meta.derived, recent=recent,
        )  # fmt: skip
        if call.is_last and self.wanted is not None:
            query, meta = query[self.wanted], of_last_tokens(meta, self.wanted)
        return self._attended(query, layer, meta, call, recent)

    def _attended(
        self,
        query: Tensor,
        layer: LayerKV,
        meta: AttentionMetadata,
        call: AttentionCall | RotaryCall,
        recent: RecentRows | None,
    ) -> Tensor:
        """Attention of a query that was made to meet stored keys, over the values that were stored."""
        sinks = call.sinks
        if layer.transform is not None:
            sinks = layer.transform.sinks(sinks, query, call.scale)
        return paged_attention(
            query, layer, meta, scale=call.scale, window=call.window, softcap=call.softcap, sinks=sinks, recent=recent
        )

    def _pages(self, layer_idx: int) -> tuple[LayerKV, AttentionMetadata]:
        return self._kv_cache.layers[layer_idx], self._metadata[self._kv_cache.group_of[layer_idx]]


def _recent_rows(layer: LayerKV, meta: AttentionMetadata, key: Tensor, value: Tensor) -> RecentRows | None:
    """Room for a step's rows as they came, of the shapes of `key` and `value`; None: the layer keeps codes only."""
    if layer.recent is None:
        return None
    assert meta.current is not None
    dtype, device = layer.recent.k.tensor.dtype, key.device
    return RecentRows(
        key=torch.empty(key.shape, dtype=dtype, device=device),
        value=torch.empty(value.shape, dtype=dtype, device=device),
        slot_mapping=meta.current.slot_mapping,
    )


@dataclass(frozen=True, kw_only=True)
class StepLogits:
    """What a forward gives back, all on the device.

    `logits` has a row for every token whose logits are wanted; `sampled` are those of the requests that get a token
    now, in the order of the plan (None = all rows, in order).
    """

    logits: Tensor  # [num_logits, vocab]
    sampled: Tensor | None  # [num_sampled] int64
    rows: Tensor  # [num_sampled] int64, per-sequence row
    positions: Tensor  # [num_sampled] int64, index of the token to sample in its sequence
    greedy: Tensor | None  # [num_sampled] int64, the likeliest tokens, in `last_token` already; None = not looked for
    of_prompts: bool  # prompt tokens that are not sampled have logits, too

    @property
    def sampled_logits(self) -> Tensor:
        return self.logits if self.sampled is None else self.logits[self.sampled]


class ModelRunner:
    """Owns the forward, its inputs and its captured graphs.

    Args:
        model: the model seen through `build_view`.
        kv_cache: where keys and values go.
        config: resolved engine configuration.
        max_model_len: longest sequence in tokens.
    """

    def __init__(self, model: PackedModel, kv_cache: KVCache, config: EngineConfig, *, max_model_len: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.device = model.device
        self._leaves_tokens_out = leaves_tokens_out(model.view)
        if self.device.type == "cpu":
            has_kernels(model.specs[0].dtype)  # compiled the first time that it is asked: no request waits for it
        self.builder = InputBuilder(
            config, num_groups=len(kv_cache.groups), max_model_len=max_model_len, device=self.device
        )
        # the token that each row sampled last; one place more, which padding writes to
        self.last_token = torch.zeros(config.max_num_seqs + 1, dtype=torch.long, device=self.device)
        self.graphs: StepGraphs | None = None
        if config.cuda_graphs is True or (config.cuda_graphs == "auto" and _may_capture(model)):
            self.graphs = StepGraphs(self.builder, config, max_model_len=max_model_len, device=self.device)

    def forward(self, plan: SchedulerOutput) -> StepLogits | None:
        """Carry out a plan: move blocks, then run the model on the scheduled tokens; None when there are none.

        Called in inference mode.
        """
        self.builder.admit(plan.admitted)
        self.kv_cache.swap_out(plan.swap_out)
        self.kv_cache.swap_in(plan.swap_in)
        self.kv_cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return None
        sizes = StepSizes.of(plan.scheduled)
        wanted = _WantedLogits.of(plan.scheduled, sizes)
        tensors = self._step_tensors(plan.scheduled, sizes, wanted).first(len(wanted.tokens))
        rows, positions, greedy = tensors.rows, tensors.next_positions, tensors.greedy
        sampled = None
        if wanted.sampled is not None:
            sampled = torch.from_numpy(wanted.sampled).to(self.device, non_blocking=True)
            rows, positions = rows[sampled], positions[sampled]
            greedy = None if greedy is None else greedy[sampled]
        return StepLogits(
            logits=tensors.logits,
            sampled=sampled,
            rows=rows,
            positions=positions,
            greedy=greedy,
            of_prompts=wanted.of_prompts,
        )

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture every step that requests may need, so that none of them waits for it."""
        if self.graphs is not None:
            self.graphs.capture_all(self._run_captured)

    def _step_tensors(self, scheduled: list[ScheduledRequest], sizes: StepSizes, wanted: _WantedLogits) -> StepTensors:
        """Replay the step where it is captured, otherwise launch it kernel by kernel."""
        if self.graphs is not None and not wanted.of_prompts:
            captured = self.graphs.get(sizes, self._run_captured)
            if captured is not None:
                return captured.replay(scheduled, sizes, wanted.tokens)
        packing = StepPacking(self.builder.shape_of(sizes, len(wanted.tokens)))
        parts = packing.on_device(self.builder.build(scheduled, sizes, wanted.tokens, packing))
        inputs = ModelInputs.from_parts(
            parts, num_decodes=sizes.num_decodes, max_seqlen_q=sizes.max_seqlen_q, max_seq_len=sizes.max_seq_len
        )
        return StepTensors.of(inputs, self._run(inputs, last_only=not wanted.of_prompts))

    def _run(self, inputs: ModelInputs, *, last_only: bool) -> Tensor:
        """One forward of the model: [num_logits, vocab] logits. `last_only`: each is of its sequence's last token."""
        input_ids = input_tokens(inputs.input_ids, inputs.token_rows, self.last_token)
        index = inputs.logits_index
        if len(index) == len(input_ids):  # of every token, in order
            return self.model(input_ids, inputs.positions, StepContext(self.kv_cache, inputs.metadata))
        if self._leaves_tokens_out and last_only:
            return self.model(input_ids, inputs.positions, StepContext(self.kv_cache, inputs.metadata, index))
        return self.model(input_ids, inputs.positions, StepContext(self.kv_cache, inputs.metadata), index)

    def _run_captured(self, inputs: ModelInputs) -> StepTensors:
        """A forward and the likeliest tokens: all that a step of greedy requests takes."""
        logits = self._run(inputs, last_only=True)
        greedy = likeliest_tokens(logits, inputs.logits_rows, self.last_token)
        return StepTensors.of(inputs, logits, greedy)


def _may_capture(model: PackedModel) -> bool:
    """Whether steps are worth capturing on this device; on a CPU, hooks go on being called in every step."""
    if model.device.type != "cpu":
        return model.device.type == "cuda"
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.view.modules())
    return has_kernels(model.specs[0].dtype) and not hooked


class _WantedLogits(NamedTuple):
    """Which tokens of a step need logits."""

    tokens: np.ndarray  # [num_logits] their indices in the step
    sampled: np.ndarray | None = None  # [num_sampled] which of `tokens` are sampled; None = all, in order
    of_prompts: bool = False  # more than one row of some sequence

    @classmethod
    def of(cls, scheduled: list[ScheduledRequest], sizes: StepSizes) -> _WantedLogits:
        prompts = [wants_prompt_logprobs(item) for item in scheduled]
        if any(prompts):
            return cls._of_prompts(scheduled, prompts)
        counts = [item.num_scheduled_tokens for item in scheduled]
        last = np.arange(len(counts)) if sizes.num_tokens == len(counts) else np.cumsum(counts) - 1
        samples = [item.samples for item in scheduled]
        if all(samples):
            return cls(last)
        sampled = np.flatnonzero(samples)
        if sizes.max_seqlen_q == 1:  # logits of every token need no index of tokens
            return cls(last, sampled)
        # A model always computes at least one row of logits; take one that nobody reads.
        return cls(last[sampled]) if len(sampled) else cls(last[:1], sampled)

    @classmethod
    def _of_prompts(cls, scheduled: list[ScheduledRequest], prompts: list[bool]) -> _WantedLogits:
        tokens: list[int] = []
        sampled: list[int] = []
        end = 0
        for item, wants_all in zip(scheduled, prompts, strict=True):
            end += item.num_scheduled_tokens
            tokens += range(end - (item.num_scheduled_tokens if wants_all else item.samples), end)
            if item.samples:
                sampled.append(len(tokens) - 1)
        return cls(np.array(tokens, np.int64), np.array(sampled, np.int64), of_prompts=True)


def wants_prompt_logprobs(item: ScheduledRequest) -> bool:
    """Whether this chunk holds prompt tokens whose successors' log-probabilities were asked for."""
    request = item.request
    return request.params.prompt_logprobs is not None and item.start < request.num_prompt_tokens


def prompt_logits(plan: SchedulerOutput, step: StepLogits | None) -> Iterator[tuple[ScheduledRequest, Tensor]]:
    """The chunks of `wants_prompt_logprobs`, each with its logits in the step, `[num_scheduled_tokens, vocab]`."""
    if step is None or not step.of_prompts:
        return
    at = 0
    for item in plan.scheduled:
        wanted = wants_prompt_logprobs(item)
        count = item.num_scheduled_tokens if wanted else int(item.samples)
        if wanted:
            yield item, step.logits[at : at + count]
        at += count
