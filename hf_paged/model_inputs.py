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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.config import EngineConfig
from hf_paged.kernels.layout import AttentionMetadata, CurrentBlocks
from hf_paged.request import Request, ScheduledRequest

_ALIGN = 16  # bytes; every part starts where any dtype may be viewed
_STAGING_BUFFERS = 3  # a step's staging is reused three steps later, when its copy is long done as a rule


class StepSizes(NamedTuple):
    """What a step takes in."""

    num_seqs: int
    num_decodes: int  # of the sequences, those with a single token; they come first
    num_tokens: int
    max_seqlen_q: int
    max_seq_len: int

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> StepSizes:
        prompts = [item.num_scheduled_tokens for item in scheduled if item.num_scheduled_tokens > 1]
        decodes = len(scheduled) - len(prompts)
        return cls(
            num_seqs=len(scheduled),
            num_decodes=decodes,
            num_tokens=decodes + sum(prompts),
            max_seqlen_q=max(prompts, default=1),
            max_seq_len=max([item.start + item.num_scheduled_tokens for item in scheduled]),
        )


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes that decide where each part of a step lies in its buffer."""

    num_tokens: int
    num_decodes: int
    num_seqs: int
    num_logits: int
    num_groups: int
    table_width: int  # columns of each block table
    keeps_recent: bool = False  # whether layers keep current blocks


class _Matrix(NamedTuple):
    """Part of a step's buffer; its rows start where any dtype may be viewed."""

    offset: int  # bytes
    rows: int
    columns: int
    itemsize: int  # bytes: int64 or int32

    @property
    def row_bytes(self) -> int:
        return math.ceil(self.columns * self.itemsize / _ALIGN) * _ALIGN


