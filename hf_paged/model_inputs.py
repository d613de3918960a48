"""Turn a `SchedulerOutput` into the flat tensors of one forward, with one host-to-device copy.

Host state (token ids, block tables) is kept per row in numpy and only grows by what a step adds. Everything a step
needs is packed into one byte buffer, staged in pinned memory on CUDA, and viewed as typed tensors on the device. A
captured graph reads from the same packing at a fixed address.

Tokens that an earlier step sampled and the host has not seen yet are sent as -1: the device fills them in from
`last_token` (see `ModelRunner`), so a step never waits for the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.config import EngineConfig
from hf_paged.kernels.layout import AttentionMetadata, CurrentBlocks
from hf_paged.request import Request, ScheduledRequest

_ALIGN = 16  # bytes; every part starts where any dtype may be viewed
_STAGING_BUFFERS = 3  # a step's staging is reused three steps later, when its copy is long done as a rule


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes that decide where each part of a step lies in its buffer."""

    num_tokens: int
    num_decodes: int  # of the sequences, those with a single token; they come first
    num_seqs: int
    num_logits: int
    num_groups: int
    table_width: int  # columns of each block table
    keeps_recent: bool = False  # whether layers keep current blocks


class StepPacking:
    """Offsets of a step's parts in one byte buffer, for numpy on the host and torch on the device."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        t, s, g = shape.num_tokens, shape.num_seqs, shape.num_groups
        sizes: dict[str, tuple[tuple[int, ...], str]] = {
            "input_ids": ((t,), "int64"),
            "positions": ((t,), "int64"),
            "token_rows": ((t,), "int64"),  # row of each token's sequence
            "slot_mapping": ((g, t), "int64"),
            "logits_index": ((shape.num_logits,), "int64"),  # tokens whose logits are wanted
            "logits_rows": ((shape.num_logits,), "int64"),  # the rows of their sequences
            "next_positions": ((shape.num_logits,), "int64"),  # of the tokens that follow them
            "cu_seqlens_q": ((s + 1,), "int32"),
            "seq_lens": ((s,), "int32"),
            "block_tables": ((g, s, shape.table_width), "int32"),
        }
        if shape.keeps_recent:
            sizes |= {"starts": ((s,), "int32"), "recent_slots": ((s,), "int32"), "recent_mapping": ((t,), "int64")}
        self._parts: dict[str, tuple[int, tuple[int, ...], str]] = {}
        offset = 0
        for name, (dims, dtype) in sizes.items():
            self._parts[name] = (offset, dims, dtype)
            offset += math.ceil(math.prod(dims) * np.dtype(dtype).itemsize / _ALIGN) * _ALIGN
        self.num_bytes = offset

    def on_host(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: buffer[offset : offset + math.prod(dims) * np.dtype(dtype).itemsize].view(dtype).reshape(dims)
            for name, (offset, dims, dtype) in self._parts.items()
        }

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[offset : offset + math.prod(dims) * np.dtype(dtype).itemsize]
            .view(getattr(torch, dtype))
            .view(dims)
            for name, (offset, dims, dtype) in self._parts.items()
        }


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One forward: packed tokens of all scheduled sequences, on the device."""

    input_ids: Tensor  # [num_tokens] int64, -1 = take the row's last sampled token
    positions: Tensor  # [num_tokens] int64
    token_rows: Tensor  # [num_tokens] int64
    logits_index: Tensor  # [num_logits] int64
    logits_rows: Tensor  # [num_logits] int64, `InputBuilder.no_row` for padding
    next_positions: Tensor  # [num_logits] int64
    metadata: tuple[AttentionMetadata, ...]  # one per KV group

    @classmethod
    def from_parts(
        cls, parts: dict[str, Tensor], *, num_decodes: int, max_seqlen_q: int, max_seq_len: int
    ) -> ModelInputs:
        current = None
        if "starts" in parts:
            current = CurrentBlocks(
                starts=parts["starts"], slots=parts["recent_slots"], slot_mapping=parts["recent_mapping"]
            )
        metadata = tuple(
            AttentionMetadata(
                cu_seqlens_q=parts["cu_seqlens_q"],
                seq_lens=parts["seq_lens"],
                block_tables=parts["block_tables"][g],
                slot_mapping=parts["slot_mapping"][g],
                num_decodes=num_decodes,
                max_seqlen_q=max_seqlen_q,
                max_seq_len=max_seq_len,
                current=current,
            )
            for g in range(parts["block_tables"].shape[0])
        )
        return cls(
            input_ids=parts["input_ids"],
            positions=parts["positions"],
            token_rows=parts["token_rows"],
            logits_index=parts["logits_index"],
            logits_rows=parts["logits_rows"],
            next_positions=parts["next_positions"],
            metadata=metadata,
        )


