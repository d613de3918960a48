"""The rows behind a `PagedCache`: padded columns on the outside, block tables on the inside, one step at a time.

A *column* is a position of the padded batch as Transformers sees it; a row's token t sits in column `pad + t`. Padding
is never stored. A step is one forward: it begins with the first layer that writes, which assigns blocks, makes the
copies that shared tails need and builds the step's tensors once; the other layers use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention import CONTEXT_TAG, AttentionCall
from hf_paged.block_tables import BlockTables, Ints
from hf_paged.kernels.layout import AttentionMetadata, LayerKV
from hf_paged.kernels.paged_attention import paged_attention
from hf_paged.kernels.reference import gather_pages
from hf_paged.kernels.reshape_and_cache import write_kv
from hf_paged.page_store import PageStore


@dataclass(frozen=True, kw_only=True)
class _StepTensors:
    slot_mapping: Tensor  # [rows * q_len] int64; -1 = padding
    meta: AttentionMetadata  # of the rows that have tokens in this step
    live: Tensor | None  # [num_tokens] int64, flat query indices that are no padding; None = all


class _Step:
    """One forward: row r has `counts[r]` tokens, in the last of `q_len` new columns, and stores `stored[r]` of them."""

    def __init__(self, tables: BlockTables, counts: Ints, stored: Ints, q_len: int, *, paged: bool) -> None:
        self.q_len = q_len
        self.paged = paged  # attention reads the pages itself
        rows = np.flatnonzero(counts)
        slots = tables.slots(stored, q_len).ravel()
        is_real = np.arange(q_len) >= q_len - counts[:, None]
        self._num_rows = len(rows)
        self._num_slots = len(slots)
        self._live = None if is_real.all() else np.flatnonzero(is_real)
        self._max_seqlen_q = int(counts.max(initial=0))
        self._max_seq_len = int(tables.lengths.max(initial=0))
        self._width = -(-self._max_seq_len // tables.block_size)
        parts = [
            slots.view(np.int32),
            np.concatenate([[0], counts[rows].cumsum()]),
            tables.lengths[rows],
            tables.table[rows, : self._width].ravel(),
        ]
        self._packed = np.concatenate([part.astype(np.int32, copy=False) for part in parts])
        self._tensors: dict[torch.device, _StepTensors] = {}

    def on(self, device: torch.device) -> _StepTensors:
        """The step's tensors, copied to `device` once and all together."""
        if device not in self._tensors:
            packed = torch.from_numpy(self._packed).to(device)
            rows, width = self._num_rows, self._width
            slots, cu_seqlens, seq_lens, table = packed.split([2 * self._num_slots, rows + 1, rows, rows * width])
            meta = AttentionMetadata(
                cu_seqlens_q=cu_seqlens,
                seq_lens=seq_lens,
                block_tables=table.view(rows, width),
                slot_mapping=slots.view(torch.int64),
                num_decodes=rows if self._max_seqlen_q == 1 else 0,
                max_seqlen_q=self._max_seqlen_q,
                max_seq_len=self._max_seq_len,
            )
            live = None if self._live is None else torch.from_numpy(self._live).to(device)
            self._tensors[device] = _StepTensors(slot_mapping=meta.slot_mapping, meta=meta, live=live)
        return self._tensors[device]


