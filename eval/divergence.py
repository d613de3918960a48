"""How far reading quantized pages moves a model's predictions from those over 16-bit pages, token by token.

Each window of a text goes through one engine per format, all with the same chunks; the logits of one chunk exist for
all formats at once, and are reduced to a few numbers per token before the next chunk. Teacher-forced: every format
reads the text's own tokens, so a difference at one token does not become a different text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.eval.figures import CacheFigures, facts_of
from hf_paged.eval.scoring import ScoringEngine, default_chunk
from hf_paged.eval.texts import Window, check_windows, context_of, windows_of
from hf_paged.logprobs import CHUNK_ELEMENTS

REFERENCE = "auto"  # pages in the model's own dtype: what is left is the format alone


@dataclass(frozen=True, kw_only=True)
class TokenDivergence:
    """One scored token. Log-probabilities are natural, of the text's own token."""

    position: int  # in the text
    token_id: int
    kl: float
    logprob: float
    reference_logprob: float


@dataclass(frozen=True, kw_only=True)
class Divergence(CacheFigures):
    """One KV cache against 16-bit pages. KL is that of its distribution from the reference's, in nats."""

    num_tokens: int
    top1_agreement: float  # share of tokens with the same likeliest token
    mean_kl: float
    p99_kl: float
    max_kl: float
    mean_abs_delta: float  # of the log-probability of the text's own token
    perplexity: float
    reference_perplexity: float
    worst: tuple[TokenDivergence, ...]  # by KL, the worst first

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _TokenFigures:
    """What is kept of the tokens of a chunk, or of all of them; every tensor `[n]`, on the device."""

    same_top1: Tensor  # bool
    kl: Tensor  # fp32
    logprob: Tensor  # fp32
    reference: Tensor  # fp32

    @staticmethod
    def joined(parts: Sequence[_TokenFigures]) -> _TokenFigures:
        names = vars(parts[0])
        return _TokenFigures(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def measure_divergence(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    caches: Sequence[Mapping[str, Any]],
    *,
    window: int = 1024,
    stride: int | None = None,
    limit: int | None = None,
    num_worst: int = 5,
    chunk: int | None = None,
    progress: Callable[[int], object] | None = None,
    **engine_options: Any,
) -> list[Divergence]:
    """Compare KV caches with 16-bit pages over the windows of a text.

    Args:
        token_ids: the whole text.
        caches: fields of `EngineConfig` that differ, e.g. `{"kv_cache_dtype": "int8", "kv_scales": "off"}`.
        window: tokens per window; `stride`, `limit`: see `texts.windows_of`.
        num_worst: tokens to name per cache.
        chunk: tokens computed per step; None = the fewer, the more caches there are.
        progress: told the number of tokens whenever some were scored in all caches.
        engine_options: fields of `EngineConfig`, for all caches and the reference.

    Raises:
        ValueError: a window that the text or the model's context does not hold, or an option that is not allowed.
    """
    check_windows(window, stride, limit, context_of(model.config))
    windows = windows_of(token_ids, window, stride, limit)

    configs = [{"kv_cache_dtype": REFERENCE}, *caches]
    chunk = chunk or default_chunk(model, len(configs))
    engines = [
        ScoringEngine(model, max_tokens=window - 1, chunk=chunk, **{**engine_options, **config}) for config in configs
    ]
    figures = _token_figures(engines, windows, progress)
    start_of = [i * (stride or window) for i in range(len(windows))]
    positions = [start + i for start, w in zip(start_of, windows) for i in range(w.num_context, len(w.token_ids))]
    tokens = [token_ids[position] for position in positions]
    return [
        _summary(engine, config["kv_cache_dtype"], parts, positions, tokens, num_worst)
        for engine, config, parts in zip(engines[1:], caches, figures, strict=True)
    ]


def _token_figures(
    engines: Sequence[ScoringEngine], windows: Sequence[Window], progress: Callable[[int], object] | None
) -> list[_TokenFigures]:
    """Of every scored token, in order, for all engines but the first, which is the reference."""
    found: list[list[list[_TokenFigures]]] = [[[] for _ in windows] for _ in engines[1:]]
    streams = [engine.score([w.token_ids[:-1] for w in windows]) for engine in engines]
    for (i, start, reference), *others in zip(*streams, strict=True):
        w = windows[i]
        skip = max(0, w.num_context - 1 - start)  # rows that only read context
        following = torch.tensor(w.token_ids[start + 1 : start + 1 + len(reference)], device=reference.device)
        for parts, (j, other_start, logits) in zip(found, others, strict=True):
            assert (i, start) == (j, other_start), "engines of one config schedule alike"
            parts[i].append(_compare(reference[skip:], logits[skip:], following[skip:]))
        if progress is not None:
            progress(max(0, len(reference) - skip))
    return [_TokenFigures.joined([part for parts in by_window for part in parts]) for by_window in found]


def _compare(reference: Tensor, logits: Tensor, token_ids: Tensor) -> _TokenFigures:
    """Two sets of logits `[n, vocab]` over the same tokens; never more than 3 x 64 MB of them are held in fp32."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = []
    for theirs, mine, ids in zip(reference.split(rows), logits.split(rows), token_ids.unsqueeze(-1).split(rows)):
        p, q = (x.float().log_softmax(-1) for x in (theirs, mine))
        parts.append(
            _TokenFigures(
                same_top1=p.argmax(-1) == q.argmax(-1),
                kl=(p.exp() * (p - q)).sum(-1),
                logprob=q.gather(-1, ids).squeeze(-1),
                reference=p.gather(-1, ids).squeeze(-1),
            )
        )
    return _TokenFigures.joined(parts)


def _summary(
    engine: ScoringEngine,
    kv_cache_dtype: str,
    figures: _TokenFigures,
    positions: Sequence[int],
    tokens: Sequence[int],
    num_worst: int,
) -> Divergence:
    kl, logprob, reference = (x.double().cpu() for x in (figures.kl, figures.logprob, figures.reference))
    worst = kl.topk(min(num_worst, len(kl))).indices.tolist()
    return Divergence(
        **facts_of(engine, kv_cache_dtype),
        num_tokens=len(kl),
        top1_agreement=float(figures.same_top1.double().mean()),
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]),
        max_kl=float(kl.max()),
        mean_abs_delta=float((logprob - reference).abs().mean()),
        perplexity=math.exp(-float(logprob.mean())),
        reference_perplexity=math.exp(-float(reference.mean())),
        worst=tuple(
            TokenDivergence(
                position=positions[i],
                token_id=tokens[i],
                kl=float(kl[i]),
                logprob=float(logprob[i]),
                reference_logprob=float(reference[i]),
            )
            for i in worst
        ),
    )
