"""Teacher-forced logits of token sequences, read through the pages that serve.

A sequence is an ordinary request of an ordinary engine: its chunks are written to blocks in the format of the cache,
and attention reads the codes back. There is no other way to a logit here, so a figure made from these logits is a
figure of the cache. Only one step's logits are alive at any time; the caller keeps what it needs of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.config import EngineConfig
from hf_paged.engine import Engine, PromptLogprobs
from hf_paged.eval.row_tiles import RowTiles
from hf_paged.eval.texts import Window
from hf_paged.logprobs import CHUNK_ELEMENTS
from hf_paged.model_runner import StepLogits, prompt_logits
from hf_paged.request import SchedulerOutput
from hf_paged.sampling_params import SamplingParams

_LOGIT_ELEMENTS = 1 << 26  # logits of one step: 256 MB in fp32
_PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)


class ScoringEngine(Engine):
    """An engine that hands out the logits of its prompts.

    Args:
        model: any supported causal language model.
        max_tokens: the longest sequence that will be scored, in tokens.
        chunk: tokens computed per step; None = `default_chunk`.
        engine_options: other fields of `EngineConfig`, e.g. `kv_cache_dtype`.

    Raises:
        ValueError: an unknown or impossible option, or a model that cannot be paged.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_tokens: int, chunk: int | None = None, **engine_options: Any
    ) -> None:
        chunk = chunk or default_chunk(model)
        rows = max(1, chunk // max_tokens)
        config = EngineConfig.parse(
            {
                "max_model_len": max_tokens + 1,  # the engine always samples one more, which nobody computes
                "max_num_batched_tokens": chunk,
                "max_num_seqs": rows,
                "enable_prefix_caching": False,
                "cuda_graphs": False,  # no step is like another
                **engine_options,
            }
        )
        blocks = math.ceil(max_tokens / config.block_size)
        super().__init__(model, config, pool_tokens=rows * blocks * config.block_size)
        # every format in the same chunks, those that keep current blocks too
        self.scheduler.blocks.whole_blocks = config.max_num_batched_tokens >= config.block_size
        self._logits: list[tuple[int, int, Tensor]] = []

    def score(self, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, Tensor]]:
        """Run every sequence once, in chunks and as many at a time as there are rows.

        Yields:
            (i, start, logits `[n, vocab]`): row j holds the logits after token `start + j` of sequence i. The chunks of
            a sequence come in order, and two engines that differ in the format of their pages yield the same chunks.

        Raises:
            RuntimeError: a sequence could not be scored, with the engine's reason.
        """
        names = [str(i) for i in range(len(sequences))]
        try:
            for name, sequence in zip(names, sequences, strict=True):
                self.add_request(name, sequence, _PROMPT_ONLY)
            while self.has_work:
                with RowTiles():
                    outputs = self.step()
                while self._logits:
                    yield self._logits.pop(0)
                for output in outputs:
                    if output.error is not None:
                        raise RuntimeError(f"sequence {output.request_id} could not be scored: {output.error}")
        finally:
            self._logits.clear()
            for name in names:  # an interrupt leaves nothing running
                self.abort(name)

    def _prompt_logprobs(self, plan: SchedulerOutput, step: StepLogits | None) -> list[PromptLogprobs]:
        for item, logits in prompt_logits(plan, step):
            self._logits.append((int(item.request.request_id.partition("/")[0]), item.start, logits))
        return []


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """The scored tokens of one window, in order, on the CPU."""

    logprobs: Tensor  # [num_scored] fp64, natural
    is_top1: Tensor  # [num_scored] bool: the token is the likeliest, given those before it


def score_windows(
    engine: ScoringEngine, windows: Sequence[Window], progress: Callable[[int], object] | None = None
) -> list[TokenScores]:
    """Score the tokens of every window behind its context.

    Args:
        progress: told the number of scored tokens whenever some were.
    """
    targets = [torch.tensor(w.token_ids[w.num_context :]).to(engine.device) for w in windows]
    logprobs = [torch.zeros(len(t), device=engine.device) for t in targets]
    is_top1 = [torch.zeros(len(t), device=engine.device, dtype=torch.bool) for t in targets]
    for i, start, logits in engine.score([w.token_ids[:-1] for w in windows]):
        skip = max(0, windows[i].num_context - 1 - start)  # rows that predict context
        if skip >= len(logits):
            continue
        first = start + skip + 1 - windows[i].num_context
        rows = slice(first, first + len(logits) - skip)
        logprobs[i][rows] = target_logprobs(logits[skip:], targets[i][rows])
        is_top1[i][rows] = logits[skip:].argmax(-1) == targets[i][rows]
        if progress is not None:
            progress(len(logits) - skip)
    return [TokenScores(logprobs=x.double().cpu(), is_top1=hit.cpu()) for x, hit in zip(logprobs, is_top1, strict=True)]


def target_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Natural log-probabilities `[n]` fp32 of `token_ids` `[n]` under `logits` `[n, vocab]`.

    Never more than 64 MB of logits are held in fp32.
    """
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [
        part.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - part.logsumexp(-1)
        for part, ids in zip((x.float() for x in logits.split(rows)), token_ids.split(rows), strict=True)
    ]
    return torch.cat(parts)


def default_chunk(model: PreTrainedModel, num_engines: int = 1) -> int:
    """Tokens per step whose logits in fp32 stay within 256 MB in all engines together, in 64..8192."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    return min(max(_LOGIT_ELEMENTS // (vocab * num_engines), 64), EngineConfig.max_num_batched_tokens)
