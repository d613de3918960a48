"""Which keys the single queries of a step see, for the plain-torch attention: rows of similar length go together.

A group is gathered and computed at the length of its longest row, so one long sequence does not make the others pay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.kernels.layout import AttentionMetadata

_GROUP_ROWS = 4  # decode rows that are at least worth a gather and an attention of their own
_SIMILAR = 0.75  # a row shorter than this share of its group's longest starts another group


@dataclass(frozen=True, kw_only=True)
class DecodeKeys:
    """The keys that some single queries of a step see: the same in all layers of one window."""

    table: Tensor  # [B, blocks] int64, 0 where a block holds no visible key
    length: int  # keys per row, from the first block of `table` on
    mask: Tensor | None  # [B, 1, 1, length] bool, True = visible; None = all are
    unused: Tensor  # [n] int64, slots of `table` that are masked and may hold NaN, counted over [B, blocks, block_size]
    empty: Tensor  # [n] int64, rows that see no key


def decode_keys(seq_lens: Tensor, tables: Tensor, block_size: int, window: int | None) -> DecodeKeys:
    """Of `seq_lens` `[B]` int64 and `tables` `[B, blocks]`."""
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    first = max(shortest - window, 0) // block_size if window else 0
    table = tables[:, first : -(-longest // block_size)].long()
    length = longest - first * block_size
    none = seq_lens.new_empty(0)
    if shortest == longest and (not window or longest <= window):
        return DecodeKeys(table=table, length=length, mask=None, unused=none, empty=none)
    positions = torch.arange(first * block_size, (first + table.shape[1]) * block_size, device=table.device)
    mask = positions < seq_lens[:, None]
    if window:
        mask &= positions >= seq_lens[:, None] - window
    seen = mask.unflatten(1, (-1, block_size)).any(-1)
    return DecodeKeys(
        table=table.masked_fill(~seen, 0),  # blocks with no visible key may be another's: read the null block's zeros
        length=length,
        mask=mask[:, None, None, :length],
        unused=(~mask & seen.repeat_interleave(block_size, 1)).flatten().nonzero()[:, 0],
        empty=(seq_lens == 0).nonzero()[:, 0],
    )


@dataclass(frozen=True, kw_only=True)
class DecodeGroups:
    """The single queries of a step in groups of similar length: each is gathered and computed at its own longest."""

    order: Tensor | None  # [B] int64, rows from long to short; None = one group, rows as they are
    place: Tensor | None  # [B] int64, where each row is in `order`
    groups: tuple[tuple[slice, DecodeKeys], ...]  # of `order`


def decode_groups(meta: AttentionMetadata, block_size: int, window: int | None) -> DecodeGroups:
    seq_lens, tables = meta.seq_lens[: meta.num_decodes].long(), meta.block_tables[: meta.num_decodes]
    sorted_lens, order = seq_lens.sort(descending=True)
    lengths = sorted_lens.tolist()
    starts = [0]
    for i, length in enumerate(lengths):
        if i - starts[-1] >= _GROUP_ROWS and length < _SIMILAR * lengths[starts[-1]]:
            starts.append(i)
    if len(starts) == 1:
        keys = decode_keys(seq_lens, tables, block_size, window)
        return DecodeGroups(order=None, place=None, groups=((slice(None), keys),))
    slices = [slice(*ends) for ends in zip(starts, [*starts[1:], len(lengths)], strict=True)]
    return DecodeGroups(
        order=order,
        place=order.argsort(),
        groups=tuple(
            (rows, decode_keys(sorted_lens[rows], tables[order[rows]], block_size, window)) for rows in slices
        ),
    )
