"""Gluon decode attention over 8-bit and 16-bit pages: from memory to matrix-unit operands inside registers.

The portable kernel (`decode_attention.py`) sends tiles through shared memory and picks codes out byte by byte, 5.5
instructions per code, which bounds it at two thirds of an H200's bandwidth. Here a program is one warp, a tile never
leaves its registers (`register_tiles.py`), and the heads of one KV head pad to 8, not 16. The next tile's keys are on
their way while this one's values are weighted, and the other way round: 4 KB in flight per warp at all times.

Serves head_dim 64, 128, 256 in 16-byte aligned pages, 16-bit queries, up to 16 heads per KV head; `fits` says when.
Any GPU with `mma.m16n8k16` (compute capability 8.0), for e4m3 8.9. Not in the interpreter: GPU tests cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.decode_int4 import attend_int4
from hf_paged.kernels.layout import GroupPages, LayerKV
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.kernels.register_shares import share, visible_tiles
from hf_paged.kernels.register_tiles import (
    INT8_BIAS,
    dot_type,
    k_codes,
    k_layout,
    k_operand,
    k_pairs,
    parts,
    q_layout,
    q_operands,
    q_pairs,
    tile_words,
    v_codes,
    v_layout,
    v_operand,
    v_pairs,
)


@gluon.jit(do_not_specialize=["num_seqs", "kv_heads", "window", "tables_stride"])
def decode_registers_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [programs, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [programs, 2, GROUP] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM] int8, e4m3 or 16-bit
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, for codes
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM] int8, e4m3 or 16-bit
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, for codes
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
    GROUP: gl.constexpr,
    N: gl.constexpr,  # heads of a KV head, padded
    K_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    LEAST: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    OVERLAP: gl.constexpr,
    INT4: gl.constexpr,
):
    if OVERLAP:  # the joining kernel may start now; it waits for all results
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    begin, end, seq, before = share(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW, TILE, LEAST)
    while begin < end:
        seq_len = gl.load(seq_lens_ptr + seq)
        first_token, first_tile, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        offset = begin - before * kv_heads
        if offset >= tiles * kv_heads:
            before += tiles
            seq += 1
        else:
            kv_head = offset // tiles
            first = offset % tiles
            count = gl.minimum(tiles - first, end - begin)
            tile = first_tile + first
            if INT4:
                attend_int4(
                    seq, seq_len, first_token, tile, tile + count, first == 0, count == tiles,
                    out_ptr, partial_ptr, lse_ptr, q_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, tables_ptr, sinks_ptr,
                    q_stride_t, q_stride_h, k_stride, k_scale_stride, v_stride, v_scale_stride, tables_stride,
                    scale, softcap, kv_head, kv_heads,
                    GROUP, N, K_DIM, V_DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, SINKS,
                )  # fmt: skip
            else:
                _attend(
                    seq, seq_len, first_token, tile, tile + count, first == 0, count == tiles,
                    out_ptr, partial_ptr, lse_ptr, q_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, tables_ptr, sinks_ptr,
                    q_stride_t, q_stride_h, k_stride, k_scale_stride, v_stride, v_scale_stride, tables_stride,
                    scale, softcap, kv_head, kv_heads,
                    GROUP, N, K_DIM, V_DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, SINKS,
                )  # fmt: skip
            begin += count


@gluon.jit
def _attend(
    seq, seq_len, first_token, begin, end, at_start, whole,
    out_ptr, partial_ptr, lse_ptr, q_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, tables_ptr, sinks_ptr,
    q_stride_t, q_stride_h, k_stride, k_scale_stride, v_stride, v_scale_stride, tables_stride,
    scale, softcap, kv_head, kv_heads,
    GROUP: gl.constexpr, N: gl.constexpr, K_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Tiles `[begin, end)` of one sequence and KV head, into `out` if these are all (`whole`), else into a partial."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    HEADS: gl.constexpr = gl.SliceLayout(0, MMA)
    K_TYPE: gl.constexpr = k_ptr.dtype.element_ty
    V_TYPE: gl.constexpr = v_ptr.dtype.element_ty
    K_PARTS: gl.constexpr = parts(K_TYPE)
    V_PARTS: gl.constexpr = parts(V_TYPE)
    V_DOT: gl.constexpr = dot_type(V_TYPE)
    K_WORDS: gl.constexpr = K_DIM // K_PARTS
    V_WORDS: gl.constexpr = V_DIM // V_PARTS
    RUN: gl.constexpr = 4 if V_WORDS >= 32 else V_WORDS // 8
    KL: gl.constexpr = k_layout(TILE, K_WORDS)
    VL: gl.constexpr = v_layout(TILE, V_WORDS, RUN, False)
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, MMA))
    vn = gl.arange(0, TILE, layout=gl.SliceLayout(1, VL))

    table_ptr = tables_ptr + seq.to(gl.int64) * tables_stride
    block = gl.load(table_ptr + begin * TILE // BLOCK_SIZE).to(gl.int64)
    next_block = gl.load(table_ptr + gl.minimum(begin + 1, end - 1) * TILE // BLOCK_SIZE)
    row = kv_head * BLOCK_SIZE + begin * TILE % BLOCK_SIZE
    k = gl.load(tile_words(k_ptr, k_stride, block, row, K_WORDS, TILE, KL), eviction_policy="evict_first")
    v = gl.load(tile_words(v_ptr, v_stride, block, row, V_WORDS, TILE, VL), eviction_policy="evict_first")
    k_scale = gl.full([TILE], 1.0, gl.float16, layout=gl.SliceLayout(1, MMA))
    v_scale = k_scale
    if K_PARTS == 4:
        k_scale = gl.load(k_scale_ptr + (block * k_scale_stride + row) + n)
    if V_PARTS == 4:
        v_scale = gl.load(v_scale_ptr + (block * v_scale_stride + row) + n)

    q_row = q_ptr + seq.to(gl.int64) * q_stride_t + kv_head * GROUP * q_stride_h
    q0, q1, q2, q3, q_unit, q_bias = _queries(q_row, q_stride_h, scale, GROUP, N, K_DIM, K_TYPE, MMA)
    a0 = gl.zeros([V_WORDS, N], gl.float32, layout=MMA)
    a1 = a0
    a2 = a0
    a3 = a0
    total = gl.zeros([TILE, N], gl.float32, layout=MMA)
    top = gl.full([N], float("-inf"), gl.float32, layout=HEADS)
    v_unit = 1e-30
    if V_PARTS == 2:
        v_unit = 1.0
    for tile in range(begin, end):
        more = tile + 1 < end
        scores = _products(k, q0, q1, q2, q3, -q_bias, TILE, N, K_WORDS, K_TYPE, MMA)
        if K_PARTS == 4:
            scores = scores * k_scale.to(gl.float32)[:, None]
        block = next_block.to(gl.int64)
        after = gl.minimum(tile + 2, end - 1) * TILE  # its block is asked for now: no two latencies in a row
        next_block = gl.load(table_ptr + after // BLOCK_SIZE)
        row = kv_head * BLOCK_SIZE + (tile + 1) * TILE % BLOCK_SIZE
        k = gl.load(
            tile_words(k_ptr, k_stride, block, row, K_WORDS, TILE, KL), mask=more, eviction_policy="evict_first"
        )
        if K_PARTS == 4:
            k_scale = gl.load(k_scale_ptr + (block * k_scale_stride + row) + n, mask=more)
        scores = scores * q_unit[None, :]
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (gl.exp2(scores) + 1.0))
        edge = tile * TILE + TILE > seq_len
        if WINDOW:
            edge = edge | (tile * TILE < first_token)
        if edge:  # what lies in dead slots may be NaN
            keep = (tile * TILE + n >= first_token) & (tile * TILE + n < seq_len)
            scores = gl.where(keep[:, None], scores, float("-inf"))
            if V_PARTS == 4:
                v_scale = gl.where(keep, v_scale, 0.0)
            if gl.int8 != V_TYPE:
                v = gl.where((tile * TILE + vn < seq_len)[:, None], v, 0)

        new_top = gl.maximum(top, gl.max(scores, 0))
        probs = gl.exp2(scores - new_top[None, :])
        decay = gl.exp2(top - new_top)
        total = total * decay[None, :] + probs
        top = new_top
        if V_PARTS == 4:
            weight = v_scale.to(gl.float32)
            new_unit = gl.maximum(v_unit, gl.max(weight, 0))
            decay *= v_unit / new_unit
            v_unit = new_unit
            probs = probs * (weight * (1.0 / new_unit))[:, None]
        weights = gl.convert_layout(probs.to(V_DOT), gl.DotOperandLayout(1, MMA, 2))
        a0, a1, a2, a3 = _add_values(v, weights, decay, a0, a1, a2, a3, TILE, V_WORDS, RUN, V_TYPE, MMA)
        v = gl.load(
            tile_words(v_ptr, v_stride, block, row, V_WORDS, TILE, VL), mask=more, eviction_policy="evict_first"
        )
        if V_PARTS == 4:
            v_scale = gl.load(v_scale_ptr + (block * v_scale_stride + row) + n, mask=more)

    group_head = gl.arange(0, N, layout=HEADS)
    denominator = gl.sum(total, 0)
    factor = v_unit / denominator
    if whole:
        if SINKS:
            sinks_ptr += (seq * kv_heads * (SINKS - 1) + kv_head) * GROUP
            sink = gl.load(sinks_ptr + group_head, mask=group_head < GROUP, other=0.0)
            sink = sink.to(gl.float32) * 1.4426950408889634
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            factor = v_unit * decay / (denominator * decay + gl.exp2(sink - new_top))
        _store(
            out_ptr + seq.to(gl.int64) * (kv_heads * GROUP * V_DIM), kv_head * GROUP, a0, a1, a2, a3, factor,
            V_PARTS, V_WORDS, RUN, N, GROUP,
        )  # fmt: skip
    else:
        slot = (gl.program_id(0) * 2 + at_start.to(gl.int32)) * GROUP
        gl.store(lse_ptr + slot + group_head, top + gl.log2(denominator), mask=group_head < GROUP)
        _store(partial_ptr, slot, a0, a1, a2, a3, factor, V_PARTS, V_WORDS, RUN, N, GROUP)


@gluon.jit
def _queries(
    q_row, q_stride_h, scale,
    GROUP: gl.constexpr, N: gl.constexpr, K_DIM: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The heads' queries as right operands, their scores' unit, and what INT8_BIAS adds to these.

    The operands are divided by a power of two, so that fp16 holds them. For 16-bit pages the last two repeat the first.
    """
    PARTS: gl.constexpr = parts(TYPE)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L: gl.constexpr = q_layout(N, K_DIM, PARTS)
    head = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    channel = gl.arange(0, K_DIM, layout=gl.SliceLayout(0, L))
    q = gl.load(q_row + head[:, None] * q_stride_h + channel[None, :], mask=(head < GROUP)[:, None], other=0.0)
    q = q.to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    q = (q * (1.0 / unit)[:, None]).to(dot_type(TYPE))
    bias = gl.zeros([N], gl.float32, layout=gl.SliceLayout(0, MMA))
    if gl.int8 == TYPE:
        bias = gl.convert_layout(gl.sum(q.to(gl.float32), 1), gl.SliceLayout(0, MMA)) * INT8_BIAS
    if PARTS == 4:
        q0, q1, q2, q3 = q_operands(q, TYPE, K_DIM // PARTS, N, B)
    else:
        q0, q1 = q_pairs(q, K_DIM // PARTS, N, B)
        q2 = q0
        q3 = q1
    return q0, q1, q2, q3, gl.convert_layout(unit, gl.SliceLayout(0, MMA)) * scale, bias


@gluon.jit
def _products(
    k, q0, q1, q2, q3, start,
    TILE: gl.constexpr, N: gl.constexpr, WORDS: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """`start` + K q^T, `[TILE, N]`."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    products = gl.zeros([TILE, N], gl.float32, layout=MMA) + start[None, :]
    if parts(TYPE) == 4:
        k0, k1, k2, k3 = k_codes(k, TYPE)
        products = mma_v2(k_operand(k0, TILE, WORDS, A), q0, products)
        products = mma_v2(k_operand(k1, TILE, WORDS, A), q1, products)
        products = mma_v2(k_operand(k2, TILE, WORDS, A), q2, products)
        products = mma_v2(k_operand(k3, TILE, WORDS, A), q3, products)
    else:
        k0, k1 = k_pairs(k, TYPE)
        products = mma_v2(k_operand(k0, TILE, WORDS, A), q0, products)
        products = mma_v2(k_operand(k1, TILE, WORDS, A), q1, products)
    return products


@gluon.jit
def _add_values(
    v, weights, decay, a0, a1, a2, a3,
    TILE: gl.constexpr, WORDS: gl.constexpr, RUN: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Weighted values, `[WORDS, N]` of values i of each word: what there was, times `decay`, + V^T weights."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    v = gl.convert_layout(v, v_layout(TILE, WORDS, RUN, True), assert_trivial=True)
    a0 = a0 * decay[None, :]
    a1 = a1 * decay[None, :]
    if parts(TYPE) == 4:
        v0, v1, v2, v3 = v_codes(v, TYPE)
        a0 = mma_v2(v_operand(v0, TILE, WORDS, RUN, A), weights, a0)
        a1 = mma_v2(v_operand(v1, TILE, WORDS, RUN, A), weights, a1)
        a2 = mma_v2(v_operand(v2, TILE, WORDS, RUN, A), weights, a2 * decay[None, :])
        a3 = mma_v2(v_operand(v3, TILE, WORDS, RUN, A), weights, a3 * decay[None, :])
    else:
        v0, v1 = v_pairs(v, TYPE)
        a0 = mma_v2(v_operand(v0, TILE, WORDS, RUN, A), weights, a0)
        a1 = mma_v2(v_operand(v1, TILE, WORDS, RUN, A), weights, a1)
    return a0, a1, a2, a3


@gluon.jit
def _store(
    ptr, first_row, a0, a1, a2, a3, factor,
    PARTS: gl.constexpr, WORDS: gl.constexpr, RUN: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Rows `first_row + head` of `ptr` `[rows, V_DIM]`: 16 bytes per lane and store, in the order of channels."""
    a0 = a0 * factor[None, :]
    a1 = a1 * factor[None, :]
    if PARTS == 4:
        x = gl.join(gl.join(a0, a2 * factor[None, :]), gl.join(a1, a3 * factor[None, :]))  # value 2 i + j at [i, j]
    else:
        x = gl.join(a0, a1)
    x = x.to(ptr.dtype.element_ty)
    # row 8 (RUN y + x) + r is word RUN (8 y + r) + x, see `v_operand`
    x = x.reshape([WORDS // (8 * RUN), RUN, 8, N, PARTS]).permute([3, 0, 2, 1, 4]).reshape([N, WORDS * PARTS])
    head = gl.arange(0, N, layout=gl.SliceLayout(1, x.type.layout))
    channel = gl.arange(0, WORDS * PARTS, layout=gl.SliceLayout(0, x.type.layout))
    at = (first_row + head)[:, None] * (WORDS * PARTS) + channel[None, :]
    gl.store(ptr + at, x, mask=(head < GROUP)[:, None])


def launch(layer: LayerKV) -> tuple[int, int, int]:
    """Tokens per tile, registers per lane and programs per multiprocessor.

    4 KB of keys in a tile, less where accumulators need the room. At head_dim 128 a scheduler's 512 registers per lane
    hold 3 programs; of 16-bit pages, 9 on a multiprocessor read as fast as 12 and leave fewer partial results.
    """
    k, v = layer.k.tensor, layer.v.tensor
    wide = max(x.shape[3] * x.element_size() for x in (k, v))
    head_dim = max(k.shape[3], v.shape[3])
    tile = min(layer.block_size, 32 if wide <= 128 else 16)
    if head_dim <= 64:
        return tile, 128, 16
    if head_dim <= 128:
        return tile, 168, 9 if min(k.element_size(), v.element_size()) == 2 else 12
    return tile, 255, 8


def fits(query: Tensor, layer: LayerKV) -> bool:
    """Whether this kernel serves the call; the portable one serves every other."""
    k, v = layer.k.tensor, layer.v.tensor
    group = query.shape[1] // k.shape[1]
    capability = (8, 9) if torch.float8_e4m3fn in (k.dtype, v.dtype) else (8, 0)
    return (
        query.is_cuda
        and cuda_capability(query.device) >= capability
        and not any(isinstance(pages, GroupPages) for pages in (layer.k, layer.v))
        and query.dtype != torch.float32
        and all(x.dtype != torch.float32 and x.shape[3] in (64, 128, 256) for x in (k, v))
        and group <= 16
        and max(group, 8) * v.shape[3] <= 2048  # accumulators: at most 64 registers of a lane
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in (k, v))
    )
