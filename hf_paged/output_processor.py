"""From sampled tokens to `RequestOutput`: text, stop strings, log-probabilities, and n sequences under one id.

Text is decoded once at the end unless somebody watches (streaming) or a stop string must be found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from hf_paged.detokenizer import Detokenizer, detokenize
from hf_paged.outputs import CompletionOutput, RequestOutput, TokenLogprobs, TokensSoFar
from hf_paged.request import FinishReason, Request

logger = logging.getLogger(__name__)


class _Sequence:
    """What grows with one request."""

    def __init__(self, request: Request, tokenizer: Any, *, watched: bool) -> None:
        params = request.params
        self.request = request
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.detokenizer: Detokenizer | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        if self._tokenizer is not None and (watched or params.stop):
            self.detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        if self.detokenizer is None or self._ends_unseen:
            return None
        return self.detokenizer.append(token_id)

    @property
    def _ends_unseen(self) -> bool:
        """Whether the last token is the one that stopped the sequence, which its text does not show."""
        request = self.request
        by_token = request.finish_reason is FinishReason.STOP and not isinstance(request.stop_reason, str)
        return by_token and not request.params.include_stop_str_in_output

    def output(self, index: int) -> CompletionOutput:
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self._text(),
            token_ids=list(request.output_token_ids) if request.is_finished else TokensSoFar(request.output_token_ids),
            logprobs=list(self.logprobs) if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            finish_reason=request.finish_reason.value if request.finish_reason is not None else None,
            stop_reason=request.stop_reason,
        )

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        request = self.request
        if request.error is not None:  # perhaps because its tokens cannot be decoded
            return "" if self.detokenizer is None else self.detokenizer.text
        if self.detokenizer is not None:
            return self.detokenizer.finalize() if request.is_finished else self.detokenizer.text
        if not request.is_finished:
            return ""
        shown = request.output_token_ids[:-1] if self._ends_unseen else request.output_token_ids
        return detokenize(self._tokenizer, request.prompt_token_ids, shown, request.params)


class _Group:
    """The n sequences of one accepted request."""

    def __init__(self, request_id: str, sequences: Sequence[_Sequence], prompt: str | None, *, stream: bool) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.prompt = prompt
        self.stream = stream
        wanted = sequences[0].request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wanted else None  # the first token has none

    @property
    def is_finished(self) -> bool:
        return all(s.request.is_finished for s in self.sequences)

    def output(self) -> RequestOutput:
        errors = [s.request.error for s in self.sequences if s.request.error is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.sequences[0].request.prompt_token_ids,
            outputs=[s.output(i) for i, s in enumerate(self.sequences)],
            prompt_logprobs=self.prompt_logprobs,
            finished=self.is_finished,
            error=errors[0] if errors else None,
        )


class OutputProcessor:
    """Keeps what unfinished requests have produced. One terminal output per accepted request leaves it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._sequences: dict[str, tuple[_Group, _Sequence]] = {}  # by the request's own id

    def check_new(self, request_id: str) -> None:
        if request_id in self._groups:
            raise ValueError(f"request_id={request_id!r} is in use by an unfinished request")

    def add(self, request_id: str, requests: Sequence[Request], *, prompt: str | None, stream: bool) -> None:
        sequences = [_Sequence(request, self.tokenizer, watched=stream) for request in requests]
        group = _Group(request_id, sequences, prompt, stream=stream)
        self._groups[request_id] = group
        for sequence in sequences:
            self._sequences[sequence.request.request_id] = (group, sequence)

    def requests_of(self, request_id: str) -> list[Request]:
        """The unfinished group's requests; none for an unknown id."""
        group = self._groups.get(request_id)
        return [] if group is None else [s.request for s in group.sequences]

    def append(self, request: Request, logprobs: TokenLogprobs | None) -> str | None:
        """Take a request's newest token; returns the stop string that it completed, if any."""
        _, sequence = self._sequences[request.request_id]
        return sequence.append(request.output_token_ids[-1], logprobs)

    def add_prompt_logprobs(self, request: Request, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log-probabilities of prompt tokens `start` onwards.

        A request that was preempted computes its prompt again: what is known already stays.
        """
        group, _ = self._sequences[request.request_id]
        known = group.prompt_logprobs
        assert known is not None
        known.extend(logprobs[len(known) - start :])

    def collect(self, touched: Iterable[Request]) -> list[RequestOutput]:
        """Outputs of the groups that these requests belong to: those that ended, and those that stream."""
        groups = {}
        for request in touched:
            group, _ = self._sequences[request.request_id]
            if group.stream or request.is_finished:
                groups[group.request_id] = group
        outputs = []
        for group in groups.values():
            if group.is_finished:
                outputs.append(self._terminal_output(group))
                self._forget(group)
            elif group.stream:
                outputs.append(group.output())
        return outputs

    def _terminal_output(self, group: _Group) -> RequestOutput:
        """A text that cannot be decoded makes the group's output an error; those of the other groups are not lost."""
        try:
            return group.output()
        except Exception as error:
            logger.exception("the text of request %s failed", group.request_id)
            for sequence in group.sequences:
                sequence.request.error = f"{type(error).__name__}: {error}"
                sequence.request.finish_reason = FinishReason.ERROR
            return group.output()

    def _forget(self, group: _Group) -> None:
        del self._groups[group.request_id]
        for sequence in group.sequences:
            del self._sequences[sequence.request.request_id]
