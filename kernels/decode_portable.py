"""Triton decode attention over pages of any format and shape: one query per sequence, memory-bound by design.

One program reads an equal share of all (sequence, KV head) pairs' tiles (`decode_shares.py`). A tile lies inside one
page, so it needs one scalar block-table load and one 64-bit base; every other offset is static. All query heads of the
KV head share the tile (they fill rows that the matrix unit would pad). Only a sequence's last tile, and the first of a
window, are masked. `decode_registers.py` is the faster kernel of the common shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.decode_shares import SCAN, next_piece, result_pointers, share, value_offset
from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.tiles import add_sinks, normalise_rows, softmax_step


@triton.jit(do_not_specialize=["num_seqs", "kv_heads", "window", "tables_stride"])  # they vary: no kernel per value
def decode_portable_kernel(
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
    sinks_ptr,  # [heads]; [num_seqs, heads] where SINKS is 2; 3: base-2 log-sum-exps of whole heads go there
    offset_ptr,  # [kv_heads, V_DIM] fp32, added to whole heads
    q_stride_t, q_stride_h, k_stride, k_scale_stride, v_stride, v_scale_stride, tables_stride,
    scale,  # softmax scale; times log2 e without SOFTCAP, times 2 log2 e / softcap with it
    softcap,  # softcap * log2 e
    window, num_seqs, kv_heads,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr, V_INT4: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, SCAN)
    program, begin, end, seq, before = share(n, seq_lens_ptr, num_seqs, kv_heads, window, WINDOW, TILE, LEAST)
    while begin < end:
        seq, before, kv_head, first, whole, keys = next_piece(
            begin, end, seq, before, seq_lens_ptr, kv_heads, window, WINDOW, TILE
        )
        row = tl.arange(0, ROWS)
        dk = tl.arange(0, K_BLOCK)
        q_offset = seq.to(tl.int64) * q_stride_t + (kv_head * GROUP + row) * q_stride_h
        q_mask = (row < GROUP)[:, None] & (dk < K_DIM)[None, :]
        q = tl.load(q_ptr + q_offset[:, None] + dk[None, :], mask=q_mask, other=0.0)
        acc, total, top = _attend(
            q, keys, tables_ptr + seq.to(tl.int64) * tables_stride, kv_head * BLOCK_SIZE,
            (k_ptr, k_scale_ptr, k_stride, k_scale_stride), (v_ptr, v_scale_ptr, v_stride, v_scale_stride),
            scale, softcap, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, TILE, WINDOW, SOFTCAP,
            K_SCALED, V_SCALED, K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE, STAGES,
        )  # fmt: skip
        results = result_pointers(
            out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr, program, seq, kv_head, kv_heads, first, whole,
            GROUP, V_DIM, SINKS,
        )  # fmt: skip
        _store(acc, total, top, results, GROUP, V_DIM, SINKS, OFFSET)
        begin += keys[1] - keys[0]


@triton.jit
def _attend(
    q,  # [ROWS, K_BLOCK]
    keys,  # as `next_piece` gives them
    table_ptr, head_row,
    k_pages,  # pages, scales, and their strides; as v_pages
    v_pages, scale, softcap,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, K_INT4: tl.constexpr, V_INT4: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, BYTE_PERMUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of one sequence and KV head: weighted values, denominator and maximum of the softmax."""
    begin, end, first_token, seq_len = keys
    q, q_unit = normalise_rows(q, K_DOT, K_SCALED)
    q_unit *= scale
    acc = tl.zeros([q.shape[0], V_BLOCK], tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    v_unit = 1e-30

    # Masked tiles first, whatever their place: the order of keys does not matter to a softmax.
    last_partial = (end * TILE > seq_len).to(tl.int32)
    first_partial = 0
    if WINDOW:
        first_partial = ((begin * TILE < first_token) & (end - begin > last_partial)).to(tl.int32)
    for i in range(last_partial + first_partial):
        tile = tl.where(i < last_partial, end - 1, begin)
        acc, total, top, v_unit = _add_tile(
            acc, total, top, v_unit, q, q_unit, tile, first_token, seq_len, table_ptr, head_row, k_pages, v_pages,
            softcap, True, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, TILE, SOFTCAP, K_SCALED, V_SCALED,
            K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip
    for tile in tl.range(begin + first_partial, end - last_partial, num_stages=STAGES):
        acc, total, top, v_unit = _add_tile(
            acc, total, top, v_unit, q, q_unit, tile, first_token, seq_len, table_ptr, head_row, k_pages, v_pages,
            softcap, False, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, TILE, SOFTCAP, K_SCALED, V_SCALED,
            K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip
    if V_SCALED:
        acc *= v_unit
    return acc, total, top


@triton.jit
def _add_tile(
    acc, total, top, v_unit, q, q_unit, tile, first_token, seq_len, table_ptr, head_row, k_pages, v_pages, softcap,
    MASKED: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, K_INT4: tl.constexpr, V_INT4: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
):  # fmt: skip
    """Take the tile's keys and values into the running attention; where MASKED, those that the query sees."""
    n = tl.arange(0, TILE)
    keep = n >= 0
    if MASKED:
        keep = (tile * TILE + n < seq_len) & (tile * TILE + n >= first_token)
    block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
    row = head_row + tile * TILE % BLOCK_SIZE
    k, k_scale = _load(k_pages, block, row, keep, MASKED, K_DIM, K_BLOCK, TILE, K_SCALED, K_INT4, K_DOT)
    v, v_scale = _load(v_pages, block, row, keep, MASKED, V_DIM, V_BLOCK, TILE, V_SCALED, V_INT4, V_DOT)
    return softmax_step(
        acc, total, top, v_unit, q, q_unit, k, k_scale, v, v_scale, keep[None, :], softcap,
        MASKED, SOFTCAP, K_SCALED, V_SCALED, K_DOT, V_DOT, BYTE_PERMUTE,
    )  # fmt: skip


@triton.jit
def _load(
    pages, block, row, keep, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, INT4: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile `[TILE, BLOCK]` from row `row` of a block on, and its scales; where MASKED, zeros for rows not to keep."""
    ptr, scale_ptr, stride, scale_stride = pages
    n = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    scale = tl.zeros([TILE], tl.float32)
    if INT4:
        values, scale = group_tile(ptr, scale_ptr, block, row + n, stride, scale_stride, d, keep, DIM, DOT)
    else:
        pointers = ptr + (block * stride + row * DIM) + (n[:, None] * DIM + d[None, :])
        if MASKED or BLOCK != DIM:
            mask = keep[:, None] & (d < DIM)[None, :]
            values = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            values = tl.load(pointers, eviction_policy="evict_first")
        if SCALED and MASKED:
            scale = tl.load(scale_ptr + (block * scale_stride + row) + n, mask=keep, other=0.0).to(tl.float32)
        elif SCALED:
            scale = tl.load(scale_ptr + (block * scale_stride + row) + n).to(tl.float32)
    return values, scale


@triton.jit
def _store(
    acc, total, top,
    results,  # `result_pointers`
    GROUP: tl.constexpr, V_DIM: tl.constexpr, SINKS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The heads' result into `out`, their sinks included, if it is of all tiles (`whole`); else a partial one."""
    whole, out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr = results
    row = tl.arange(0, acc.shape[0])
    dv = tl.arange(0, acc.shape[1])
    at = row[:, None] * V_DIM + dv[None, :]
    mask = (row < GROUP)[:, None] & (dv < V_DIM)[None, :]
    if whole:
        if SINKS == 3:
            tl.store(sinks_ptr + row, top + tl.log2(total), mask=row < GROUP)
        elif SINKS:
            total, decay = add_sinks(total, top, sinks_ptr + row, row < GROUP)
            acc *= decay[:, None]
        offset = value_offset(offset_ptr, 0, dv, V_DIM, OFFSET)
        tl.store(out_ptr + at, (acc / total[:, None] + offset[None, :]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + at, acc / total[:, None], mask=mask)
        tl.store(lse_ptr + row, top + tl.log2(total), mask=row < GROUP)
