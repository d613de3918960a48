"""Triton split-KV decode attention over pages: one query per sequence, memory-bound by design.

One program reads a contiguous run of tiles of one (sequence, KV head). A tile lies inside one page, so it needs one
scalar block-table load and one 64-bit base; every other offset is static. All query heads of the KV head share the tile
(they fill rows that the matrix unit would pad). Only the last tile, and the first of a window, are masked. The number
of splits comes from Python bounds (batch, KV heads, longest sequence, multiprocessors), so a captured graph serves any
length up to its capacity; programs without work leave at once. With one split the kernel writes the result itself,
otherwise one reduction joins the partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels import decode_codes
from hf_paged.kernels.decode_codes import decode_codes_kernel
from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.layout import AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages
from hf_paged.kernels.tiles import LOG2_E, normalise_rows, softmax_step

REDUCE_STEP = 16  # splits joined per step of the reduction


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Launch choices of the decode kernel; `eval/kernels_bench.py` sweeps them."""

    tile: int  # tokens per tile, at most block_size
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3
    byte_permute: bool = True  # int8 -> fp16 by inline assembly (CUDA only)
    in_registers: bool = False  # the 8-bit kernel of `decode_codes.py`, one warp per program
    max_registers: int | None = None  # per thread, for the 8-bit kernel


@triton.jit
def _split_range(
    seq_len,
    split,
    num_splits,
    window,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Tiles `[begin, end)` of a split, the sequence's first visible token, and the number of splits with work."""
    first_token = tl.maximum(seq_len - window, 0) if WINDOW else 0
    first_tile = first_token // TILE
    tiles = tl.cdiv(seq_len, TILE) - first_tile
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), 1)
    begin = first_tile + split * per_split
    end = tl.minimum(begin + per_split, first_tile + tiles)
    return begin, end, first_token, tl.cdiv(tiles, per_split)


