"""Gluon split-KV decode attention over 8-bit pages: codes go from memory to matrix-unit operands inside registers.

The portable kernel (`decode_attention.py`) sends codes through shared memory and picks them out byte by byte, 5.5
instructions per code, which bounds it at two thirds of an H200's bandwidth. Here a program is one warp and a tile of
codes never leaves its registers: every lane loads 16 contiguous bytes, and the order of channels (which a dot product
does not care about) and of tokens is chosen such that what a lane has loaded is what `mma.m16n8k16` wants from that
lane. S^T = K q^T and O^T = V^T P^T: pages are the left operand, so the heads of one KV head pad to 8, not 16, and the
values need no transposition. 2.3 (int8) and 1.8 (e4m3) instructions per code at head_dim 128.

A tile of K is `[TILE, WORDS]` 32-bit words of four codes. `_k_codes` and `_v_codes` make four fp16 tensors of it, one
per matrix product; in K a register pairs two codes of one word, in V the same byte of two neighbouring tokens.

Serves head_dim 64, 128, 256 in 16-byte aligned pages, 16-bit queries, up to 16 heads per KV head; `fits` says when.
Any GPU with `mma.m16n8k16` (compute capability 8.0), for e4m3 8.9. Not in the interpreter: GPU tests cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.layout import LayerKV, ScaledPages

INT8_BIAS = gl.constexpr(1152.0)  # an int8 code read as fp16 bits 0x6480 + code


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _k_layout(tile, words):
    """A lane holds 4 consecutive words of tokens lane // 4 + 8 i."""
    more = [[0, 1 << i] for i in range(4, _log2(words))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, [], [], [tile, words])


@gluon.constexpr_function
def _v_layout(tile, words, run, pairs_first):
    """A lane holds `run` successive words of tokens 2 (lane % 4) + {0, 1} + 8 i; `pairs_first` orders its registers."""
    consecutive = [[0, 1 << i] for i in range(_log2(run))]
    more = [[0, 1 << i] for i in range(_log2(run) + 3, _log2(words))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    registers = [[1, 0], *consecutive, *more] if pairs_first else [*consecutive, [1, 0], *more]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, words])


