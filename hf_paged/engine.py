"""The engine: requests in, tokens out, one step at a time.

    Scheduler.schedule()   who runs, how many tokens, blocks assigned
    ModelRunner.forward()  logits; keys and values stored on the way
    Sampler()              token ids, on the device
    Scheduler.update()     append, stop, free blocks

A step is asynchronous: while the device runs step N, step N + 1 is scheduled and launched, and only then are the
tokens of step N read. A sampled token reaches the next step on the device; the host waits for it one step later, for
bookkeeping. Every accepted request ends in exactly one terminal output. No threads here.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.config import EngineConfig, KVGroup, refuse
from hf_paged.fused_linear import ReorderedWeights
from hf_paged.fusion import fuse, not_fused
from hf_paged.kernels.rng import derive_seed
from hf_paged.kv_cache import KVCache, LayerFormat, keeps_recent
from hf_paged.kv_mix import resolve_quality
from hf_paged.kv_protection import plan_storage
from hf_paged.layer_probe import LayerSpec
from hf_paged.logprobs import LogprobsTensors, gather_logprobs
from hf_paged.memory import GIB, call_num_blocks, check_size, resolve_num_blocks
from hf_paged.model_runner import ModelRunner, StepLogits, prompt_logits
from hf_paged.model_view import build_view
from hf_paged.output_processor import OutputProcessor
from hf_paged.outputs import RequestOutput
from hf_paged.packed_model import PackedModel
from hf_paged.request import FinishReason, Request, SchedulerOutput
from hf_paged.sampler import Sampler
from hf_paged.sampling_params import SamplingParams
from hf_paged.scheduler import Scheduler

logger = logging.getLogger(__name__)

PromptLogprobs = tuple[Request, int, LogprobsTensors]  # of the prompt tokens that follow those from `int` on
_NO_TOKENS = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step on its way through the device."""

    plan: SchedulerOutput
    token_ids: Tensor  # [num_sampled] int64 on the host, valid once `done`, as are all tensors here
    logprobs: LogprobsTensors | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    def wait(self) -> list[int]:
        """The sampled tokens; the only place where the host waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.token_ids.tolist()
        return tokens


class Engine:
    """Runs requests on a model through a paged KV cache.

    Args:
        model: any supported causal language model; it is not changed.
        config: what may be "auto" or None is resolved here.
        tokenizer: for text and stop strings; without one, requests are ids in and ids out.
        pool_tokens: size the pool for this many tokens, if half the free memory holds them.

    Raises:
        ValueError: the model cannot be paged or lies on several devices, or the memory holds no cache.
    """

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, *, tokenizer: Any = None, pool_tokens: int | None = None
    ) -> None:
        packed = PackedModel(build_view(model))
        specs = packed.specs
        _check_one_device(specs)
        if config.cuda_graphs is True and packed.device.type != "cuda":
            raise ValueError(f'cuda_graphs=True needs a model on a CUDA device, not {packed.device}; allowed: "auto"')
        config = resolve_quality(model, packed, config)
        self.kv_plan = plan_storage(model, packed, config)
        formats = self.kv_plan.formats
        self.fusion = not_fused("fuse=False") if config.fuse is False else fuse(packed.view)
        logger.info("fusion: %s", self.fusion)
        self.reordered = ReorderedWeights(packed.view)
        self.max_model_len = resolve_max_model_len(config, model)
        pages: dict[str, Any] = {"block_size": config.block_size}
        if config.kv_recent_block:
            _check_recent(specs, formats)
            pages["num_recent"] = config.max_num_seqs
        empty = KVCache(specs, formats, num_blocks=0, **pages)
        if config.num_blocks is None and pool_tokens is not None:
            groups, size = len(empty.groups), config.block_size
            rows, longest = (math.ceil(tokens / size) * groups for tokens in (pool_tokens, self.max_model_len))
            num_blocks = call_num_blocks(rows, longest, empty, packed.device)
        else:
            num_blocks = resolve_num_blocks(config, packed, empty, max_model_len=self.max_model_len)
        self.config = replace(config, num_blocks=num_blocks, max_model_len=self.max_model_len)
        check_size(f"{num_blocks} KV blocks", num_blocks * empty.block_bytes + empty.fixed_bytes, packed.device)
        check_size(f"swap_space={config.swap_space}", int(config.swap_space * GIB), torch.device("cpu"))
        self.kv_cache = KVCache(specs, formats, num_blocks=num_blocks, **pages)
        num_host_blocks = self.kv_cache.allocate_host(int(config.swap_space * GIB)) if config.swap_space else 0
        self.runner = ModelRunner(packed, self.kv_cache, self.config, max_model_len=self.max_model_len)
        self.device = packed.device
        self.vocab_size = packed.vocab_size
        eos_token_ids = _eos_token_ids(model, tokenizer)
        self.sampler = Sampler(self.config.max_num_seqs, self.vocab_size, self.device, eos_token_ids=eos_token_ids)
        self.scheduler = Scheduler(
            self.config,
            [KVGroup(window=group.window, num_layers=len(group.layers)) for group in self.kv_cache.groups],
            num_blocks,
            num_cpu_blocks=num_host_blocks,
            eos_token_ids=eos_token_ids,
        )
        self.outputs = OutputProcessor(tokenizer)
        self._decode_token = None if tokenizer is None else lambda token_id: str(tokenizer.decode([token_id]))
        asynchronous = config.async_scheduling is True or (
            config.async_scheduling == "auto" and self.device.type == "cuda"
        )
        self._depth = 1 if asynchronous else 0
        self._launched: deque[LaunchedStep] = deque()
        self.failure: Exception | None = None  # why a request failed, the latest, until somebody takes it

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
    ) -> None:
        """Accept a request; from here on it ends in exactly one finished `RequestOutput`.

        Args:
            prompt_token_ids: at least one id, each in 0..vocab_size - 1.
            prompt: the text of the prompt, handed back in outputs.
            stream: also report every step that brings new tokens.

        Raises:
            ValueError: the request can never run; it was not accepted.
        """
        if not isinstance(request_id, str) or not request_id:
            refuse("request_id", request_id, "a text that is not empty")
        if not isinstance(params, SamplingParams):
            refuse("params", params, "a SamplingParams")
        ids = self._checked_ids(prompt_token_ids)
        if params.stop and self.outputs.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this engine has none; use stop_token_ids")
        self.sampler.state.check(params)
        self.outputs.check_new(request_id)
        leader = Request(f"{request_id}/0", ids, params)
        forked = replace(params, prompt_logprobs=None)  # the leader reports the prompt
        others = (Request(f"{request_id}/{i}", ids, forked, parent=leader, index=i) for i in range(1, params.n))
        requests = [leader, *others]
        for request in requests:  # what refuses one refuses the first
            self.scheduler.add(request)
        try:
            self.outputs.add(request_id, requests, prompt=prompt, stream=stream)
        except BaseException:  # a prompt that cannot be decoded, an interrupt: nothing is accepted
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now; its output is the terminal one. An unknown or finished id is ignored."""
        requests = self.outputs.requests_of(request_id)
        for request in requests:
            self.scheduler.abort(request.request_id)
        return self.outputs.collect(requests)

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Launch one step and finish an earlier one; outputs of the requests that it changed."""
        plan = self.scheduler.schedule()
        outputs = [] if plan is None else self._attempt(plan, lambda: self._launch(plan))
        if self._launched and (plan is None or len(self._launched) > self._depth):
            launched = self._launched.popleft()
            outputs += self._attempt(launched.plan, lambda: self._finish(launched))
        return outputs

    def _attempt(self, plan: SchedulerOutput, work: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Do part of a step; if it fails, its requests end in an error and the engine goes on with the others."""
        try:
            return work()
        except BaseException as error:
            self.scheduler.distrust(plan)
            if not isinstance(error, Exception):  # an interrupt: whoever steps the engine aborts its requests
                raise
            logger.exception("a step of %d requests failed", len(plan.scheduled))
            failed = [item.request for item in plan.scheduled if not item.request.is_finished]
            for request in failed:
                self._fail(request, error)
            return self.outputs.collect(failed)

    def follow_weights(self) -> None:
        """Take note of weights that were written in place: copies of them are renewed, cached prefixes forgotten."""
        if self.reordered.refresh():
            self.scheduler.reset_prefix_cache()
            if self.runner.graphs is not None:
                self.runner.graphs.forget()

    def take_failure(self) -> Exception | None:
        """Why the latest request failed, once: who raises it gives it frames, which an engine must not keep alive."""
        failure, self.failure = self.failure, None
        return failure

    def _fail(self, request: Request, error: Exception) -> None:
        self.failure = error.with_traceback(None)  # frames hold tensors
        request.error = f"{type(error).__name__}: {error}"
        self.scheduler.finish(request, FinishReason.ERROR)
        request.finish_reason = FinishReason.ERROR  # also of one whose last token had come

    def _launch(self, plan: SchedulerOutput) -> list[RequestOutput]:
        """Send a step to the device; that ends no request yet."""
        self._launched.append(self._sent(plan))
        return []

    @torch.inference_mode()
    def _sent(self, plan: SchedulerOutput) -> LaunchedStep:
        for request in plan.admitted:
            self.sampler.admit(request, self._seed_of(request))
        step = self.runner.forward(plan)
        sampled = [item.request for item in plan.scheduled if item.samples]
        token_ids, logprobs = _NO_TOKENS, None
        if step is not None and sampled:
            output = self.sampler(step.sampled_logits, step.rows, step.positions, sampled, step.greedy)
            if output.token_ids is not step.greedy:
                self.runner.last_token[step.rows] = output.token_ids
            token_ids = _to_host(output.token_ids)
            logprobs = output.logprobs.map(_to_host) if output.logprobs is not None else None
        return LaunchedStep(
            plan=plan,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(plan, step),
            done=_record(self.device),  # without a token too: log-probabilities of a chunk may be on their way
        )

    def _finish(self, launched: LaunchedStep) -> list[RequestOutput]:
        tokens = launched.wait()
        sampled = [item.request for item in launched.plan.scheduled if item.samples]
        alive = [not request.is_finished for request in sampled]
        for request, start, logprobs in launched.prompt_logprobs:
            if not request.is_finished:
                entries = [logprobs.row(i, decode=self._decode_token) for i in range(len(logprobs.ranks))]
                self.outputs.add_prompt_logprobs(request, start + 1, entries)
        by_entry = iter(tokens)
        touched = self.scheduler.update(
            launched.plan, [next(by_entry) if item.samples else None for item in launched.plan.scheduled]
        )
        for i, request in enumerate(sampled):
            if not alive[i]:
                continue
            try:
                self._append(request, launched.logprobs, i)
            except Exception as error:  # a text that the tokenizer cannot decode ends nobody else
                logger.exception("the text of request %s failed", request.request_id)
                self._fail(request, error)
        return self.outputs.collect(touched)

    def _append(self, request: Request, logprobs: LogprobsTensors | None, row: int) -> None:
        """Tell the outputs about a request's newest token; end the request if a stop string is complete."""
        wanted = request.params.logprobs
        entry = logprobs.row(row, wanted, self._decode_token) if logprobs is not None and wanted is not None else None
        stop = self.outputs.append(request, entry)
        if stop is None:
            return
        if request.is_finished:  # by its length or a stop token, in the same step
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        else:
            self.scheduler.finish(request, FinishReason.STOP, stop)

    def _prompt_logprobs(self, plan: SchedulerOutput, step: StepLogits | None) -> list[PromptLogprobs]:
        """Log-probabilities of the prompt tokens that follow those computed in this step."""
        found = []
        for item, logits in prompt_logits(plan, step):
            request = item.request
            following = request.prompt_token_ids[item.start + 1 : item.start + len(logits) + 1]
            ids = torch.tensor(following, dtype=torch.long).to(self.device, non_blocking=True)
            k = request.params.prompt_logprobs
            assert k is not None
            if following:
                tensors = gather_logprobs(logits[: len(following)], ids, k)
                found.append((request, item.start, tensors.map(_to_host)))
        return found

    def _checked_ids(self, prompt_token_ids: Sequence[int]) -> list[int]:
        ids = [operator.index(i) for i in prompt_token_ids]
        if not ids:
            raise ValueError("the prompt is empty; at least one token is needed")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"prompt token id {bad} is not in the vocabulary, 0..{self.vocab_size - 1}")
        return ids

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or one drawn from the engine's by order of arrival; n > 1 sequences differ."""
        seed = request.params.seed
        if seed is None:
            return derive_seed(self.config.seed, request.arrival)
        return derive_seed(seed, request.index)