@triton.jit(do_not_specialize=["num_splits", "window", "tables_stride"])  # they vary: no kernel per value
def _decode(
    out_ptr,  # [num_seqs, heads, V_DIM], with SPLIT [num_seqs, heads, num_splits, V_DIM] fp32
    lse_ptr,  # [num_seqs, heads, num_splits] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM]
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM]
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads]
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
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr,
    V_INT4: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    seq_len = tl.load(seq_lens_ptr + seq)
    begin, end, first_token, _ = _split_range(seq_len, split, num_splits, window, WINDOW, TILE)

    row = tl.arange(0, ROWS)
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    n = tl.arange(0, TILE)
    head = kv_head * GROUP + row
    out_row = ((seq.to(tl.int64) * heads + head) * num_splits + split) * V_DIM
    out_mask = (row < GROUP)[:, None] & (dv < V_DIM)[None, :]
    if begin >= end:
        if not SPLIT:  # a padded row of a captured graph
            zeros = tl.zeros([ROWS, V_BLOCK], out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] + dv[None, :], zeros, mask=out_mask)
        return

    q_offset = seq.to(tl.int64) * q_stride_t + head * q_stride_h
    q_mask = (row < GROUP)[:, None] & (dk < K_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dk[None, :], mask=q_mask, other=0.0)
    q, q_unit = normalise_rows(q, K_DOT, K_SCALED)
    q_unit *= scale

    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    v_unit = 1e-30
    table_ptr = tables_ptr + seq.to(tl.int64) * tables_stride
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
            k = tl.load(k_tile + k_offset)
        else:
            k = tl.load(k_tile + k_offset, mask=k_mask, other=0.0)
        if V_INT4:
            rows = row_in_block + n
            v, v_scale = group_tile(v_ptr, v_scale_ptr, block, rows, v_stride, v_scale_stride, dv, n >= 0, V_DIM, V_DOT)
        elif V_BLOCK == V_DIM:
            v = tl.load(v_tile + v_offset)
        else:
            v = tl.load(v_tile + v_offset, mask=v_mask, other=0.0)
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
    if not SPLIT:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=row < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            acc *= tl.exp2(top - new_top)[:, None]
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        acc /= total[:, None]
        tl.store(out_ptr + out_row[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        acc /= total[:, None]
        tl.store(out_ptr + out_row[:, None] + dv[None, :], acc, mask=out_mask)
        lse_row = (seq.to(tl.int64) * heads + head) * num_splits + split
        tl.store(lse_ptr + lse_row, top + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _reduce(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [num_seqs, heads, num_splits, V_DIM] fp32
    lse_ptr,  # [num_seqs, heads, num_splits] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads]
    window,
    num_splits,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1)
    row = seq.to(tl.int64) * tl.num_programs(0) + head
    seq_len = tl.load(seq_lens_ptr + seq)
    _, _, _, splits = _split_range(seq_len, 0, num_splits, window, WINDOW, TILE)
    d = tl.arange(0, V_BLOCK)
    s = tl.arange(0, STEP)
    acc = tl.zeros([V_BLOCK], tl.float32)
    top = float("-inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    for i in range(0, splits, STEP):
        live = i + s < splits
        lse = tl.load(lse_ptr + row * num_splits + i + s, mask=live, other=float("-inf"))
        offset = (row * num_splits + i + s)[:, None] * V_DIM + d[None, :]
        part = tl.load(partial_ptr + offset, mask=live[:, None] & (d < V_DIM)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    out = acc / tl.where(seq_len > 0, total, 1.0)
    tl.store(out_ptr + row * V_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < V_DIM)


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
    splits = config.num_splits
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((num_seqs, heads, splits, layer.v.head_dim), dtype=torch.float32, device=out.device)
        lse = torch.empty((num_seqs, heads, splits), dtype=torch.float32, device=out.device)
    k_scale, v_scale = _scale(layer.k), _scale(layer.v)
    sink_logits = query if sinks is None else sinks
    operands = (partial, lse, query, k, k_scale, v, v_scale, meta.block_tables, meta.seq_lens, sink_logits)
    strides = (*query.stride()[:2], *(x.stride(0) for x in (k, k_scale, v, v_scale, meta.block_tables)))
    numbers = (*base2_scale(scale, softcap), window or 0, splits)
    shape = {
        "GROUP": group,
        "K_DIM": layer.k.head_dim,
        "V_DIM": layer.v.head_dim,
        "BLOCK_SIZE": layer.block_size,
        "TILE": config.tile,
        "SPLIT": splits > 1,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
    }
    grid = (splits, kv_heads, num_seqs)
    if config.in_registers:
        decode_codes_kernel[grid](
            *operands,
            *strides,
            *numbers,
            **shape,
            N=8 if group <= 8 else 16,
            K_FP8=k.dtype == torch.float8_e4m3fn,
            V_FP8=v.dtype == torch.float8_e4m3fn,
            num_warps=1,
            maxnreg=config.max_registers,
        )
    else:
        _decode[grid](
            *operands,
            *strides,
            *numbers,
            **shape,
            ROWS=max(16, triton.next_power_of_2(group)),
            K_BLOCK=triton.next_power_of_2(layer.k.head_dim),
            V_BLOCK=triton.next_power_of_2(layer.v.head_dim),
            K_SCALED=not isinstance(layer.k, PlainPages),
            V_SCALED=not isinstance(layer.v, PlainPages),
            K_INT4=isinstance(layer.k, GroupPages),
            V_INT4=isinstance(layer.v, GroupPages),
            K_DOT=dot_dtype(query, layer.k),
            V_DOT=dot_dtype(query, layer.v),
            BYTE_PERMUTE=config.byte_permute and query.is_cuda,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
    if splits > 1:
        _reduce[heads, num_seqs](
            out,
            partial,
            lse,
            meta.seq_lens,
            sink_logits,
            window or 0,
            splits,
            V_DIM=layer.v.head_dim,
            V_BLOCK=triton.next_power_of_2(layer.v.head_dim),
            TILE=config.tile,
            STEP=REDUCE_STEP,
            WINDOW=window is not None,
            SINKS=sinks is not None,
            num_warps=4,
        )


def choose_config(query: Tensor, layer: LayerKV, num_seqs: int, max_seq_len: int) -> DecodeConfig:
    """Tile and splits from what a captured graph fixes: enough programs to fill the GPU, at least 4 tiles each."""
    k = layer.k.tensor
    in_registers = decode_codes.fits(query, layer)
    if in_registers:
        tile, num_warps, programs_per_sm = min(layer.block_size, 32), 1, 12
    else:
        tile = min(layer.block_size, 64 if k.shape[3] * k.element_size() <= 256 else 32)
        num_warps = 2 if tile <= 32 else 4
        programs_per_sm = 16 // num_warps
    splits = -(-programs_per_sm * _num_sms(query.device) // (num_seqs * k.shape[1]))
    splits = max(1, min(splits, max_seq_len // (4 * tile)))
    return DecodeConfig(tile=tile, num_warps=num_warps, num_splits=splits, in_registers=in_registers)


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


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
