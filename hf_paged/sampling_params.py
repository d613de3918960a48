"""How one request is sampled and when it stops: `SamplingParams`.

Names and meanings are those of vLLM's class of the same name. Every value is checked on construction; what cannot be
done is a `ValueError` that names the field, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_paged.config import check_bool, check_float, check_int, refuse

MAX_LOGPROBS = 20
MAX_N = 16384  # every sequence is a request of its own from the start


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Raises ValueError for a value out of range."""

    n: int = 1  # sequences per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 = off, and so is -1
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # > 0
    presence_penalty: float = 0.0  # in [-2, 2]
    frequency_penalty: float = 0.0  # in [-2, 2]
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    min_tokens: int = 0  # output tokens before a stop token may end the request
    max_tokens: int | None = 16  # None = to max_model_len
    seed: int | None = None  # draws that depend on no other request (16-bit logits may, by a rounding); None = any
    stop: tuple[str, ...] = ()  # a str or a sequence of str is accepted
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per output token; 0 = the chosen token only
    prompt_logprobs: int | None = None  # alternatives per prompt token; 0 = the prompt's own token only
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_distribution()
        self._check_length()
        if self.seed is not None:
            check_int("seed", self.seed, minimum=0, maximum=2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=0, maximum=MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            check_bool(name, getattr(self, name))
        if self.stop and not self.detokenize:
            refuse("stop", self.stop, "() when detokenize=False, a stop string needs the text")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def _check_distribution(self) -> None:
        check_int("n", self.n, minimum=1, maximum=MAX_N)
        check_float("temperature", self.temperature, minimum=0.0)
        check_float("top_p", self.top_p, minimum=0.0, maximum=1.0)
        if self.top_p == 0:
            refuse("top_p", self.top_p, "a number above 0, at most 1")
        check_int("top_k", self.top_k, minimum=-1, maximum=2**31 - 1)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        check_float("min_p", self.min_p, minimum=0.0, maximum=1.0)
        check_float("repetition_penalty", self.repetition_penalty, minimum=0.0)
        if self.repetition_penalty == 0:
            refuse("repetition_penalty", self.repetition_penalty, "a number above 0")
        check_float("presence_penalty", self.presence_penalty, minimum=-2.0, maximum=2.0)
        check_float("frequency_penalty", self.frequency_penalty, minimum=-2.0, maximum=2.0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                refuse("logit_bias", self.logit_bias, "a mapping of token id to number")
            _token_ids("logit_bias", self.logit_bias)
            for token, bias in self.logit_bias.items():
                check_float(f"logit_bias[{token}]", bias, minimum=-1e9, maximum=1e9)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # later changes of the caller's are not ours

    def _check_length(self) -> None:
        check_int("min_tokens", self.min_tokens, minimum=0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, minimum=1)
            if self.min_tokens > self.max_tokens:
                refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")


def _strings(value: object) -> tuple[str, ...]:
    allowed = "a non-empty string, or a sequence of them"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        refuse("stop", value, allowed)
    strings = tuple(value)
    if not all(isinstance(string, str) and string for string in strings):
        refuse("stop", value, allowed)
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(name, value, "token ids")
    tokens = tuple(value)
    for token in tokens:
        check_int(name, token, minimum=0)
    return tokens