def one_prompt(first_block: int, num_blocks: int, block_size: int, positions: Tensor) -> AttentionMetadata:
    """One whole prompt at `positions` `[length]` int64, in `num_blocks` neighbouring blocks."""
    length, device = len(positions), positions.device
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        block_tables=torch.arange(first_block, first_block + num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=first_block * block_size + positions,
        num_decodes=0,
        max_seqlen_q=length,
        max_seq_len=length,
    )


def of_last_tokens(meta: AttentionMetadata, tokens: Tensor) -> AttentionMetadata:
    """Some sequences of a step as decodes of their last tokens, `tokens` `[n]` int64, which it computes with others."""
    ends = meta.cu_seqlens_q[1:]
    rows = torch.searchsorted(ends, tokens.to(ends.dtype), right=True).clamp_(max=len(ends) - 1)
    return AttentionMetadata(
        cu_seqlens_q=torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device),
        seq_lens=meta.seq_lens[rows],
        block_tables=meta.block_tables[rows],
        slot_mapping=meta.slot_mapping[tokens],
        num_decodes=len(tokens),
        max_seqlen_q=1,
        max_seq_len=meta.max_seq_len,
        current=None if meta.current is None else meta.current.of(rows, tokens),
    )


class InputBuilder:
    """Builds `ModelInputs`; owns the host's per-row tables and the staging memory."""

    def __init__(self, config: EngineConfig, *, num_groups: int, max_model_len: int, device: torch.device) -> None:
        self._block_size = config.block_size
        self.keeps_recent = config.kv_recent_block
        self._device = device
        self.table_capacity = math.ceil(max_model_len / config.block_size)
        self.num_groups = num_groups
        self.no_row = config.max_num_seqs  # stands where there is no sequence
        self._tables = np.zeros((num_groups, config.max_num_seqs, self.table_capacity), dtype=np.int32)
        self._filled = np.zeros((num_groups, config.max_num_seqs), dtype=np.int64)
        self._staging = [_Staging(device) for _ in range(_STAGING_BUFFERS)]
        self._turn = 0

    def admit(self, requests: Sequence[Request]) -> None:
        """Forget the tables of the rows that these requests just got."""
        for request in requests:
            self._filled[:, request.row] = 0

    def shape_of(self, scheduled: Sequence[ScheduledRequest], num_logits: int) -> StepShape:
        longest = max(item.start + item.num_scheduled_tokens for item in scheduled)
        return StepShape(
            num_tokens=sum(item.num_scheduled_tokens for item in scheduled),
            num_decodes=sum(item.num_scheduled_tokens == 1 for item in scheduled),
            num_seqs=len(scheduled),
            num_logits=num_logits,
            num_groups=self.num_groups,
            table_width=math.ceil(longest / self._block_size),
            keeps_recent=self.keeps_recent,
        )

    def build(
        self,
        scheduled: Sequence[ScheduledRequest],
        logits_index: np.ndarray,
        *,
        packing: StepPacking | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[StepPacking, Tensor]:
        """Fill a step's parts and copy them to the device: the packing and the bytes on the device.

        Args:
            scheduled: sequences of the step, single-token ones first.
            logits_index: [num_logits] tokens whose logits are wanted, counted without padding.
            packing, buffer: where a captured graph reads its inputs; its shape may be larger than the step. Decodes are
                padded with single tokens of sequences of length 0, prompts with tokens of no sequence and sequences
                of no token. Default: a packing of exactly this step in fresh memory.
        """
        packing = packing or StepPacking(self.shape_of(scheduled, len(logits_index)))
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        staging = self._staging[self._turn]
        host = staging.free_bytes(packing.num_bytes)
        self._fill(packing, host.numpy(), scheduled, logits_index)
        if buffer is None:
            buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._device)
        buffer.copy_(host, non_blocking=True)
        staging.mark_copied()
        return packing, buffer

    def _fill(
        self, packing: StepPacking, buffer: np.ndarray, scheduled: Sequence[ScheduledRequest], logits_index: np.ndarray
    ) -> None:
        host = packing.on_host(buffer)
        n, padded_decodes = len(scheduled), packing.shape.num_decodes
        rows = np.fromiter((item.request.row for item in scheduled), np.int64, n)
        starts = np.fromiter((item.start for item in scheduled), np.int64, n)
        counts = np.fromiter((item.num_scheduled_tokens for item in scheduled), np.int64, n)
        decodes = int((counts == 1).sum())
        firsts = np.cumsum(counts) - counts  # of each sequence, its first token in the step without padding
        total = int(counts.sum())
        token_rows = np.repeat(rows, counts)
        positions = np.arange(total) + np.repeat(starts - firsts, counts)
        self._update_tables(scheduled)
        columns = positions // self._block_size
        offsets = positions - columns * self._block_size

        def put(target: np.ndarray, values: np.ndarray, *, pad: int) -> None:
            """Values of sequences or of tokens: the decodes, then the prompts, each followed by padding."""
            end = padded_decodes + len(values) - decodes
            target[:decodes], target[padded_decodes:end] = values[:decodes], values[decodes:]
            target[decodes:padded_decodes] = pad
            target[end:] = pad

        width = packing.shape.table_width
        for g in range(self.num_groups):
            slots = self._tables[g, token_rows, columns] * np.int64(self._block_size) + offsets
            put(host["slot_mapping"][g], slots, pad=-1)
            put(host["block_tables"][g], self._tables[g, rows, :width], pad=0)
        put(host["positions"], positions, pad=0)
        put(host["token_rows"], token_rows, pad=0)
        put(host["seq_lens"], starts + counts, pad=0)
        put(host["input_ids"], _token_ids(scheduled, total), pad=0)
        if self.keeps_recent:  # row r keeps the block of its last token in slot r + 1
            last = (starts + counts - 1) // self._block_size
            put(host["starts"], last * self._block_size, pad=0)
            put(host["recent_slots"], rows + 1, pad=0)
            slots = np.repeat(rows + 1, counts) * self._block_size + offsets
            put(host["recent_mapping"], np.where(columns == np.repeat(last, counts), slots, -1), pad=-1)
            assert ((counts == 1) | (starts % self._block_size == 0)).all(), "a chunk begins inside a block"
        cu = host["cu_seqlens_q"]
        cu[: padded_decodes + 1] = np.arange(padded_decodes + 1)
        cu[padded_decodes + 1 :] = padded_decodes + total - decodes
        cu[padded_decodes + 1 : padded_decodes + 1 + n - decodes] = padded_decodes + np.cumsum(counts[decodes:])
        wanted = len(logits_index)
        for name, values, pad_value in (
            ("logits_index", np.where(logits_index < decodes, 0, padded_decodes - decodes) + logits_index, 0),
            ("logits_rows", token_rows[logits_index], self.no_row),
            ("next_positions", positions[logits_index] + 1, 0),
        ):
            host[name][:wanted], host[name][wanted:] = values, pad_value

    def _update_tables(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Append to the host's tables the blocks that each request got since it last ran."""
        for item in scheduled:
            row = item.request.row
            for g, table in enumerate(item.request.block_tables):
                filled = self._filled[g, row]
                if len(table) != filled:
                    self._tables[g, row, filled : len(table)] = table[filled:]
                    self._filled[g, row] = len(table)


class _Staging:
    """Host memory of one step. Pinned memory is read when the device gets to the copy, not when it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def free_bytes(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8 that may be written; waits if the host is so far ahead that they are yet to be copied."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._bytes.numel() < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=self._copied is not None)
        return self._bytes[:num_bytes]

    def mark_copied(self) -> None:
        """A copy of the bytes was launched on the current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def _token_ids(scheduled: Sequence[ScheduledRequest], total: int) -> np.ndarray:
    """[total] token ids of the step; -1 where only the device knows the token."""
    ids = np.full(total, -1, dtype=np.int64)
    at = 0
    for request, count, start, _ in scheduled:
        if count == 1:
            if start < len(request.token_ids):
                ids[at] = request.token_ids[start]
        else:
            known = request.token_ids[start : start + count]
            ids[at : at + len(known)] = known
        at += count
    return ids
