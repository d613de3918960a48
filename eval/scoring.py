"""Teacher-forced logits of token sequences, read through the pages that serve.

A sequence is an ordinary request of an ordinary engine: its chunks are written to blocks in the format of the cache,
and attention reads the codes back. There is no other way to a logit here, so a figure made from these logits is a
figure of the cache. Only a chunk's logits are alive at any time; who reads them keeps what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.config import EngineConfig
from hf_paged.engine import Engine, PromptLogprobs
from hf_paged.logprobs import CHUNK_ELEMENTS
from hf_paged.model_runner import StepLogits, prompt_logits
from hf_paged.request import SchedulerOutput
from hf_paged.sampling_params import SamplingParams

LogitsReader = Callable[[int, int, Tensor], None]
"""Takes (sequence, start, logits `[n, vocab]`): row i holds the logits after token `start + i` of the sequence."""

_LOGIT_ELEMENTS = 1 << 26  # logits of one step: 256 MB in fp32
_PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)


class ScoringEngine(Engine):
    """An engine whose prompts' logits go to a reader.

    Args:
        model: any supported causal language model.
        max_tokens: the longest sequence that will be scored, in tokens.
        chunk: tokens computed per step; None = as many as keep the logits of a step within 256 MB, at most 8192.
        engine_options: other fields of `EngineConfig`, e.g. `kv_cache_dtype`.

    Raises:
        ValueError: an unknown or impossible option, or a model that cannot be paged.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_tokens: int, chunk: int | None = None, **engine_options: Any
    ) -> None:
        if chunk is None:
            vocab = model.config.get_text_config(decoder=True).vocab_size
            chunk = min(max(_LOGIT_ELEMENTS // vocab, 128), EngineConfig.max_num_batched_tokens)
        rows = max(1, chunk // max_tokens)
        config = EngineConfig.parse(
            {
                "max_model_len": max_tokens + 1,  # the engine always samples one more, which nobody computes
                "max_num_batched_tokens": chunk,
                "max_num_seqs": rows,
                "enable_prefix_caching": False,
                **engine_options,
            }
        )
        blocks = math.ceil(max_tokens / config.block_size)
        super().__init__(model, config, pool_tokens=rows * blocks * config.block_size)
        self._reader: LogitsReader | None = None

    def score(self, sequences: Sequence[Sequence[int]], read: LogitsReader) -> None:
        """Run every sequence once; `read` gets the logits of all its tokens, chunk by chunk and in order.

        Raises:
            RuntimeError: a sequence could not be scored, with the engine's reason.
        """
        self._reader = read
        names = [str(i) for i in range(len(sequences))]
        try:
            for name, sequence in zip(names, sequences, strict=True):
                self.add_request(name, sequence, _PROMPT_ONLY)
            while self.has_work:
                for output in self.step():
                    if output.error is not None:
                        raise RuntimeError(f"sequence {output.request_id} could not be scored: {output.error}")
        finally:
            self._reader = None
            for name in names:  # an interrupt leaves nothing running
                self.abort(name)

    def _prompt_logprobs(self, plan: SchedulerOutput, step: StepLogits | None) -> list[PromptLogprobs]:
        assert self._reader is not None
        for item, logits in prompt_logits(plan, step):
            name = item.request.request_id.partition("/")[0]
            self._reader(int(name), item.start, logits)
        return []


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
