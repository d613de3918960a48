"""Text of a growing sequence, a token at a time: never half a character, never text that a stop string takes back.

A token's text depends on its neighbours (leading spaces, merged bytes), so each step decodes a short window of the last
tokens and takes what the new token added. The window starts with the end of the prompt: prompt and output read as one
text, and a SentencePiece tokenizer keeps the space before the first output token. With an empty prompt the pieces join
to `tokenizer.decode(output, clean_up_tokenization_spaces=False)`. The clean-up of spaces before punctuation is refused,
for it changes text that was already given out.

One exception: a tokenizer with byte tokens turns a run of them into replacement characters if *any* byte of the run is
wrong. Characters of such a run that were complete when they came are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_paged.sampling_params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MIN_WINDOW = 4  # tokens kept as the neighbours of the next one
_MAX_WINDOW = 12  # tokens at which the window is cut, so that a step costs the same at any length
_MAX_PENDING = 16  # a character has at most 4 bytes: after this many tokens a replacement character is here to stay


def detokenize(
    tokenizer: Any, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], params: SamplingParams
) -> str:
    """The text of a whole output at once, without stop strings. What `Detokenizer` gives piece by piece."""
    decode = _decoder(tokenizer, params)
    window, text = _context(decode, prompt_token_ids)
    return decode([*window, *output_token_ids])[len(text) :]


class Detokenizer:
    """The text of one output sequence.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt_token_ids: what the output continues.
        params: stop strings, min_tokens, include_stop_str_in_output, skip_special_tokens.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.stop_string: str | None = None  # the one that ended the text
        self._params = params
        self._decode = _decoder(tokenizer, params)
        # They decode to nothing wherever they are; a window full of them would only grow.
        self._skipped = frozenset(tokenizer.all_special_ids) if params.skip_special_tokens else frozenset()
        self._window, self._window_text = _context(self._decode, prompt_token_ids)
        self._num_read = len(self._window)  # tokens of the window that `_window_text` covers
        self._max_window = max(_MAX_WINDOW, 2 * len(self._window))
        self._num_tokens = 0
        self._text = ""
        self._num_held = 0  # characters at the end of `_text` that a stop string may yet take back

    @property
    def text(self) -> str:
        """The text so far, as far as no later token can change it."""
        return self._text[: len(self._text) - self._num_held]

    def append(self, token_id: int) -> str | None:
        """Take the next token; returns the stop string that it completes, if any. Tokens after a stop are ignored."""
        if self.stop_string is None:
            self._num_tokens += 1
            if token_id not in self._skipped:
                self._window.append(token_id)
                self._extend(self._read(is_last=False))
        return self.stop_string

    def finalize(self) -> str:
        """No token follows: the whole text, with everything that was held back. A half character reads as U+FFFD."""
        if self.stop_string is None:
            self._extend(self._read(is_last=True))
            self._num_held = 0
        return self._text

    def _read(self, *, is_last: bool) -> str:
        """The text that the tokens since the last call add; "" while it ends within a character."""
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and num_pending < _MAX_PENDING and not is_last:
            return ""
        added = text[len(self._window_text) :]
        self._window_text, self._num_read = text, len(self._window)
        if len(self._window) >= self._max_window:
            self._cut_window()
        return added

    def _cut_window(self) -> None:
        self._window, self._window_text = _tail(self._decode, self._window, self._window_text)
        self._num_read = len(self._window)
        self._max_window = max(_MAX_WINDOW, 2 * self._num_read)

    def _extend(self, added: str) -> None:
        stops = self._params.stop
        old_length = len(self._text)
        self._text += added
        if not stops or not added:
            return
        if self._num_tokens >= self._params.min_tokens and (found := _first_stop(self._text, stops, old_length)):
            start, end, self.stop_string = found
            self._text = self._text[: end if self._params.include_stop_str_in_output else start]
            self._num_held = 0
        else:
            self._num_held = _num_held(self._text, stops)


def _decoder(tokenizer: Any, params: SamplingParams) -> Callable[[list[int]], str]:
    """Decoding of a short list of tokens; by the backend itself where there is one, in a third of the time."""
    skip = params.skip_special_tokens
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=skip)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def _context(decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
    """The end of the prompt as the first window, and its text. A character it leaves unfinished is the output's."""
    length = 2 * _MIN_WINDOW
    while length < len(prompt_token_ids):
        window = list(prompt_token_ids[-length:])
        if _is_start(text := decode(window)):
            return window, text.rstrip(REPLACEMENT)
        length *= 2
    window = list(prompt_token_ids)
    return window, decode(window).rstrip(REPLACEMENT)


def _tail(decode: Callable[[list[int]], str], window: list[int], text: str) -> tuple[list[int], str]:
    """The shortest end of the window that later tokens can be decoded with as with all of it, and its text."""
    length = _MIN_WINDOW
    while length < len(window):
        tail = window[-length:]
        if _is_start(tail_text := decode(tail)) and text.endswith(tail_text):
            return tail, tail_text
        length *= 2
    return window, text


def _is_start(text: str) -> bool:
    """Whether a window with this text can be the first: a space after it is no leading space, and if it begins within a
    character, that character ends in it."""
    return text.strip(REPLACEMENT) != ""


def _first_stop(text: str, stops: Sequence[str], old_length: int) -> tuple[int, int, str] | None:
    """Start, end and name of the stop string that is complete first, in what was added after `old_length`.

    Of two that end together the longer one. So the text does not depend on how it was cut into tokens.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, old_length - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return None
    end, start, stop = min(found)
    return start, end, stop


def _num_held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
