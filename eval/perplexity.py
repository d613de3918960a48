"""Perplexity of a text through the pages: what a KV format costs, with the error bar of the comparison.

Each window is an engine request (see `scoring.py`): its chunks are quantized as they are written, and attention reads
the codes. Standard errors are over tokens, taken as independent; that of a change is of the paired differences, token
by token, which is far smaller than that of either perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.eval.figures import CacheFigures, facts_of
from hf_paged.eval.scoring import ScoringEngine, score_windows
from hf_paged.eval.texts import check_windows, context_of, windows_of


@dataclass(frozen=True, kw_only=True)
class PerplexityResult(CacheFigures):
    """One text under one model and KV cache."""

    perplexity: float
    stderr: float  # of the perplexity, over tokens
    num_tokens: int  # scored
    window: int
    stride: int
    num_windows: int
    chunk: int  # tokens computed per step
    logprobs: Tensor  # [num_tokens] fp64 on the CPU, in the order of the text

    def as_dict(self) -> dict[str, Any]:
        """All but the log-probabilities of single tokens."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "logprobs"}

    def change_from(self, other: PerplexityResult) -> tuple[float, float]:
        """Perplexity relative to another format's on the same tokens, minus 1, and the standard error of that.

        Raises:
            ValueError: the two scored different tokens.
        """
        mine, theirs = ((r.window, r.stride, r.num_tokens) for r in (self, other))
        if mine != theirs:
            raise ValueError(f"window, stride and tokens {mine} cannot be compared with {theirs}")
        difference = other.logprobs - self.logprobs
        ratio = math.exp(float(difference.mean()))
        return ratio - 1, ratio * _stderr(difference)


def measure_perplexity(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    *,
    window: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
    kv_cache_dtype: str = "auto",
    chunk: int | None = None,
    progress: Callable[[int], object] | None = None,
    **engine_options: Any,
) -> PerplexityResult:
    """Score a text in windows through the pages of `model`.

    Args:
        token_ids: the whole text.
        window: tokens per window, within the model's context.
        stride: tokens between the starts of two windows; None = `window`.
        limit: windows to score, from the start; None = all.
        chunk: tokens computed per step; the result does not depend on it beyond rounding.
        progress: told the number of scored tokens whenever some were.
        engine_options: fields of `EngineConfig`.

    Raises:
        ValueError: a window that the text or the model's context does not hold, or an option that is not allowed.
    """
    check_windows(window, stride, limit, context_of(model.config))
    windows = windows_of(token_ids, window, stride, limit)
    engine = ScoringEngine(model, max_tokens=window - 1, chunk=chunk, kv_cache_dtype=kv_cache_dtype, **engine_options)
    logprobs = torch.cat([scores.logprobs for scores in score_windows(engine, windows, progress)])
    perplexity = math.exp(-float(logprobs.mean()))
    return PerplexityResult(
        **facts_of(engine, kv_cache_dtype),
        perplexity=perplexity,
        stderr=perplexity * _stderr(logprobs),
        num_tokens=len(logprobs),
        window=window,
        stride=stride or window,
        num_windows=len(windows),
        chunk=engine.config.max_num_batched_tokens,
        logprobs=logprobs,
    )


def _stderr(x: Tensor) -> float:
    """Standard error of the mean of [n] values; 0 where n = 1 says nothing."""
    return float(x.std() / math.sqrt(len(x))) if len(x) > 1 else 0.0