class CachePages:
    """The rows of a batch in a `PageStore`, and the step in progress."""

    def __init__(self, store: PageStore, *, attends: bool = True) -> None:
        self.store = store
        self.attends = attends  # attention can read these pages: what is stored is what it wants
        self.tables = BlockTables(store.pool, store.config.block_size, 0)
        self.pads: Ints = np.zeros(0, dtype=np.int64)  # left padding per row, in columns
        self.columns = 0  # padded length, the step in progress included
        self.seen: dict[int, int] = {}  # columns per layer
        self._step: _Step | None = None
        self._copies_per_prompt = 1  # consecutive rows that hold one prompt, until column _prompt_columns
        self._prompt_columns = 0
        self._announced = False  # our mask function saw this cache: the coming step's attention reads pages
        self._unread: int | None = None  # layer that wrote for our attention and was not read yet

    @property
    def num_rows(self) -> int:
        return self.tables.num_rows

    @property
    def is_read_by_attention(self) -> bool:
        """Whether the step in progress leaves the reading to attention."""
        return self._step is not None and self._step.paged

    def share_prompt(self, copies: int, columns: int) -> None:
        """Store the first `columns` columns once for each `copies` consecutive rows: their tokens are the same."""
        self._copies_per_prompt = copies
        self._prompt_columns = columns

    # ---- one forward -------------------------------------------------------------------------------------------------

    def learn_padding(self, mask: Tensor | None, batch_size: int, q_len: int) -> None:
        """Take the left padding of the coming forward from its 2-D mask [batch, columns + q_len], before it writes.

        Raises:
            ValueError: the mask is not left padding, or is not the mask that earlier tokens were stored under.
        """
        pads = np.zeros(batch_size, dtype=np.int64)
        if mask is not None:
            if mask.shape != (batch_size, self.columns + q_len):
                raise ValueError(
                    f"attention_mask has shape {tuple(mask.shape)}; with {self.columns} cached columns and {q_len} new "
                    f"ones it must be {(batch_size, self.columns + q_len)}"
                )
            real = mask.bool()
            drops = (real[:, :-1] & ~real[:, 1:]).any(-1)
            pads, holes = torch.stack([(~real).sum(-1), drops.long()]).cpu().numpy()
            if holes.any():
                raise ValueError(
                    f"attention_mask masks tokens after real ones in rows {np.flatnonzero(holes).tolist()}; paged "
                    'attention takes left padding only: tokenize with padding_side="left"'
                )
        if self.num_rows:
            differs = np.minimum(pads, self.columns) != np.minimum(self.pads, self.columns)
            if len(pads) != self.num_rows or differs.any():
                raise ValueError(
                    f"attention_mask pads the {len(pads)} rows by {pads.tolist()} columns, but the cache stores "
                    f"{self.num_rows} rows padded by {self.pads.tolist()}"
                )
        self.pads = pads
        self._announced = True

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values, [batch, kv_heads, q_len, head_dim] each.

        Returns:
            the new keys and values, when attention reads the pages itself (`is_read_by_attention`); else all keys and
            values read back from the pages, [batch, kv_heads, columns, head_dim], zero where a column is padding.
        """
        key, value = key.detach(), value.detach()
        step = self._step_of(layer_idx, key)
        layer = self.store.prepare_layer(layer_idx, key, value)
        tensors = step.on(key.device)
        new_key, new_value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        if (transform := layer.transform) is not None:
            new_key, new_value = transform.stored_key(new_key), transform.stored_value(new_value)
        write_kv(layer, new_key, new_value, tensors.slot_mapping, tensors.meta.derived)
        self.seen[layer_idx] = self.columns
        if step.paged:
            self._unread = layer_idx
            return key, value
        return self._read(layer, key, "k"), self._read(layer, value, "v")

    @torch.no_grad()
    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """[batch, q_len, num_heads, v_head_dim] for the queries of the step in progress; zero for padding."""
        assert self._step is not None, "attention without an update"
        self._unread = None
        tensors = self._step.on(call.query.device)
        batch, _, q_len, _ = call.query.shape
        query = call.query.transpose(1, 2).flatten(0, 1)
        if tensors.live is not None:
            query = query[tensors.live]
        layer = self.store.layer(layer_idx)
        sinks = call.sinks
        if layer.transform is not None:
            query = layer.transform.query(query)
            sinks = layer.transform.sinks(sinks, query, call.scale)
        out = paged_attention(
            query.contiguous(),
            layer,
            tensors.meta,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=sinks,
        )
        if tensors.live is not None:
            padded = out.new_zeros(batch * q_len, *out.shape[1:])
            padded[tensors.live] = out
            out = padded
        return out.unflatten(0, (batch, q_len))

    def _step_of(self, layer_idx: int, key: Tensor) -> _Step:
        """The step this update belongs to: the one in progress, or a new one."""
        if self._unread is not None:
            raise ValueError(
                f"layer {self._unread} wrote pages that its attention did not read: a forward was cut short, or the "
                "model changes keys after storing them; call reset(), and use another attention implementation"
            )
        batch, _, q_len, _ = key.shape
        seen = self.seen.get(layer_idx, 0)
        if seen == self.columns:
            self._begin_step(batch, q_len)
        assert self._step is not None
        if seen + q_len != self.columns or q_len != self._step.q_len or batch != self.num_rows:
            raise ValueError(
                f"layer {layer_idx} holds {seen} columns and adds {q_len} for {batch} rows; the cache is at "
                f"{self.columns} columns of {self.num_rows} rows"
            )
        return self._step

    def _begin_step(self, batch: int, q_len: int) -> None:
        if self.num_rows == 0 and self.columns == 0:
            self.tables = BlockTables(self.store.pool, self.store.config.block_size, batch)
            self.pads = self.pads if self._announced else np.zeros(batch, dtype=np.int64)
        if batch != self.num_rows:
            raise ValueError(f"the cache holds {self.num_rows} rows and the model writes {batch}")
        counts = q_len - np.clip(self.pads - self.columns, 0, q_len)
        rows = np.arange(batch)
        shared = self.columns + q_len <= self._prompt_columns
        leaders = rows - rows % self._copies_per_prompt if shared else rows
        stored = np.where(rows == leaders, counts, 0)
        self.store.ensure_free(self.tables.blocks_needed(stored))
        self._unread = 0  # until all of it is done: a copy that finds no memory leaves rows that nobody may read
        copies = self.tables.append(stored)
        if copies:
            self.store.copy_blocks(copies)
        self.select(leaders.tolist())
        self._step = _Step(self.tables, counts, stored, q_len, paged=self._announced)
        self.columns += q_len
        self._announced = False
        self._unread = None

    def _read(self, layer: LayerKV, like: Tensor, side: Literal["k", "v"]) -> Tensor:
        """All columns of one layer's K or V, in the dtype of `like`."""
        table = torch.from_numpy(self.tables.table).to(like.device)
        pages = layer.k if side == "k" else layer.v
        values = gather_pages(pages, table, torch.promote_types(like.dtype, torch.float32))
        if (transform := layer.transform) is not None:
            undo = transform.key if side == "k" else transform.value
            values = undo(values.transpose(1, 2)).transpose(1, 2)
        column = torch.arange(self.columns, device=like.device) - torch.from_numpy(self.pads).to(like.device)[:, None]
        index = column.clamp(min=0)[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
        return values.gather(2, index).masked_fill((column < 0)[:, None, :, None], 0.0).to(like.dtype)

    # ---- rows and columns --------------------------------------------------------------------------------------------

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of the present row `rows[i]`: table entries and counts, no keys or values."""
        if self.num_rows:
            self.tables.select(rows)
            self.pads = self.pads[rows]

    def crop(self, count: int) -> None:
        """Take back the last `count` columns."""
        columns = max(self.columns - count, 0)
        self._prompt_columns = min(self._prompt_columns, columns)  # what comes next may differ between its rows
        self.seen = {layer: min(seen, columns) for layer, seen in self.seen.items()}
        self.columns = columns
        self.tables.truncate(np.minimum(self.tables.lengths, np.maximum(columns - self.pads, 0)))

    def fork(self) -> CachePages:
        """The same rows and columns once more; blocks are shared until one side writes into them."""
        other = CachePages(self.store, attends=self.attends)
        other.tables = self.tables.fork()
        other.pads, other.columns, other.seen = self.pads.copy(), self.columns, dict(self.seen)
        return other

    def free(self) -> None:
        """Give all blocks back and forget every row."""
        self.tables.free()
        self.pads = np.zeros(0, dtype=np.int64)
        self.columns = self._prompt_columns = 0
        self.seen = {}
        self._step = self._unread = None
        self._announced = False


def tag(key: Tensor, context: object) -> Tensor:
    """Let attention find the pages of `key`; the attribute survives every model's way to its attention function."""
    setattr(key, CONTEXT_TAG, context)
    return key