@gluon.jit
def _k_codes(words, FP8: gl.constexpr):
    """Words w0, w1 of a lane -> fp16 pairs of one word. int8: (b0, b2), (b1, b3) of w0, then of w1, plus INT8_BIAS (the
    caller subtracts its product with q); e4m3: (b0, b1), (b2, b3) of w0, then of w1."""
    if FP8:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b, c, d;
            mov.b32 {a, b}, $4;
            mov.b32 {c, d}, $5;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shr.u32 a, $4, 8;
        shr.u32 b, $5, 8;
        lop3.b32 $0, $4, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $1, a, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $2, $5, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $3, b, 0x00FF00FF, 0x64806480, 0x6A;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _v_codes(words, FP8: gl.constexpr):
    """The word of two neighbouring tokens -> four fp16 pairs: byte i of both, i = 0..3."""
    if FP8:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .b16 a, b, c, d;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            mov.b32 {a, b}, low;
            mov.b32 {c, d}, high;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, a, b, c, d, bias;
        mov.b32 bias, 0x64806480;
        prmt.b32 low, $4, $5, 0x5140;
        prmt.b32 high, $4, $5, 0x7362;
        xor.b32 low, low, 0x80808080;
        xor.b32 high, high, 0x80808080;
        prmt.b32 a, low, 0x64646464, 0x4140;
        prmt.b32 b, low, 0x64646464, 0x4342;
        prmt.b32 c, high, 0x64646464, 0x4140;
        prmt.b32 d, high, 0x64646464, 0x4342;
        sub.f16x2 $0, a, bias;
        sub.f16x2 $1, b, bias;
        sub.f16x2 $2, c, bias;
        sub.f16x2 $3, d, bias;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _k_operand(x, TILE: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """`[TILE, WORDS]` as left operand: word 16 b + 4 c + 2 h + e becomes column 16 b + 8 h + 2 c + e, in place."""
    x = x.reshape([TILE, WORDS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE, WORDS])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _v_operand(x, TILE: gl.constexpr, WORDS: gl.constexpr, RUN: gl.constexpr, A: gl.constexpr):
    """`[TILE, WORDS]` as transposed left operand: word RUN (8 y + r) + x becomes row 8 (RUN y + x) + r, in place."""
    x = x.reshape([TILE, WORDS // (8 * RUN), 8, RUN]).permute([1, 3, 2, 0]).reshape([WORDS, TILE])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _query(q_ptr, j: gl.constexpr, word, live, FP8: gl.constexpr):
    """The channels of `q` that meet the j-th tensor of `_k_codes`, `[WORDS, N]` in the order of `_k_operand`."""
    pair = word[:, None] % 2
    byte = 2 * (j % 2) + pair if FP8 else j % 2 + 2 * pair
    return gl.load(q_ptr + (word[:, None] - pair + j // 2) * 4 + byte, mask=live, other=0.0).to(gl.float32)


@gluon.jit
def _tile(
    block,
    row_in_block,
    position,  # [TILE] of its keys
    first_token,
    seq_len,
    a0,  # [V_WORDS, N] fp32, values of channels 4 w + i, as are a1, a2, a3
    a1,
    a2,
    a3,
    total,  # [TILE, N] fp32, partial sums of the softmax denominator
    top,  # [N] fp32, running maximum of base-2 scores
    v_unit,  # fp32, largest v_scale so far
    q0,  # [K_WORDS, N] fp16, as are q1, q2, q3
    q1,
    q2,
    q3,
    q_bias,  # [N] fp32, what INT8_BIAS adds to a score
    q_unit,  # [N] fp32
    softcap,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_stride,
    k_scale_stride,
    v_stride,
    v_scale_stride,
    TILE: gl.constexpr,
    N: gl.constexpr,
    K_WORDS: gl.constexpr,
    V_WORDS: gl.constexpr,
    RUN: gl.constexpr,
    K_FP8: gl.constexpr,
    V_FP8: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
    MMA: gl.constexpr,
):
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    KL: gl.constexpr = _k_layout(TILE, K_WORDS)
    VL: gl.constexpr = _v_layout(TILE, V_WORDS, RUN, False)
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, MMA))
    kn = gl.arange(0, TILE, layout=gl.SliceLayout(1, KL))
    vn = gl.arange(0, TILE, layout=gl.SliceLayout(1, VL))
    k_words = k_ptr.to(gl.pointer_type(gl.int32)) + (block * (k_stride // 4) + row_in_block * K_WORDS)
    v_words = v_ptr.to(gl.pointer_type(gl.int32)) + (block * (v_stride // 4) + row_in_block * V_WORDS)
    k_words += kn[:, None] * K_WORDS + gl.arange(0, K_WORDS, layout=gl.SliceLayout(0, KL))[None, :]
    v_words += vn[:, None] * V_WORDS + gl.arange(0, V_WORDS, layout=gl.SliceLayout(0, VL))[None, :]
    k_scales = k_scale_ptr + (block * k_scale_stride + row_in_block) + n
    v_scales = v_scale_ptr + (block * v_scale_stride + row_in_block) + n
    keep = (position + n >= first_token) & (position + n < seq_len)
    if MASKED:  # tokens before the window lie in a live block: their codes are finite and their weight is 0
        k = gl.load(k_words, mask=(position + kn < seq_len)[:, None], other=0)
        v = gl.load(v_words, mask=(position + vn < seq_len)[:, None], other=0)
        k_scale = gl.load(k_scales, mask=keep, other=0.0).to(gl.float32)
        v_scale = gl.load(v_scales, mask=keep, other=0.0).to(gl.float32)
    else:
        k = gl.load(k_words)
        v = gl.load(v_words)
        k_scale = gl.load(k_scales).to(gl.float32)
        v_scale = gl.load(v_scales).to(gl.float32)

    k0, k1, k2, k3 = _k_codes(k, K_FP8)
    scores = gl.zeros([TILE, N], gl.float32, layout=MMA) - q_bias[None, :]
    scores = mma_v2(_k_operand(k0, TILE, K_WORDS, A), q0, scores)
    scores = mma_v2(_k_operand(k1, TILE, K_WORDS, A), q1, scores)
    scores = mma_v2(_k_operand(k2, TILE, K_WORDS, A), q2, scores)
    scores = mma_v2(_k_operand(k3, TILE, K_WORDS, A), q3, scores)
    scores = scores * k_scale[:, None] * q_unit[None, :]
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap * (1.0 - 2.0 / (gl.exp2(scores) + 1.0))
    if MASKED:
        scores = gl.where(keep[:, None], scores, float("-inf"))

    new_top = gl.maximum(top, gl.max(scores, 0))
    probs = gl.exp2(scores - new_top[None, :])
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :] + probs
    new_unit = gl.maximum(v_unit, gl.max(v_scale, 0))
    decay *= v_unit / new_unit
    weights = gl.convert_layout((probs * (v_scale * (1.0 / new_unit))[:, None]).to(gl.float16), B)
    v = gl.convert_layout(v, _v_layout(TILE, V_WORDS, RUN, True), assert_trivial=True)
    v0, v1, v2, v3 = _v_codes(v, V_FP8)
    a0 = mma_v2(_v_operand(v0, TILE, V_WORDS, RUN, A), weights, a0 * decay[None, :])
    a1 = mma_v2(_v_operand(v1, TILE, V_WORDS, RUN, A), weights, a1 * decay[None, :])
    a2 = mma_v2(_v_operand(v2, TILE, V_WORDS, RUN, A), weights, a2 * decay[None, :])
    a3 = mma_v2(_v_operand(v3, TILE, V_WORDS, RUN, A), weights, a3 * decay[None, :])
    return a0, a1, a2, a3, total, new_top, new_unit


@gluon.jit(do_not_specialize=["num_splits", "window", "tables_stride"])
def decode_codes_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM], with SPLIT [num_seqs, heads, num_splits, V_DIM] fp32
    lse_ptr,  # [num_seqs, heads, num_splits] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM] int8 or e4m3
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM] int8 or e4m3
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
    GROUP: gl.constexpr,
    N: gl.constexpr,
    K_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    K_FP8: gl.constexpr,
    V_FP8: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HEADS: gl.constexpr = gl.SliceLayout(0, MMA)
    K_WORDS: gl.constexpr = K_DIM // 4
    V_WORDS: gl.constexpr = V_DIM // 4
    RUN: gl.constexpr = 4 if V_WORDS >= 32 else V_WORDS // 8
    split = gl.program_id(0)
    kv_head = gl.program_id(1)
    seq = gl.program_id(2)
    heads = gl.num_programs(1) * GROUP
    seq_len = gl.load(seq_lens_ptr + seq)
    # the split's tiles, as `decode_attention._split_range` has them
    first_token = 0
    if WINDOW:
        first_token = gl.maximum(seq_len - window, 0)
    first_tile = first_token // TILE
    tiles = (seq_len + TILE - 1) // TILE - first_tile
    per_split = gl.maximum((tiles + num_splits - 1) // num_splits, 1)
    begin = first_tile + split * per_split
    end = gl.minimum(begin + per_split, first_tile + tiles)

    row = gl.arange(0, V_WORDS, layout=gl.SliceLayout(1, MMA))
    channel = 4 * (row // (8 * RUN) * (8 * RUN) + row % 8 * RUN + row // 8 % RUN)
    group_head = gl.arange(0, N, layout=HEADS)
    head = kv_head * GROUP + group_head
    out_ptrs = out_ptr + ((seq.to(gl.int64) * heads + head) * num_splits + split)[None, :] * V_DIM + channel[:, None]
    live = (group_head < GROUP)[None, :]
    zeros = gl.zeros([V_WORDS, N], gl.float32, layout=MMA)
    if begin >= end:
        if not SPLIT:  # a padded row of a captured graph
            for i in gl.static_range(4):
                gl.store(out_ptrs + i, zeros.to(out_ptr.dtype.element_ty), mask=live)
        return

    q_head = gl.arange(0, N, layout=gl.SliceLayout(0, B))
    q_live = (q_head < GROUP)[None, :]
    column = gl.arange(0, K_WORDS, layout=gl.SliceLayout(1, B))
    word = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2
    q_ptrs = q_ptr + seq.to(gl.int64) * q_stride_t + (kv_head * GROUP + q_head)[None, :] * q_stride_h
    q0 = _query(q_ptrs, 0, word, q_live, K_FP8)
    q1 = _query(q_ptrs, 1, word, q_live, K_FP8)
    q2 = _query(q_ptrs, 2, word, q_live, K_FP8)
    q3 = _query(q_ptrs, 3, word, q_live, K_FP8)
    largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    largest = gl.max(largest, 0)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    inverse = (1.0 / unit)[None, :]
    q0 = (q0 * inverse).to(gl.float16)
    q1 = (q1 * inverse).to(gl.float16)
    q2 = (q2 * inverse).to(gl.float16)
    q3 = (q3 * inverse).to(gl.float16)
    q_unit = gl.convert_layout(unit, HEADS) * scale
    q_bias = gl.zeros([N], gl.float32, layout=HEADS)
    if not K_FP8:
        q_sum = q0.to(gl.float32) + q1.to(gl.float32) + q2.to(gl.float32) + q3.to(gl.float32)
        q_bias = gl.convert_layout(gl.sum(q_sum, 0), HEADS) * INT8_BIAS

    a0 = zeros
    a1 = zeros
    a2 = zeros
    a3 = zeros
    total = gl.zeros([TILE, N], gl.float32, layout=MMA)
    top = gl.full([N], float("-inf"), gl.float32, layout=HEADS)
    v_unit = 1e-30
    table_ptr = tables_ptr + seq.to(gl.int64) * tables_stride
    # Masked tiles first, whatever their place: the order of keys does not matter to a softmax.
    last_partial = (end * TILE > seq_len).to(gl.int32)
    first_partial = 0
    if WINDOW:
        first_partial = ((begin * TILE < first_token) & (end - begin > last_partial)).to(gl.int32)
    for i in range(last_partial + first_partial):
        tile = gl.where(i < last_partial, end - 1, begin)
        block = gl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(gl.int64)
        a0, a1, a2, a3, total, top, v_unit = _tile(
            block, kv_head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE, tile * TILE, first_token, seq_len,
            a0, a1, a2, a3, total, top, v_unit, q0, q1, q2, q3, q_bias, q_unit, softcap,
            k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, k_stride, k_scale_stride, v_stride, v_scale_stride,
            TILE, N, K_WORDS, V_WORDS, RUN, K_FP8, V_FP8, SOFTCAP, True, MMA,
        )  # fmt: skip
    begin += first_partial
    end -= last_partial
    last = gl.maximum(end - 1, 0)
    next_block = gl.load(table_ptr + gl.minimum(begin, last) * TILE // BLOCK_SIZE)
    for tile in range(begin, end):
        block = next_block.to(gl.int64)
        next_block = gl.load(table_ptr + gl.minimum(tile + 1, last) * TILE // BLOCK_SIZE)  # no two latencies in a row
        a0, a1, a2, a3, total, top, v_unit = _tile(
            block, kv_head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE, tile * TILE, first_token, seq_len,
            a0, a1, a2, a3, total, top, v_unit, q0, q1, q2, q3, q_bias, q_unit, softcap,
            k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, k_stride, k_scale_stride, v_stride, v_scale_stride,
            TILE, N, K_WORDS, V_WORDS, RUN, K_FP8, V_FP8, SOFTCAP, False, MMA,
        )  # fmt: skip

    denominator = gl.sum(total, 0)
    if SPLIT:
        lse_ptrs = lse_ptr + (seq.to(gl.int64) * heads + head) * num_splits + split
        gl.store(lse_ptrs, top + gl.log2(denominator), mask=group_head < GROUP)
    elif SINKS:
        sink = gl.load(sinks_ptr + head, mask=group_head < GROUP, other=0.0).to(gl.float32) * 1.4426950408889634
        new_top = gl.maximum(top, sink)
        v_unit = v_unit * gl.exp2(top - new_top)
        denominator = denominator * gl.exp2(top - new_top) + gl.exp2(sink - new_top)
    factor = (v_unit / denominator)[None, :]
    gl.store(out_ptrs, (a0 * factor).to(out_ptr.dtype.element_ty), mask=live)
    gl.store(out_ptrs + 1, (a1 * factor).to(out_ptr.dtype.element_ty), mask=live)
    gl.store(out_ptrs + 2, (a2 * factor).to(out_ptr.dtype.element_ty), mask=live)
    gl.store(out_ptrs + 3, (a3 * factor).to(out_ptr.dtype.element_ty), mask=live)


def fits(query: Tensor, layer: LayerKV) -> bool:
    """Whether this kernel serves the call; the portable one serves every other."""
    k, v = layer.k, layer.v
    if not (query.is_cuda and isinstance(k, ScaledPages) and isinstance(v, ScaledPages)):
        return False
    group = query.shape[1] // k.codes.shape[1]
    return (
        query.dtype != torch.float32
        and k.codes.shape[3] in (64, 128, 256)
        and v.codes.shape[3] in (64, 128, 256)
        and group <= 16
        and max(group, 8) * v.codes.shape[3] <= 2048  # accumulators: at most 64 registers of a lane
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 for x in (k.codes, v.codes))
    )