def _check_recent(specs: Sequence[LayerSpec], formats: Mapping[int, LayerFormat]) -> None:
    if not any(keeps_recent(spec, formats[spec.layer_idx]) for spec in specs):
        raise ValueError(
            "kv_recent_block=True: every layer of this model has a sliding window or is not quantized, so none can "
            "keep its current block beside codes; allowed: False"
        )


def _check_one_device(specs: Sequence[LayerSpec]) -> None:
    devices = sorted({str(spec.device) for spec in specs})
    if len(devices) > 1:
        raise ValueError(f"the model's layers lie on {', '.join(devices)}; the engine serves a model on one device")


def resolve_max_model_len(config: EngineConfig, model: PreTrainedModel) -> int:
    """The longest sequence: what the config says, or what the model was made for.

    Raises:
        ValueError: neither says.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = config.max_model_len or limit
    if length is None:
        raise ValueError(f"{type(model).__name__} states no max_position_embeddings; give max_model_len")
    if limit is not None and length > limit:
        logger.warning("max_model_len=%d is more than the %d positions this model was made for", length, limit)
    return int(length)


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end a sequence: the generation config's, else the model config's, and the tokenizer's own."""
    ids: set[int] = set()
    generation_config = getattr(model, "generation_config", None)
    for source in (generation_config, model.config.get_text_config(decoder=True)):
        found = getattr(source, "eos_token_id", None)
        if found is not None and not ids:
            ids.update(i for i in (found if isinstance(found, list | tuple) else [found]) if i >= 0)  # -1 means none
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is complete once an event recorded after this call has passed."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _record(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
