"""What a caller gets back: `RequestOutput`, its completions, and their log-probabilities. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability under the model, before any sampling setting."""

    logprob: float  # natural logarithm; -inf is possible
    rank: int  # 1 = the likeliest token
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # by token id, the chosen token first


class TokensSoFar(Sequence[int]):
    """The tokens that a list holds now, without a copy: it only grows, and a stream of n tokens would copy n**2 / 2."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(self._length)[index]
        return self._tokens[places] if isinstance(places, int) else [self._tokens[i] for i in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    def __repr__(self) -> str:
        return repr(self[:])

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (self[:],)


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int  # 0..n-1
    text: str  # "" without a tokenizer or with detokenize=False
    token_ids: Sequence[int]  # a list once the sequence is finished
    logprobs: list[TokenLogprobs] | None = None  # one per token
    cumulative_logprob: float | None = None  # sum over the chosen tokens; None unless logprobs were asked for
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None = not finished
    stop_reason: int | str | None = None  # the stop token id or stop string; None for end of sequence


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Everything generated for one prompt so far."""

    request_id: str
    prompt: str | None  # None when the caller gave token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token; the first token has none
    finished: bool
    error: str | None = None  # why the request ended in "error"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. A number JSON cannot hold (-inf, NaN) becomes None; token ids as keys, strings."""
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
