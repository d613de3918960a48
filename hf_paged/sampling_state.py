"""What the sampler keeps on the device for each row: the settings of the request that holds the row, and its counts.

A request sets its row once, when it enters; all rows set since the last step travel in one non-blocking copy. The
tables that few requests need (logit edits, token counts) exist only once one of them has come, and then stay for later
ones. Sets of rows on the host say what a batch needs, so that no step does work nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_paged.kernels.rng import stream_of
from hf_paged.kernels.sample_reference import RowSampling
from hf_paged.sampling_params import SamplingParams

_FLOATS = ("temperature", "top_p", "max_distance", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "stream")
_ALWAYS = (1 << 63) - 1  # an edit that no position ends
_MIN_EDITS = 8


class SamplingNeeds(NamedTuple):
    """What a batch asks of the sampler beyond an argmax."""

    random: bool = False  # some row has a temperature
    edits: bool = False  # some row adds to single logits: logit_bias, min_tokens
    penalties: bool = False  # some row has a repetition, presence or frequency penalty
    num_logprobs: int | None = None  # the most alternatives that a row wants; None = no row wants log-probabilities


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """Additions to single logits. An edit holds for positions below its `until`; unused places add 0 to token 0."""

    token_ids: Tensor  # [rows, width] int64
    values: Tensor  # [rows, width] fp32
    until: Tensor  # [rows, width] int64


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Which tokens a row has seen."""

    output: Tensor  # [rows, vocab] int32
    in_prompt: Tensor  # [rows, vocab] bool


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A request about to take a row."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stream: int
    edits: list[tuple[int, float, int]]  # token id, value, until


