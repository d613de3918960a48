"""A bounded workspace of dequantized pages, so that long prompts multiply 16-bit numbers.

A prompt meets every code once per tile of queries. Widening it there, in every tile, costs more than the products: 150
TFLOP/s on an H200 where 16-bit pages reach 420. Here a step's pages are dequantized once, as many KV heads at a time as
fit into `WORKSPACE_BYTES`. What is attended to are the values that the pages hold, rounded to the dtype of the query.

16-bit pages need no workspace, but as few heads side by side: then the keys that programs read at a time share the L2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.layout import AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages

WORKSPACE_BYTES = 128 << 20
LEAST_QUERIES = 128  # fewer do not pay for dequantizing their history
LEAST_ROWS = 1 << 17  # queries times heads of one launch over 16-bit pages, so that it fills the GPU


@triton.jit(do_not_specialize=["first_seq", "first_head", "window", "tables_stride"])
def _dequantize(
    out_ptr,  # [num_seqs, heads, tokens, DIM]
    codes_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, DIM], 4 bits: DIM / 2
    scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, 4 bits: [..., groups, 2]
    tables_ptr,  # [.., max_blocks] int32
    cu_seqlens_ptr,  # [.. + 1] int32
    seq_lens_ptr,  # [..] int32
    first_seq,
    first_head,
    window,
    stride,
    scale_stride,
    tables_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    INT4: tl.constexpr,
):
    """One page of one head. Keys that no query sees are left out."""
    i = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + first_seq + seq)
    first_key = 0
    if WINDOW:
        q_len = tl.load(cu_seqlens_ptr + first_seq + seq + 1) - tl.load(cu_seqlens_ptr + first_seq + seq)
        first_key = seq_len - q_len - window + 1
    if (i * BLOCK_SIZE >= seq_len) | ((i + 1) * BLOCK_SIZE <= first_key):
        return
    block = tl.load(tables_ptr + (first_seq + seq).to(tl.int64) * tables_stride + i).to(tl.int64)
    n = tl.arange(0, BLOCK_SIZE)
    d = tl.arange(0, BLOCK)
    keep = i * BLOCK_SIZE + n < seq_len
    mask = keep[:, None] & (d < DIM)[None, :]
    row = (first_head + head) * BLOCK_SIZE + n
    if INT4:
        values, scale = group_tile(codes_ptr, scale_ptr, block, row, stride, scale_stride, d, keep, DIM, tl.float32)
    else:
        values = tl.load(codes_ptr + block * stride + row[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        scale = tl.load(scale_ptr + block * scale_stride + row, mask=keep, other=0.0).to(tl.float32)
    values = values.to(tl.float32) * scale[:, None]
    to = ((seq * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(0) + i) * BLOCK_SIZE + n
    tl.store(out_ptr + to[:, None] * DIM + d[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)


def wanted(query: Tensor, layer: LayerKV, meta: AttentionMetadata) -> bool:
    """Whether a step's prompts are worth a workspace, and one KV head of it fits."""
    plain = isinstance(layer.k, PlainPages) or isinstance(layer.v, PlainPages)
    if plain or query.dtype == torch.float32 or meta.max_seqlen_q < LEAST_QUERIES:
        return False
    return _head_bytes(layer, meta) <= WORKSPACE_BYTES


def slices(
    query: Tensor, layer: LayerKV, meta: AttentionMetadata, window: int | None
) -> Iterator[tuple[slice, LayerKV]]:
    """KV heads of a step's prompts, and their values: one block `[heads, tokens, head_dim]` per prompt.

    All slices share one workspace: attend to one before asking for the next.
    """
    kv_heads = layer.k.tensor.shape[1]
    num_seqs, max_blocks = meta.num_seqs - meta.num_decodes, _blocks(layer, meta)
    tokens = max_blocks * layer.block_size
    heads = _heads_at_once(layer, meta)
    spaces = [query.new_empty(num_seqs * heads * tokens * pages.head_dim) for pages in (layer.k, layer.v)]
    for first in range(0, kv_heads, heads):
        count = min(heads, kv_heads - first)
        values = []
        for pages, space in zip((layer.k, layer.v), spaces, strict=True):
            shape = (num_seqs, count, tokens, pages.head_dim)
            values.append(space[: num_seqs * count * tokens * pages.head_dim].view(shape))
            _launch(values[-1], pages, meta, first, window, (max_blocks, count, num_seqs))
        yield slice(first, first + count), LayerKV(k=PlainPages(data=values[0]), v=PlainPages(data=values[1]))


def plain_slices(query: Tensor, layer: LayerKV, meta: AttentionMetadata) -> Iterator[tuple[slice, LayerKV]]:
    """KV heads of 16-bit pages, and these pages: all of them unless a step's keys and values exceed the workspace."""
    assert isinstance(layer.k, PlainPages) and isinstance(layer.v, PlainPages)
    kv_heads = layer.k.tensor.shape[1]
    heads = max(_heads_at_once(layer, meta), LEAST_ROWS * kv_heads // (query.shape[0] * query.shape[1]))
    for first in range(0, kv_heads, heads):
        some = slice(first, min(first + heads, kv_heads))
        yield some, LayerKV(k=PlainPages(data=layer.k.data[:, some]), v=PlainPages(data=layer.v.data[:, some]))


def _launch(
    out: Tensor,
    pages: Pages,
    meta: AttentionMetadata,
    first_head: int,
    window: int | None,
    grid: tuple[int, int, int],
) -> None:
    assert not isinstance(pages, PlainPages)
    _dequantize[grid](
        out,
        pages.codes,
        pages.scale,
        meta.block_tables,
        meta.cu_seqlens_q,
        meta.seq_lens,
        meta.num_decodes,
        first_head,
        window or 0,
        pages.codes.stride(0),
        pages.scale.stride(0),
        meta.block_tables.stride(0),
        DIM=pages.head_dim,
        BLOCK=triton.next_power_of_2(pages.head_dim),
        BLOCK_SIZE=pages.codes.shape[2],
        WINDOW=window is not None,
        INT4=isinstance(pages, GroupPages),
    )


def _blocks(layer: LayerKV, meta: AttentionMetadata) -> int:
    return min(-(-meta.max_seq_len // layer.block_size), meta.block_tables.shape[1])


def _heads_at_once(layer: LayerKV, meta: AttentionMetadata) -> int:
    """KV heads whose 16-bit keys and values fit, spread evenly; one at least."""
    kv_heads = layer.k.tensor.shape[1]
    return -(-kv_heads // max(-(-kv_heads * _head_bytes(layer, meta) // WORKSPACE_BYTES), 1))


def _head_bytes(layer: LayerKV, meta: AttentionMetadata) -> int:
    """Workspace of one KV head."""
    tokens = (meta.num_seqs - meta.num_decodes) * _blocks(layer, meta) * layer.block_size
    return tokens * 2 * (layer.k.head_dim + layer.v.head_dim)