class StepPacking:
    """Where the parts of a step lie in one byte buffer: each is a row of one of four matrices.

    ========  =====  ===============  ==================================================================================
    tokens    int64  num_tokens       token_rows (of each token's sequence), positions, input_ids, each group's
                                      slot_mapping, recent_mapping *
    logits    int64  num_logits       logits_index (tokens whose logits are wanted), logits_rows (of their sequences),
                                      next_positions (of the tokens that follow them)
    seqs      int32  num_seqs + 1     cu_seqlens_q; with one element less seq_lens, starts *, recent_slots *
    tables    int32  num_seqs *       each group's block table
                     table_width
    ========  =====  ===============  ==================================================================================

    * where layers keep current blocks
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        g, recent = shape.num_groups, shape.keeps_recent
        self._matrices: list[_Matrix] = []
        self.num_bytes = 0
        for rows, columns, itemsize in (
            (3 + g + recent, shape.num_tokens, 8),
            (3, shape.num_logits, 8),
            (2 + 2 * recent, shape.num_seqs + 1, 4),
            (g, shape.num_seqs * shape.table_width, 4),
        ):
            matrix = _Matrix(self.num_bytes, rows, columns, itemsize)
            self._matrices.append(matrix)
            self.num_bytes += rows * matrix.row_bytes

    def on_host(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The four matrices."""
        return [
            np.ndarray((m.rows, m.columns), f"i{m.itemsize}", buffer, m.offset, (m.row_bytes, m.itemsize))
            for m in self._matrices
        ]

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """The parts by name; `slot_mapping` and `block_tables` of all groups in one."""
        g, s = self.shape.num_groups, self.shape.num_seqs
        words = {8: buffer.view(torch.int64), 4: buffer.view(torch.int32)}
        tokens, logits, seqs, tables = (
            words[m.itemsize].as_strided((m.rows, m.columns), (m.row_bytes // m.itemsize, 1), m.offset // m.itemsize)
            for m in self._matrices
        )
        parts = dict(zip(("token_rows", "positions", "input_ids"), tokens))
        parts |= zip(("logits_index", "logits_rows", "next_positions"), logits)
        parts |= {"cu_seqlens_q": seqs[0], "seq_lens": seqs[1, :s], "slot_mapping": tokens[3 : 3 + g]}
        if self.shape.keeps_recent:
            parts |= {"starts": seqs[2, :s], "recent_slots": seqs[3, :s], "recent_mapping": tokens[3 + g]}
        return parts | {"block_tables": tables.view(g, s, self.shape.table_width)}


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
        self._filled = [[0] * config.max_num_seqs for _ in range(num_groups)]  # entries of each row's table
        self._logits_padding = np.array([0, self.no_row, 0])[:, None]
        # of a token that is none: row, position and id 0, written nowhere
        self._token_padding = np.array([0] * 3 + [-1] * (num_groups + config.kv_recent_block), dtype=np.int64)[:, None]
        self._staging = [_Staging(device) for _ in range(_STAGING_BUFFERS)]
        self._turn = 0

    def admit(self, requests: Sequence[Request]) -> None:
        """Forget the tables of the rows that these requests just got."""
        for request in requests:
            assert request.row is not None
            for filled in self._filled:
                filled[request.row] = 0

    def shape_of(self, sizes: StepSizes, num_logits: int) -> StepShape:
        return StepShape(
            num_tokens=sizes.num_tokens,
            num_decodes=sizes.num_decodes,
            num_seqs=sizes.num_seqs,
            num_logits=num_logits,
            num_groups=self.num_groups,
            table_width=math.ceil(sizes.max_seq_len / self._block_size),
            keeps_recent=self.keeps_recent,
        )

    def build(
        self,
        scheduled: Sequence[ScheduledRequest],
        sizes: StepSizes,
        logits_index: np.ndarray,
        packing: StepPacking,
        buffer: Tensor | None = None,
    ) -> Tensor:
        """Fill a step's parts and copy them to the device: `[packing.num_bytes]` uint8 there.

        Args:
            scheduled: sequences of the step, single-token ones first.
            sizes: their `StepSizes`.
            logits_index: [num_logits] tokens whose logits are wanted, counted without padding.
            packing: of this step's shape, or of a larger one. Decodes are padded with single tokens of sequences of
                length 0, prompts with tokens of no sequence and sequences of no token.
            buffer: where a captured graph reads its inputs; None = fresh memory.
        """
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        staging = self._staging[self._turn]
        host = staging.free_bytes(packing.num_bytes)
        self._fill(packing, host.numpy(), scheduled, sizes, logits_index)
        if buffer is None:
            buffer = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._device)
        buffer.copy_(host, non_blocking=True)
        staging.mark_copied()
        return buffer

    def _fill(
        self,
        packing: StepPacking,
        buffer: np.ndarray,
        scheduled: Sequence[ScheduledRequest],
        sizes: StepSizes,
        logits_index: np.ndarray,
    ) -> None:
        self._update_tables(scheduled)
        tokens, logits, seqs, tables = packing.on_host(buffer)
        shape, g = packing.shape, self.num_groups
        firsts = _first_tokens(scheduled)
        rows, starts, _, counts = firsts
        ends = starts + counts
        values = _tokens(scheduled, sizes, firsts, len(tokens))
        columns = values[1] // self._block_size
        offsets = values[1] - columns * self._block_size
        values[3 : 3 + g] = self._tables[:, values[0], columns] * np.int64(self._block_size) + offsets
        lengths = ends[None]
        if self.keeps_recent:  # row r keeps the block of its last token in slot r + 1
            last = (ends - 1) // self._block_size
            slots = (values[0] + 1) * self._block_size + offsets
            values[3 + g] = np.where(columns == np.repeat(last, counts), slots, -1)
            lengths = np.stack((ends, last * self._block_size, rows + 1))
            assert ((counts == 1) | (starts % self._block_size == 0)).all(), "a chunk begins inside a block"
        decodes, padded = sizes.num_decodes, shape.num_decodes
        with_prompts = shape.num_seqs > padded

        def put(target: np.ndarray, source: np.ndarray, padding: np.ndarray | int = 0) -> None:
            """Columns of sequences or of tokens: the decodes, then the prompts, each followed by padding."""
            target[:, :decodes], target[:, decodes:padded] = source[:, :decodes], padding
            if with_prompts:
                end = padded + source.shape[1] - decodes
                target[:, padded:end], target[:, end:] = source[:, decodes:], padding

        put(tokens, values, self._token_padding)
        put(seqs[1:, :-1], lengths)
        put(tables.reshape(g, shape.num_seqs, shape.table_width), self._tables[:, rows, : shape.table_width])
        cu, wanted = seqs[0], len(logits_index)
        cu[: padded + 1] = np.arange(padded + 1)
        logits[0, :wanted] = logits_index
        logits[1:, :wanted] = values[:2, logits_index]
        logits[2, :wanted] += 1
        logits[:, wanted:] = self._logits_padding
        if with_prompts:
            cu[padded + 1 :] = padded + sizes.num_tokens - decodes
            cu[padded + 1 : padded + 1 + len(scheduled) - decodes] = padded + np.cumsum(counts[decodes:])
            logits[0, :wanted] += (padded - decodes) * (logits_index >= decodes)

    def _update_tables(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Append to the host's tables the blocks that each request got since it last ran."""
        for item in scheduled:
            row = item.request.row
            assert row is not None
            for g, table in enumerate(item.request.block_tables):
                filled = self._filled[g][row]
                if len(table) != filled:
                    self._tables[g, row, filled : len(table)] = table[filled:]
                    self._filled[g][row] = len(table)


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


def _first_tokens(scheduled: Sequence[ScheduledRequest]) -> np.ndarray:
    """[4, num_seqs] int64: row, position and id of each sequence's first token in the step, and how many follow from it
    on; an id that only the device knows is -1."""
    return np.array(
        [
            (request.row, start, request.token_ids[start] if start < len(request.token_ids) else -1, count)
            for request, count, start, _ in scheduled
        ],
        dtype=np.int64,
    ).T


def _tokens(scheduled: Sequence[ScheduledRequest], sizes: StepSizes, firsts: np.ndarray, height: int) -> np.ndarray:
    """[height, num_tokens] int64: row, position and id of every token of the step, and room."""
    tokens = np.empty((height, sizes.num_tokens), dtype=np.int64)
    if sizes.num_tokens == sizes.num_seqs:
        tokens[:3] = firsts[:3]
        return tokens
    counts = firsts[3]
    before = np.cumsum(counts) - counts
    tokens[:3] = np.repeat(firsts[:3], counts, axis=1)
    tokens[1] += np.arange(sizes.num_tokens) - np.repeat(before, counts)
    for at, (request, count, start, _) in zip(before.tolist(), scheduled, strict=True):
        if count > 1:
            known = request.token_ids[start : start + count]
            tokens[2, at : at + len(known)] = known
            tokens[2, at + len(known) : at + count] = -1
    return tokens
