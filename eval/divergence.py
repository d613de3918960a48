"""How far reading tokens back from quantized pages moves a model: top-1 agreement, log-probabilities, teacher-forced.

A text is cut into windows. The dense model scores each window in one forward; the engine scores it through its pages
(prompt log-probabilities: chunks are written, quantized, and attention reads the codes back), once per KV format. Every
token but the first of a window is scored. "auto" shows what paging and summation order alone do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.llm import LLM
from hf_paged.sampling_params import SamplingParams

_SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One KV format against the dense model. Log-probabilities are natural."""

    kv_cache_dtype: str
    bytes_per_token: float
    num_tokens: int
    top1_agreement: float  # share of positions with the dense model's likeliest token
    mean_abs_delta: float  # of the log-probability of the text's own token
    perplexity: float
    dense_perplexity: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def windows_of(token_ids: Sequence[int], window: int, limit: int) -> list[list[int]]:
    """Full windows of `window` tokens from the start of a text, at most `limit` of them.

    Raises:
        ValueError: the text is shorter than one window, or a window holds nothing to score.
    """
    if window < 2:
        raise ValueError(f"window={window} is not allowed; a window needs 2 tokens or more")
    windows = [list(token_ids[i : i + window]) for i in range(0, len(token_ids) - window + 1, window)][:limit]
    if not windows:
        raise ValueError(f"the text has {len(token_ids)} tokens, fewer than one window of {window}: lower the window")
    return windows


def measure_divergence(
    model: PreTrainedModel, windows: Sequence[Sequence[int]], kv_cache_dtypes: Sequence[str], **engine_options: Any
) -> Iterator[Divergence]:
    """Score `windows` with the dense model and through the pages of each KV format; yields as formats finish."""
    dense = [_dense_scores(model, window) for window in windows]
    top1 = torch.cat([top for top, _ in dense])
    logprobs = torch.cat([value for _, value in dense])
    for kv_cache_dtype in kv_cache_dtypes:
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, **engine_options)
        scores = [_paged_scores(llm, window) for window in windows]
        paged_top1 = torch.cat([top for top, _ in scores])
        paged = torch.cat([value for _, value in scores])
        yield Divergence(
            kv_cache_dtype=kv_cache_dtype,
            bytes_per_token=llm.engine.kv_cache.bytes_per_token,
            num_tokens=len(paged),
            top1_agreement=float((paged_top1 == top1).double().mean()),
            mean_abs_delta=float((paged - logprobs).abs().mean()),
            perplexity=math.exp(-float(paged.mean())),
            dense_perplexity=math.exp(-float(logprobs.mean())),
        )


@torch.inference_mode()
def _dense_scores(model: PreTrainedModel, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Likeliest next token and log-probability of the window's own, after each token but the last."""
    ids = torch.tensor([window], device=model.device)
    logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    return logprobs.argmax(-1).cpu(), logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).double().cpu()


def _paged_scores(llm: LLM, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    (output,) = llm.generate([list(window)], _SCORE, use_tqdm=False)
    if output.error is not None or output.prompt_logprobs is None:
        raise RuntimeError(f"a window could not be scored: {output.error}")
    top1, logprobs = [], []
    for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        best = max(entry, key=lambda t: entry[t].logprob)
        top1.append(best)
        logprobs.append(entry[token].logprob)
    return torch.tensor(top1), torch.tensor(logprobs, dtype=torch.float64)