class SamplingState:
    """Per-row sampling tensors.

    Args:
        max_num_seqs: number of rows.
        vocab_size: width of the logits.
        eos_token_ids: held back by `min_tokens` unless the request ignores them.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.edits: LogitEdits | None = None
        self.counts: TokenCounts | None = None
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._eos_token_ids = frozenset(eos_token_ids)
        self._floats = torch.zeros(len(_FLOATS), max_num_seqs, dtype=torch.float32, device=device)
        self._ints = torch.zeros(len(_INTS), max_num_seqs, dtype=torch.int64, device=device)
        floats = dict(zip(_FLOATS, self._floats, strict=True))
        ints = dict(zip(_INTS, self._ints, strict=True))
        self.repetition_penalty = floats["repetition_penalty"]  # [rows] fp32, as the next two
        self.presence_penalty = floats["presence_penalty"]
        self.frequency_penalty = floats["frequency_penalty"]
        self.sampling = RowSampling(
            temperature=floats["temperature"],
            top_p=floats["top_p"],
            max_distance=floats["max_distance"],
            top_k=ints["top_k"],
            stream=ints["stream"],
        )
        self._pending: dict[int, _Entry] = {}
        self._random: set[int] = set()
        self._edited: set[int] = set()
        self._penalized: set[int] = set()
        self._num_logprobs: dict[int, int] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """A request takes a row. The lists are read at the next `flush`, and must hold every token sampled so far.

        Raises:
            ValueError: logit_bias names a token outside the vocabulary.
        """
        edits = self._edits_of(params, len(prompt_token_ids))
        self._pending[row] = _Entry(
            params=params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            stream=stream_of(seed),
            edits=edits,
        )
        _mark(self._random, row, not params.is_greedy)
        _mark(self._edited, row, bool(edits))
        _mark(self._penalized, row, _is_penalized(params))
        self._num_logprobs.pop(row, None)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs

    def needs(self, rows: Iterable[int]) -> SamplingNeeds:
        """What a batch of these rows needs."""
        batch = set(rows)
        return SamplingNeeds(
            random=not self._random.isdisjoint(batch),
            edits=not self._edited.isdisjoint(batch),
            penalties=not self._penalized.isdisjoint(batch),
            num_logprobs=max([self._num_logprobs[row] for row in batch & self._num_logprobs.keys()], default=None),
        )

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError where `params` name a token outside the vocabulary."""
        for token in params.logit_bias or ():
            if token >= self.vocab_size:
                raise ValueError(f"logit_bias names token {token}; the vocabulary is 0..{self.vocab_size - 1}")

    def flush(self, rows: Iterable[int]) -> None:
        """Bring to the device what was set of these rows, in one copy that nobody waits for.

        A failure loses it, as their requests are lost then; what was set of other rows waits for their own step.
        """
        if not self._pending:
            return
        entries = {row: self._pending.pop(row) for row in rows if row in self._pending}
        if not entries:
            return
        self._make_room(entries.values())
        penalized = {row: entry for row, entry in entries.items() if row in self._penalized}
        ints, floats = _settings(entries)
        if self.edits is not None:
            edit_ints, edit_floats = _edit_rows(entries.values(), self.edits.values.shape[1])
            ints += edit_ints
            floats += edit_floats
        ints.append(list(penalized))
        for name in ("prompt_token_ids", "output_token_ids"):
            flat = [row * self.vocab_size + token for row, e in penalized.items() for token in getattr(e, name)]
            ints.append(flat)
        self._store(*_to_device(ints, floats, self._device))

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Note that rows `[n]` int64 sampled token ids `[n]` int64. The host need not know them."""
        assert self.counts is not None
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self.counts.output.view(-1).scatter_add_(0, rows * self.vocab_size + token_ids, ones)

    def _edits_of(self, params: SamplingParams, prompt_length: int) -> list[tuple[int, float, int]]:
        self.check(params)
        edits = [(token, bias, _ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        if params.min_tokens > 0:
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_token_ids)
            until = prompt_length + params.min_tokens
            # A stop id outside the vocabulary is never sampled.
            edits += [(token, -math.inf, until) for token in sorted(stops) if token < self.vocab_size]
        return edits

    def _make_room(self, entries: Iterable[_Entry]) -> None:
        """Allocate the tables that these rows are the first to need."""
        width = max(len(entry.edits) for entry in entries)
        if width > (self.edits.values.shape[1] if self.edits is not None else 0):
            width = max(_MIN_EDITS, 1 << (width - 1).bit_length())
            grown = LogitEdits(
                token_ids=torch.zeros(self._max_num_seqs, width, dtype=torch.int64, device=self._device),
                values=torch.zeros(self._max_num_seqs, width, dtype=torch.float32, device=self._device),
                until=torch.zeros(self._max_num_seqs, width, dtype=torch.int64, device=self._device),
            )
            if self.edits is not None:
                for name, old in vars(self.edits).items():
                    getattr(grown, name)[:, : old.shape[1]] = old
            self.edits = grown
        if self._penalized and self.counts is None:
            shape = (self._max_num_seqs, self.vocab_size)
            self.counts = TokenCounts(
                output=torch.zeros(shape, dtype=torch.int32, device=self._device),
                in_prompt=torch.zeros(shape, dtype=torch.bool, device=self._device),
            )

    def _store(self, ints: list[Tensor], floats: list[Tensor]) -> None:
        """The device half of `flush`: the lists are on the device, in the order in which they were packed."""
        rows, settings = ints[0], ints[1:3]
        self._ints.index_copy_(1, rows, torch.stack(settings))
        self._floats.index_copy_(1, rows, torch.stack(floats[: len(_FLOATS)]))
        if self.edits is not None:
            width = self.edits.values.shape[1]
            self.edits.token_ids.index_copy_(0, rows, ints[3].view(-1, width))
            self.edits.until.index_copy_(0, rows, ints[4].view(-1, width))
            self.edits.values.index_copy_(0, rows, floats[-1].view(-1, width))
        if self.counts is not None:
            penalized, prompt, output = ints[-3:]
            self.counts.output.index_fill_(0, penalized, 0)
            self.counts.in_prompt.index_fill_(0, penalized, 0)
            self.counts.in_prompt.view(-1).index_fill_(0, prompt, 1)
            ones = torch.ones_like(output, dtype=torch.int32)
            self.counts.output.view(-1).scatter_add_(0, output, ones)


def _mark(rows: set[int], row: int, is_member: bool) -> None:
    if is_member:
        rows.add(row)
    else:
        rows.discard(row)


def _is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _settings(entries: dict[int, _Entry]) -> tuple[list[list[int]], list[list[float]]]:
    """Columns of the entries: rows, then in the order of `_INTS`; and in the order of `_FLOATS`."""
    params = [entry.params for entry in entries.values()]
    ints = [list(entries), [p.top_k for p in params], [entry.stream for entry in entries.values()]]
    floats = [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    ]
    return ints, floats


def _edit_rows(entries: Iterable[_Entry], width: int) -> tuple[list[list[int]], list[list[float]]]:
    """Rows of `LogitEdits`, flat: token ids, until; and values."""
    padded = [edit for entry in entries for edit in entry.edits + [(0, 0.0, 0)] * (width - len(entry.edits))]
    token_ids, values, until = zip(*padded, strict=True)
    return [list(token_ids), list(until)], [list(values)]


def _to_device(
    ints: list[list[int]], floats: list[list[float]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """The lists as int64 and fp32 tensors, brought over in one copy.

    The pinned buffer is fresh: torch's allocator hands its memory out again only once the copy is done.
    """
    int_sizes, float_sizes = [len(values) for values in ints], [len(values) for values in floats]
    split = 8 * sum(int_sizes)
    host = torch.empty(split + 4 * sum(float_sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host[:split].view(torch.int64).copy_(torch.tensor([v for values in ints for v in values], dtype=torch.int64))
    host[split:].view(torch.float32).copy_(torch.tensor([v for values in floats for v in values], dtype=torch.float32))
    data = host.to(device, non_blocking=True)
    return (
        list(data[:split].view(torch.int64).split(int_sizes)),
        list(data[split:].view(torch.float32).split(float_sizes)),
    )
