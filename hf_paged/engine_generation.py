"""`generate()` through the engine: greedy and sampled decoding of a padded batch, with the results of dense `generate`.

Two ways, one store. *Free running*: greedy without processors or criteria of the user's is what the engine does best;
rows are requests, each at its own pace, asynchronously. *Lockstep*: with a logits processor, a stopping criterion or
sampling, all rows take their next token together, so that processors see the padded `[rows, columns]` matrix, criteria
see every row, and one multinomial over all rows draws what dense generate draws under the same torch seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_paged.config import EngineConfig
from hf_paged.engine import Engine
from hf_paged.engine_registry import ENGINES
from hf_paged.private_transformers import pad_token
from hf_paged.request import FinishReason, Request
from hf_paged.sampling_params import SamplingParams

_LOCKSTEP_EOS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)


def generate_with_engine(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    cache_config: EngineConfig,
) -> Tensor:
    """What dense greedy or sampled `generate` returns for `input_ids` [rows, columns], left-padded.

    Arguments are those that Transformers prepares for a custom generation function; rows are expanded already.

    Returns:
        [rows, longest] int64 on the device of `input_ids`, padded like dense generate.

    Raises:
        ValueError: the mask is not plain left padding, a row is empty or has an id out of range, or the pool that
            `cache_config.num_blocks` gives is too small.
    """
    prompts = _prompts(input_ids, attention_mask)
    limit = max(
        _max_length(stopping_criteria, generation_config), input_ids.shape[1] + 1
    )  # dense takes a token at least
    with ENGINES.lease(model, cache_config, num_rows=len(prompts), max_length=limit) as engine:
        # Several rows of one streamer get their tokens together, as dense generate gives them.
        alone = streamer is None or len(prompts) == 1
        if alone and _is_plain(logits_processor, stopping_criteria, generation_config):
            rows = _run_free(engine, prompts, limit - input_ids.shape[1], _eos_token_ids(stopping_criteria), streamer)
            return _padded(input_ids, rows, generation_config)
        lockstep = _Lockstep(engine, input_ids, prompts, limit)
        return lockstep.run(logits_processor, stopping_criteria, generation_config, streamer)


def _is_plain(processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig) -> bool:
    """Whether nothing but the greedy token, eos and the length decide."""
    known = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
    return not config.do_sample and not processors and known


def _max_length(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """Columns at most. A length criterion of the user's takes the place of the one that `max_new_tokens` makes."""
    return math.ceil(min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=config.max_length))


def _eos_token_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """Of the criterion that Transformers made, or of the user's in its place; -1 is the usual way to say none."""
    ids = [i for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.flatten().tolist()]
    return frozenset(i for i in ids if i >= 0)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding; that a mask is zeros, then ones, was checked by `PagedCall`.

    Raises:
        ValueError: a mask of another shape.
    """
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return rows
    mask = attention_mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {tuple(input_ids.shape)}, that of input_ids"
        )
    kept = mask.sum(-1).tolist()
    return [row[len(row) - n :] for row, n in zip(rows, kept, strict=True)]


def _run_free(
    engine: Engine, prompts: list[list[int]], max_tokens: int, eos: frozenset[int], streamer: Any
) -> list[list[int]]:
    """Greedy tokens of every row, eos included."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=tuple(eos), ignore_eos=True, detokenize=False
    )
    names = [f"generate-{i}" for i in range(len(prompts))]
    tokens: dict[str, list[int]] = {}
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, params, stream=streamer is not None)
        streamed = 0
        while engine.has_work:
            for output in engine.step():
                completion = output.outputs[0]
                if completion.finish_reason == FinishReason.ERROR.value:
                    # dense generate's callers expect its own exceptions: OutOfMemoryError, say, to try fewer rows
                    raise engine.take_failure() or RuntimeError(f"generation failed: {output.error}")
                if streamer is not None:
                    streamer.put(torch.tensor(completion.token_ids[streamed:]))
                    streamed = len(completion.token_ids)
                if output.finished:
                    tokens[output.request_id] = list(completion.token_ids)
    finally:
        for name in names:
            engine.abort(name)
    if streamer is not None:
        streamer.end()
    return [tokens[name] for name in names]


