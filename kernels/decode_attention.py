"""Triton decode attention over pages: one query per sequence, memory-bound by design.

One program reads an equal share of all (sequence, KV head) pairs' tiles (`decode_shares.py`). A tile lies inside one
page, so it needs one scalar block-table load and one 64-bit base; every other offset is static. All query heads of the
KV head share the tile (they fill rows that the matrix unit would pad). Only a sequence's last tile, and the first of a
window, are masked. `decode_registers.py` is the faster kernel of the common shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.decode_config import DecodeConfig, choose_config
from hf_paged.kernels.decode_int4 import padded_heads
from hf_paged.kernels.decode_registers import decode_registers_kernel
from hf_paged.kernels.decode_shares import join_kernel, share, visible_tiles
from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.layout import AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.tiles import LOG2_E, normalise_rows, softmax_step


@triton.jit(
    do_not_specialize=["num_seqs", "kv_heads", "held", "window", "tables_stride"]
)  # they vary: no kernel per value
def _decode(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [programs, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [programs, 2, GROUP] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM]
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM]
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [num_seqs, heads] where SINKS is 2
    q_stride_t,
    q_stride_h,
    k_stride,
    k_scale_stride,
    v_stride,
    v_scale_stride,
    tables_stride,
    scale,  # softmax scale; times log2 e without SOFTCAP, times 2 log2 e / softcap with it
    softcap,  # softcap * log2 e
    window,
    num_seqs,
    kv_heads,
    held,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr,
    V_INT4: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    start, stop, seq, before = share(seq_lens_ptr, num_seqs, kv_heads, window, held, WINDOW, TILE, LEAST, WHOLE)
    while start < stop:
        seq_len = tl.load(seq_lens_ptr + seq)
        first_token, first_tile, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        offset = start - before * kv_heads
        if offset >= tiles * kv_heads:
            before += tiles
            seq += 1
        else:
            kv_head = offset // tiles
            skipped = offset % tiles
            count = tl.minimum(tiles - skipped, stop - start)
            begin = first_tile + skipped
            row = tl.arange(0, ROWS)
            dk = tl.arange(0, K_BLOCK)
            head = kv_head * GROUP + row
            q_offset = seq.to(tl.int64) * q_stride_t + head * q_stride_h
            q_mask = (row < GROUP)[:, None] & (dk < K_DIM)[None, :]
            q = tl.load(q_ptr + q_offset[:, None] + dk[None, :], mask=q_mask, other=0.0)
            acc, total, top = _attend(
                q, begin, begin + count, first_token, seq_len, kv_head, tables_ptr + seq.to(tl.int64) * tables_stride,
                k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, k_stride, k_scale_stride, v_stride, v_scale_stride,
                scale, softcap, ROWS, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, TILE, WINDOW, SOFTCAP,
                K_SCALED, V_SCALED, K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE, STAGES,
            )  # fmt: skip
            dv = tl.arange(0, V_BLOCK)
            mask = (row < GROUP)[:, None] & (dv < V_DIM)[None, :]
            if count == tiles:
                if SINKS:
                    at = seq * (kv_heads * GROUP) * (SINKS - 1) + head
                    sink = tl.load(sinks_ptr + at, mask=row < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
                    new_top = tl.maximum(top, sink)
                    acc *= tl.exp2(top - new_top)[:, None]
                    total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
                out_row = (seq.to(tl.int64) * (kv_heads * GROUP) + head) * V_DIM
                out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + out_row[:, None] + dv[None, :], out, mask=mask)
            else:
                slot = (tl.program_id(0) * 2 + (skipped == 0).to(tl.int32)) * GROUP + row
                tl.store(partial_ptr + slot[:, None] * V_DIM + dv[None, :], acc / total[:, None], mask=mask)
                tl.store(lse_ptr + slot, top + tl.log2(total), mask=row < GROUP)
            start += count


@triton.jit
def _attend(
    q,  # [ROWS, K_BLOCK]
    begin,
    end,
    first_token,
    seq_len,
    kv_head,
    table_ptr,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_stride,
    k_scale_stride,
    v_stride,
    v_scale_stride,
    scale,
    softcap,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr,
    V_INT4: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles `[begin, end)` of one sequence and KV head: weighted values, denominator and maximum of the softmax."""
    n = tl.arange(0, TILE)
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    q, q_unit = normalise_rows(q, K_DOT, K_SCALED)
    q_unit *= scale
    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    v_unit = 1e-30
    k_offset = n[:, None] * K_DIM + dk[None, :]
    v_offset = n[:, None] * V_DIM + dv[None, :]
    k_mask = (dk < K_DIM)[None, :] & (n >= 0)[:, None]
    v_mask = (dv < V_DIM)[None, :] & (n >= 0)[:, None]

    # Masked tiles first, whatever their place: the order of keys does not matter to a softmax.
    last_partial = (end * TILE > seq_len).to(tl.int32)
    first_partial = 0
    if WINDOW:
        first_partial = ((begin * TILE < first_token) & (end - begin > last_partial)).to(tl.int32)
    for i in range(last_partial + first_partial):
        tile = tl.where(i < last_partial, end - 1, begin)
        block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
        row_in_block = kv_head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE
        position = tile * TILE + n
        keep = (position < seq_len) & (position >= first_token)
        k_scale = tl.zeros([TILE], tl.float32)
        v_scale = tl.zeros([TILE], tl.float32)
        if K_INT4:
            rows = row_in_block + n
            k, k_scale = group_tile(k_ptr, k_scale_ptr, block, rows, k_stride, k_scale_stride, dk, keep, K_DIM, K_DOT)
        else:
            k_tile = k_ptr + (block * k_stride + row_in_block * K_DIM)
            k = tl.load(k_tile + k_offset, mask=k_mask & keep[:, None], other=0.0)
            if K_SCALED:
                k_scale_tile = k_scale_ptr + (block * k_scale_stride + row_in_block)
                k_scale = tl.load(k_scale_tile + n, mask=keep, other=0.0).to(tl.float32)
        if V_INT4:
            rows = row_in_block + n
            v, v_scale = group_tile(v_ptr, v_scale_ptr, block, rows, v_stride, v_scale_stride, dv, keep, V_DIM, V_DOT)
        else:
            v_tile = v_ptr + (block * v_stride + row_in_block * V_DIM)
            v = tl.load(v_tile + v_offset, mask=v_mask & keep[:, None], other=0.0)
            if V_SCALED:
                v_scale_tile = v_scale_ptr + (block * v_scale_stride + row_in_block)
                v_scale = tl.load(v_scale_tile + n, mask=keep, other=0.0).to(tl.float32)
        acc, total, top, v_unit = softmax_step(
            acc, total, top, v_unit, q, q_unit, k, k_scale, v, v_scale, keep[None, :], softcap,
            True, SOFTCAP, K_SCALED, V_SCALED, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip

    for tile in tl.range(begin + first_partial, end - last_partial, num_stages=STAGES):
        block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
        row_in_block = kv_head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE
        k_tile = k_ptr + (block * k_stride + row_in_block * K_DIM)
        v_tile = v_ptr + (block * v_stride + row_in_block * V_DIM)
        k_scale = tl.zeros([TILE], tl.float32)
        v_scale = tl.zeros([TILE], tl.float32)
        if K_INT4:
            rows = row_in_block + n
            k, k_scale = group_tile(k_ptr, k_scale_ptr, block, rows, k_stride, k_scale_stride, dk, n >= 0, K_DIM, K_DOT)
        elif K_BLOCK == K_DIM:
            k = tl.load(k_tile + k_offset, eviction_policy="evict_first")
        else:
            k = tl.load(k_tile + k_offset, mask=k_mask, other=0.0, eviction_policy="evict_first")
        if V_INT4:
            rows = row_in_block + n
            v, v_scale = group_tile(v_ptr, v_scale_ptr, block, rows, v_stride, v_scale_stride, dv, n >= 0, V_DIM, V_DOT)
        elif V_BLOCK == V_DIM:
            v = tl.load(v_tile + v_offset, eviction_policy="evict_first")
        else:
            v = tl.load(v_tile + v_offset, mask=v_mask, other=0.0, eviction_policy="evict_first")
        if K_SCALED and not K_INT4:
            k_scale = tl.load(k_scale_ptr + (block * k_scale_stride + row_in_block) + n).to(tl.float32)
        if V_SCALED and not V_INT4:
            v_scale = tl.load(v_scale_ptr + (block * v_scale_stride + row_in_block) + n).to(tl.float32)
        acc, total, top, v_unit = softmax_step(
            acc, total, top, v_unit, q, q_unit, k, k_scale, v, v_scale, None, softcap,
            False, SOFTCAP, K_SCALED, V_SCALED, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip

    if V_SCALED:
        acc *= v_unit
    return acc, total, top


@on_device
def decode_attention(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of the first `meta.num_decodes` rows of `query` `[T, heads, head_dim]`, into the same rows of `out`.

    Allocates only through torch (graph-safe) and never synchronises. Rows with `seq_lens` 0 become zeros.
    """
    num_seqs, heads = meta.num_decodes, query.shape[1]
    k, v = layer.k.tensor, layer.v.tensor
    kv_heads, group = k.shape[1], heads // k.shape[1]
    bound = min(meta.max_seq_len, window) if window else meta.max_seq_len
    config = config or choose_config(query, layer, num_seqs, bound)
    partial = torch.empty((config.programs, 2, group, layer.v.head_dim), dtype=torch.float32, device=out.device)
    lse = torch.empty((config.programs, 2, group), dtype=torch.float32, device=out.device)
    k_scale, v_scale = _scale(layer.k), _scale(layer.v)
    sink_logits = query if sinks is None else sinks
    operands = (out, partial, lse, query, k, k_scale, v, v_scale, meta.block_tables, meta.seq_lens, sink_logits)
    strides = (*query.stride()[:2], *(x.stride(0) for x in (k, k_scale, v, v_scale, meta.block_tables)))
    numbers = (*base2_scale(scale, softcap), window or 0, num_seqs, kv_heads)
    shape: dict[str, Any] = {
        "GROUP": group,
        "K_DIM": layer.k.head_dim,
        "V_DIM": layer.v.head_dim,
        "BLOCK_SIZE": layer.block_size,
        "TILE": config.tile,
        "LEAST": config.least,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "SINKS": 0 if sinks is None else sinks.dim(),
    }
    if config.in_registers:
        int4 = isinstance(layer.k, GroupPages) or isinstance(layer.v, GroupPages)
        decode_registers_kernel[(config.programs,)](
            *operands,
            *strides,
            *numbers,
            **shape,
            N=padded_heads(group) if int4 else 8 if group <= 8 else 16,
            INT4=int4,
            OVERLAP=config.overlap,
            num_warps=1,
            maxnreg=config.max_registers,
        )
    else:
        _decode[(num_seqs * kv_heads if config.whole else config.programs,)](
            *operands,
            *strides,
            *numbers,
            config.programs,
            **shape,
            ROWS=max(16, triton.next_power_of_2(group)),
            K_BLOCK=channel_block(layer.k.head_dim),
            V_BLOCK=channel_block(layer.v.head_dim),
            K_SCALED=not isinstance(layer.k, PlainPages),
            V_SCALED=not isinstance(layer.v, PlainPages),
            K_INT4=isinstance(layer.k, GroupPages),
            V_INT4=isinstance(layer.v, GroupPages),
            K_DOT=dot_dtype(query, layer.k),
            V_DOT=dot_dtype(query, layer.v),
            BYTE_PERMUTE=config.byte_permute and query.is_cuda,
            STAGES=config.num_stages,
            WHOLE=config.whole,
            num_warps=config.num_warps,
        )
    _join(out, partial, lse, meta.seq_lens, sinks, num_seqs, kv_heads, window, config)


def _join(
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    num_seqs: int,
    kv_heads: int,
    window: int | None,
    config: DecodeConfig,
) -> None:
    """Partial results into `out`: one program for the heads of a KV head, and more for a long sequence's many parts."""
    group, v_dim = partial.shape[2:]
    heads, h_block, columns = group, triton.next_power_of_2(group), triton.next_power_of_2(v_dim)
    many = config.programs >= 16 * num_seqs * kv_heads
    if many or h_block * columns > 1024:  # what a warp holds four parts of
        heads = h_block = 1
    columns = min(columns, 32) if many else columns
    join_kernel[kv_heads * group // heads, num_seqs, triton.cdiv(v_dim, columns)](
        out,
        partial,
        lse,
        seq_lens,
        lse if sinks is None else sinks,
        num_seqs,
        window or 0,
        config.programs,
        GROUP=group,
        HEADS=heads,
        H_BLOCK=h_block,
        V_DIM=v_dim,
        COLUMNS=columns,
        TILE=config.tile,
        LEAST=config.least,
        STEP=256 if many else max(min(4096 // (h_block * columns), 8), 1),
        WINDOW=window is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        OVERLAP=config.overlap,
        WHOLE=config.whole,
        num_warps=4 if many else 1,
        **({"launch_pdl": True} if config.overlap else {}),
    )


def channel_block(head_dim: int) -> int:
    """Channels of a tile that tl.dot takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def base2_scale(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factor of q . k and cap of the base-2 scores, as the kernels take them."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale * LOG2_E * 2 / softcap, softcap * LOG2_E)


def dot_dtype(query: Tensor, pages: Pages) -> tl.dtype:
    """fp32 wherever the query or the pages are fp32; fp16 for 8-bit codes, exact there; else the pages' own dtype."""
    if query.dtype == torch.float32 or pages.tensor.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if pages.tensor.dtype == torch.bfloat16 else tl.float16


def _scale(pages: Pages) -> Tensor:
    return pages.data if isinstance(pages, PlainPages) else pages.scale