def _padded(input_ids: Tensor, rows: list[list[int]], config: GenerationConfig) -> Tensor:
    longest = max(map(len, rows))
    pad = _pad_id(config)
    tail = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.long)
    return torch.cat([input_ids, tail.to(input_ids.device)], dim=-1)


def _pad_id(config: GenerationConfig) -> int:
    token = pad_token(config)
    return 0 if token is None else int(token)


class _Lockstep:
    """All rows take their next token together."""

    def __init__(self, engine: Engine, input_ids: Tensor, prompts: list[list[int]], limit: int) -> None:
        self._engine = engine
        self._input_ids = input_ids
        columns = limit - input_ids.shape[1]
        params = replace(_LOCKSTEP_EOS, max_tokens=columns)
        self._requests = [Request(f"lockstep-{i}", prompt, params) for i, prompt in enumerate(prompts)]
        self._row_of = {request.request_id: i for i, request in enumerate(self._requests)}
        self._logits: Tensor | None = None  # [rows, vocab], of the column to come

    def run(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> Tensor:
        scheduler = self._engine.scheduler
        process: Callable[..., Tensor] = processors
        input_ids = self._input_ids
        alive = torch.ones(len(self._requests), dtype=torch.long, device=input_ids.device)
        pad = pad_token(config)
        pads_ended_rows = pad is not None and any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        try:
            for request in self._requests:
                scheduler.add(request)
            while True:
                logits = self._next_logits().to(copy=True, dtype=torch.float32, device=input_ids.device)
                scores: Tensor = process(input_ids, logits)
                if config.do_sample:
                    tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
                else:
                    tokens = torch.argmax(scores, dim=-1)
                if pad is not None and pads_ended_rows:
                    tokens = tokens * alive + pad * (1 - alive)
                input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
                if streamer is not None:
                    streamer.put(tokens.cpu())
                alive = alive & ~criteria(input_ids, scores)
                # Without eos, dense generate pads nothing: a row that a criterion ended goes on until all have ended.
                if not self._advance(tokens, alive if pads_ended_rows else alive.max().expand_as(alive)):
                    break
        finally:
            for request in self._requests:
                scheduler.abort(request.request_id)
        if streamer is not None:
            streamer.end()
        return input_ids

    @torch.inference_mode()
    def _next_logits(self) -> Tensor:
        """[rows, vocab] logits of every living row, however many steps it takes; rows that ended hold stale ones."""
        scheduler, runner = self._engine.scheduler, self._engine.runner
        while any(not r.is_finished and not r.is_held for r in self._requests):
            plan = scheduler.schedule()
            assert plan is not None, "a row that fits the pool alone always gets on"
            step = runner.forward(plan)
            if step is None:
                continue
            sampled = [self._row_of[item.request.request_id] for item in plan.scheduled if item.samples]
            if self._logits is None:
                self._logits = step.logits.new_zeros(len(self._requests), step.logits.shape[-1])
            if sampled:
                self._logits[torch.tensor(sampled, device=self._logits.device)] = step.sampled_logits
            scheduler.update(plan, [None] * len(plan.scheduled))
        assert self._logits is not None
        return self._logits

    def _advance(self, tokens: Tensor, alive: Tensor) -> bool:
        """Give every row its token; rows that a criterion ended leave. Whether any row lives on."""
        scheduler = self._engine.scheduler
        chosen, living = torch.stack([tokens, alive]).tolist()
        for request, token, lives in zip(self._requests, chosen, living, strict=True):
            if request.is_finished:
                continue
            scheduler.append(request, token)
            if not lives:
                scheduler.finish(request, FinishReason.STOP)
        return any(not request.is_finished for request in self._requests)
