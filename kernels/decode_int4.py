"""Gluon decode attention over 4-bit pages: codes become matrix-unit operands inside registers.

As for 8 bits, a program is one warp, S^T = K q^T and O^T = V^T P^T, and what a lane loads is what `mma.m16n8k16` wants
from that lane, with channels and tokens in an order of our choice. What 4 bits add:

- A code needs no conversion: the bits 0x000F of an fp16 are the subnormal number code * 2^-24, the bits 0x00F0 are
  code * 2^-20, exactly, and the matrix unit takes subnormals at full speed. So one `and` makes two operands; q (for K)
  and the output (for V) carry the powers of two. 0.6 instructions per code of K, 0.75 of V.
- score = sum_g k_scale[t, g] * (q_g . codes) + k_zero[t, g] * sum(q_g). Low and high bits of a byte belong to different
  groups (`layout.GroupPages`), hence to different products, so no operand mixes two scales.
- The values' zeros, weighted by the probabilities, are summed per token and group like the softmax denominator.

Serves head_dim 64 and 128 in 16-byte aligned pages, 16-bit queries, up to 8 heads per KV head; `fits` says when. Any
GPU with `mma.m16n8k16` (compute capability 8.0). Not in the interpreter: GPU tests cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.decode_registers import _share, _tiles
from hf_paged.kernels.layout import GroupPages, LayerKV

CODE_UNIT = gl.constexpr(2.0**24)  # a code read as fp16 bits is code / CODE_UNIT


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _k_layout(tile, words):
    """A lane holds a quarter of a row, consecutive words, of tokens lane // 4 + 8 i."""
    run = words // 4
    consecutive = [[0, 1 << i] for i in range(_log2(run))]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    more = [[1 << i, 0] for i in range(3, _log2(tile))]
    return gl.DistributedLinearLayout([*consecutive, *more], lanes, [], [], [tile, words])


@gluon.constexpr_function
def _v_layout(tile, words, pairs_first):
    """A lane holds an eighth of a row, consecutive words, of tokens 2 (lane % 4) + {0, 1} + 8 i."""
    run = words // 8
    consecutive = [[0, 1 << i] for i in range(_log2(run))]
    more = [[1 << i, 0] for i in range(3, _log2(tile))]
    registers = [[1, 0], *consecutive, *more] if pairs_first else [*consecutive, [1, 0], *more]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, words])


@gluon.constexpr_function
def _scale_layout(tile, groups):
    """Four lanes hold the scales and zeros of one row, of rows lane // 4 + 8 i: the rows of a matrix product."""
    registers = [[0, 1 << i] for i in range(_log2(groups))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [], [], [tile, groups])


@gluon.constexpr_function
def _head_layout(tile, heads):
    """`[tile, heads]` where a lane holds one head of rows lane // 4 + 8 i: both halves of a product's column pair."""
    registers = [[0, 4 << i] for i in range(_log2(heads // 4))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [], [], [tile, heads])


@gluon.jit
def _short_words(words):
    """`[TILE, WORDS]` 32-bit words as `[TILE, 2 * WORDS]` 16-bit ones."""
    short = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    return short.reshape([words.shape[0], 2 * words.shape[1]])


@gluon.constexpr_function
def _out_layout(width, heads):
    """`[heads, 2 * width]` where a lane holds consecutive channels, those of its rows of a product."""
    run = width // 4
    registers = [[0, 1 << i] for i in range(_log2(run))] + [[4 << i, 0] for i in range(_log2(heads // 4))]
    lanes = [[1, 0], [2, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [heads, 2 * width])


@gluon.jit
def _codes(words):
    """Two 16-bit words -> four fp16 pairs: codes 0 and 2 of each times 2^-24, codes 1 and 3 times 2^-20."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        shr.u32 a, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, a, 0x000F000F;
        and.b32 $3, a, 0x00F000F0;
        }
        """,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scale_and_zero(pair):
    """Two fp16 in 32 bits as fp32."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        }
        """,
        "=r,=r,r",
        [pair],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _k_operand(x, TILE: gl.constexpr, WIDTH: gl.constexpr, A: gl.constexpr):
    """`[TILE, WIDTH]` as left operand: word RUN c + 4 s + 2 h + e becomes column 16 s + 8 h + 2 c + e, in place."""
    x = x.reshape([TILE, 4, WIDTH // 16, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([TILE, WIDTH])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _v_operand(x, TILE: gl.constexpr, WIDTH: gl.constexpr, A: gl.constexpr):
    """`[TILE, WIDTH]` as transposed left operand: word RUN r + x becomes row 8 x + r, in place."""
    x = x.reshape([TILE, 8, WIDTH // 8]).permute([2, 1, 0]).reshape([WIDTH, TILE])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _tile(ptr, block, row, stride, TILE: gl.constexpr, ROW: gl.constexpr, L: gl.constexpr):
    """Pointers to TILE rows of ROW 32-bit words, from row `row` of a block on."""
    t = gl.arange(0, TILE, layout=gl.SliceLayout(1, L))
    w = gl.arange(0, ROW, layout=gl.SliceLayout(0, L))
    first = ptr + (block.to(gl.int64) * stride + row * ROW)
    # split so that all loads of a lane are constants away from one address
    return first + (t % 8 * ROW)[:, None] + w[None, :] + (t // 8 * (8 * ROW))[:, None]


@gluon.jit
def _scales_of_rows(pairs, TILE: gl.constexpr, GROUPS: gl.constexpr, H: gl.constexpr):
    """Scale and zero of the low and of the high codes of each row, `[TILE]` fp32; one group serves both."""
    L: gl.constexpr = gl.SliceLayout(1, H)
    if GROUPS == 2:
        low, high = gl.split(pairs)
        low_scale, low_zero = _scale_and_zero(gl.convert_layout(low, L))
        high_scale, high_zero = _scale_and_zero(gl.convert_layout(high, L))
    else:
        low_scale, low_zero = _scale_and_zero(gl.convert_layout(pairs.reshape([TILE]), L))
        high_scale, high_zero = low_scale, low_zero
    return low_scale, low_zero, high_scale, high_zero


@gluon.jit
def _halves(x, H: gl.constexpr):
    """`[M, N]` of a product, columns (head, low or high codes) -> low and high `[M, N / 2]`."""
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.convert_layout(low, H, assert_trivial=True), gl.convert_layout(high, H, assert_trivial=True)


@gluon.jit
def _columns(low, high, L: gl.constexpr):
    """The reverse, in layout L."""
    x = gl.join(low, high)
    if len(low.shape) == 2:
        x = x.reshape([low.shape[0], 2 * low.shape[1]])
    else:
        x = x.reshape([2 * low.shape[0]])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _scores(k, pairs, q0, q1, q2, q3, q_low, q_high, TILE: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr,
            MMA: gl.constexpr, H: gl.constexpr):  # fmt: skip
    """K q^T / CODE_UNIT of one tile, `[TILE, N / 2]` fp32."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    k0, k1, k2, k3 = _codes(_short_words(k))
    products = gl.zeros([TILE, q0.shape[1]], gl.float32, layout=MMA)
    products = mma_v2(_k_operand(k0, TILE, WIDTH, A), q0, products)
    products = mma_v2(_k_operand(k1, TILE, WIDTH, A), q1, products)
    products = mma_v2(_k_operand(k2, TILE, WIDTH, A), q2, products)
    products = mma_v2(_k_operand(k3, TILE, WIDTH, A), q3, products)
    low, high = _halves(products, H)
    low_scale, low_zero, high_scale, high_zero = _scales_of_rows(pairs, TILE, GROUPS, H)
    offset = low_zero[:, None] * q_low[None, :] + high_zero[:, None] * q_high[None, :]
    return low * low_scale[:, None] + (high * high_scale[:, None] + offset)


@gluon.jit
def _power_of_two_above(x):
    """The smallest power of two that is not below the fp32 `x`, 0 < x < 2^127, or 0."""
    return ((x.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit(do_not_specialize=["num_seqs", "kv_heads", "window", "tables_stride"])
def decode_int4_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [programs, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [programs, 2, GROUP] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM / 2] uint8
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, groups, 2] fp16
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM / 2] uint8
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, groups, 2] fp16
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
):
    if OVERLAP:  # the joining kernel may start now; it waits for all results
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    begin, end, seq, before = _share(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW, TILE, LEAST)
    while begin < end:
        seq_len = gl.load(seq_lens_ptr + seq)
        first_token, first_tile, tiles = _tiles(seq_len, window, WINDOW, TILE)
        offset = begin - before * kv_heads
        if offset >= tiles * kv_heads:
            before += tiles
            seq += 1
        else:
            kv_head = offset // tiles
            first = offset % tiles
            count = gl.minimum(tiles - first, end - begin)
            _attend(
                seq, seq_len, first_token, first_tile + first, first_tile + first + count, first == 0, count == tiles,
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
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    H: gl.constexpr = _head_layout(TILE, N)
    HEADS: gl.constexpr = gl.SliceLayout(0, H)
    K_WIDTH: gl.constexpr = K_DIM // 4
    V_WIDTH: gl.constexpr = V_DIM // 4
    K_GROUPS: gl.constexpr = K_DIM // 64
    V_GROUPS: gl.constexpr = V_DIM // 64
    KL: gl.constexpr = _k_layout(TILE, K_WIDTH // 2)
    VL: gl.constexpr = _v_layout(TILE, V_WIDTH // 2, False)
    KS: gl.constexpr = _scale_layout(TILE, K_GROUPS)
    VS: gl.constexpr = _scale_layout(TILE, V_GROUPS)
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, H))

    k_words = k_ptr.to(gl.pointer_type(gl.int32)) + kv_head * (BLOCK_SIZE * K_DIM // 8)
    v_words = v_ptr.to(gl.pointer_type(gl.int32)) + kv_head * (BLOCK_SIZE * V_DIM // 8)
    k_scales = k_scale_ptr.to(gl.pointer_type(gl.int32)) + kv_head * (BLOCK_SIZE * K_GROUPS)
    v_scales = v_scale_ptr.to(gl.pointer_type(gl.int32)) + kv_head * (BLOCK_SIZE * V_GROUPS)
    k_stride = k_stride // 4
    v_stride = v_stride // 4
    k_scale_stride = k_scale_stride // 2
    v_scale_stride = v_scale_stride // 2
    table_ptr = tables_ptr + seq.to(gl.int64) * tables_stride
    block = gl.load(table_ptr + begin * TILE // BLOCK_SIZE)
    next_block = gl.load(table_ptr + gl.minimum(begin + 1, end - 1) * TILE // BLOCK_SIZE)
    row = begin * TILE % BLOCK_SIZE
    k = gl.load(_tile(k_words, block, row, k_stride, TILE, K_DIM // 8, KL))
    k_pairs = gl.load(_tile(k_scales, block, row, k_scale_stride, TILE, K_GROUPS, KS))
    v = gl.load(_tile(v_words, block, row, v_stride, TILE, V_DIM // 8, VL))
    v_pairs = gl.load(_tile(v_scales, block, row, v_scale_stride, TILE, V_GROUPS, VS))

    q_ptr += seq.to(gl.int64) * q_stride_t + kv_head * GROUP * q_stride_h
    q0, q1, q2, q3, q_low, q_high, q_unit = _queries(q_ptr, q_stride_h, scale, K_DIM, GROUP, N, MMA, HEADS)
    a0 = gl.zeros([V_WIDTH, 2 * N], gl.float32, layout=MMA)  # values of the j-th codes / v_unit, as are a1, a2, a3
    a1 = a0
    a2 = a0
    a3 = a0
    total = gl.zeros([TILE, N], gl.float32, layout=H)  # of the softmax denominator, as are of the weighted zeros:
    low_zeros = total
    high_zeros = total
    top = gl.full([N], float("-inf"), gl.float32, layout=HEADS)  # running maximum of base-2 scores
    v_unit = 2.0**-100  # a power of two, no smaller than any scale of v so far
    for tile in range(begin, end):
        more = tile + 1 < end
        scores = _scores(k, k_pairs, q0, q1, q2, q3, q_low, q_high, TILE, K_WIDTH, K_GROUPS, MMA, H)
        block = next_block
        next_block = gl.load(table_ptr + gl.minimum(tile + 2, end - 1) * TILE // BLOCK_SIZE)
        row = (tile + 1) * TILE % BLOCK_SIZE
        k = gl.load(_tile(k_words, block, row, k_stride, TILE, K_DIM // 8, KL), mask=more)
        k_pairs = gl.load(_tile(k_scales, block, row, k_scale_stride, TILE, K_GROUPS, KS), mask=more)
        unit = q_unit
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (gl.exp2(scores * q_unit[None, :]) + 1.0))
            unit = gl.full([N], 1.0, gl.float32, layout=HEADS)
        low_scale, low_zero, high_scale, high_zero = _scales_of_rows(v_pairs, TILE, V_GROUPS, H)
        edge = tile * TILE + TILE > seq_len
        if WINDOW:
            edge = edge | (tile * TILE < first_token)
        if edge:  # the scales that lie in dead slots may be NaN
            keep = (tile * TILE + n >= first_token) & (tile * TILE + n < seq_len)
            scores = gl.where(keep[:, None], scores, float("-inf"))
            low_scale = gl.where(keep, low_scale, 0.0)
            low_zero = gl.where(keep, low_zero, 0.0)
            high_scale = gl.where(keep, high_scale, 0.0)
            high_zero = gl.where(keep, high_zero, 0.0)

        new_top = gl.maximum(top, gl.max(scores, 0) * unit)
        new_unit = gl.maximum(v_unit, _power_of_two_above(gl.max(gl.maximum(low_scale, high_scale), 0)))
        if (gl.max((new_top > top).to(gl.int32), 0) > 0) | (new_unit > v_unit):  # rare after the first tiles
            decay = gl.exp2(top - new_top)
            total = total * decay[None, :]
            low_zeros = low_zeros * decay[None, :]
            high_zeros = high_zeros * decay[None, :]
            decay *= v_unit / new_unit
            column_decay = _columns(decay, decay, gl.SliceLayout(0, MMA))[None, :]
            a0 = a0 * column_decay
            a1 = a1 * column_decay
            a2 = a2 * column_decay
            a3 = a3 * column_decay
        top = new_top
        v_unit = new_unit
        probs = gl.exp2(scores * unit[None, :] - top[None, :])  # one multiply-add
        total += probs
        low_zeros += probs * low_zero[:, None]
        inverse = 1.0 / v_unit
        low = probs * (low_scale * inverse)[:, None]
        high = low
        if V_GROUPS == 2:
            high_zeros += probs * high_zero[:, None]
            high = probs * (high_scale * inverse)[:, None]
        weights = gl.convert_layout(_columns(low, high, MMA).to(gl.float16), B)
        v = gl.convert_layout(_short_words(v), _v_layout(TILE, V_WIDTH, True), assert_trivial=True)
        v0, v1, v2, v3 = _codes(v)
        a0 = mma_v2(_v_operand(v0, TILE, V_WIDTH, A), weights, a0)
        a1 = mma_v2(_v_operand(v1, TILE, V_WIDTH, A), weights, a1)
        a2 = mma_v2(_v_operand(v2, TILE, V_WIDTH, A), weights, a2)
        a3 = mma_v2(_v_operand(v3, TILE, V_WIDTH, A), weights, a3)
        v = gl.load(_tile(v_words, block, row, v_stride, TILE, V_DIM // 8, VL), mask=more)
        v_pairs = gl.load(_tile(v_scales, block, row, v_scale_stride, TILE, V_GROUPS, VS), mask=more)

    denominator = gl.sum(total, 0)
    low_zero = gl.sum(low_zeros, 0)
    high_zero = low_zero
    if V_GROUPS == 2:
        high_zero = gl.sum(high_zeros, 0)
    head = gl.arange(0, N, layout=HEADS)
    if whole:
        inverse = 1.0 / denominator
        if SINKS:
            sink = gl.load(sinks_ptr + kv_head * GROUP + head, mask=head < GROUP, other=0.0)
            sink = sink.to(gl.float32) * 1.4426950408889634
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            inverse = decay / (denominator * decay + gl.exp2(sink - new_top))
        out_ptr += (seq.to(gl.int64) * kv_heads + kv_head) * (GROUP * V_DIM)
        _store(out_ptr, a0, a2, v_unit * inverse, low_zero * inverse, V_WIDTH, GROUP, N, 0)
        _store(out_ptr, a1, a3, v_unit * 0.0625 * inverse, high_zero * inverse, V_WIDTH, GROUP, N, 1)
    else:
        inverse = 1.0 / denominator
        slot = (gl.program_id(0) * 2 + at_start.to(gl.int32)) * GROUP
        gl.store(lse_ptr + slot + head, top + gl.log2(denominator), mask=head < GROUP)
        partial_ptr += slot * V_DIM
        _store(partial_ptr, a0, a2, v_unit * inverse, low_zero * inverse, V_WIDTH, GROUP, N, 0)
        _store(partial_ptr, a1, a3, v_unit * 0.0625 * inverse, high_zero * inverse, V_WIDTH, GROUP, N, 1)


@gluon.jit
def _queries(
    q_ptr, stride, scale, K_DIM: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Right operands for the tensors of `_codes`, sums / CODE_UNIT over the channels of low and high codes, and unit.

    Columns are (head, 0) for the low codes and (head, 1) for the high ones, zero where they meet the others, so no
    product mixes two scales. Rows are `_k_operand`'s columns. Times the unit `[N]` products are base-2 scores.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)  # a lane has both columns of a head
    column = gl.arange(0, 2 * N, layout=gl.SliceLayout(0, B))
    row = gl.arange(0, K_DIM // 4, layout=gl.SliceLayout(1, B))
    word = row % 8 // 2 * (K_DIM // 16) + row // 16 * 4 + row % 16 // 8 * 2 + row % 2
    pointers = q_ptr + (column // 2 * stride)[None, :] + (2 * word)[:, None]
    low = ((column < 2 * GROUP) & (column % 2 == 0))[None, :]
    high = ((column < 2 * GROUP) & (column % 2 == 1))[None, :]
    q0 = gl.load(pointers, mask=low, other=0.0).to(gl.float32) * scale
    q1 = gl.load(pointers + K_DIM // 2, mask=high, other=0.0).to(gl.float32) * scale
    q2 = gl.load(pointers + 1, mask=low, other=0.0).to(gl.float32) * scale
    q3 = gl.load(pointers + (K_DIM // 2 + 1), mask=high, other=0.0).to(gl.float32) * scale
    largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    low_top, high_top = gl.split(gl.convert_layout(gl.max(largest, 0), COLUMNS).reshape([N, 2]))
    largest = gl.maximum(low_top, high_top)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    inverse = gl.convert_layout(gl.join(1.0 / unit, 1.0 / unit).reshape([2 * N]), gl.SliceLayout(0, B))[None, :]
    q0 = (q0 * inverse).to(gl.float16)
    q1 = (q1 * (inverse * 0.0625)).to(gl.float16)  # codes 1 and 3 come 16 times too large
    q2 = (q2 * inverse).to(gl.float16)
    q3 = (q3 * (inverse * 0.0625)).to(gl.float16)
    sums = gl.sum(q0.to(gl.float32) + q2.to(gl.float32) + (q1.to(gl.float32) + q3.to(gl.float32)) * 16.0, 0)
    q_low, q_high = gl.split(gl.convert_layout(sums * (1.0 / CODE_UNIT), COLUMNS).reshape([N, 2]))
    q_low = gl.convert_layout(q_low, HEADS)
    q_high = gl.convert_layout(q_high, HEADS)
    return q0, q1, q2, q3, q_low, q_high, gl.convert_layout(unit, HEADS) * CODE_UNIT


@gluon.jit
def _store(
    ptr, even, odd, factor, zero, WIDTH: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Half of the channels of all heads, `[GROUP, V_DIM]` at `ptr`: accumulators * CODE_UNIT * factor + zero.

    `even`, `odd` `[WIDTH, 2 N]` hold the even and odd channels, in the order of `_v_operand`, in the columns of HALF.
    """
    L: gl.constexpr = _out_layout(WIDTH, N)
    x = gl.join(even, odd).reshape([WIDTH // 8, 8, N, 2, 2]).permute([2, 1, 0, 4, 3]).reshape([N, 2 * WIDTH, 2])
    low, high = gl.split(x)
    x = high if HALF else low
    x = gl.convert_layout(x, L, assert_trivial=True)
    factor = gl.convert_layout(factor * CODE_UNIT, gl.SliceLayout(1, L))
    zero = gl.convert_layout(zero, gl.SliceLayout(1, L))
    head = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    channel = gl.arange(0, 2 * WIDTH, layout=gl.SliceLayout(0, L))
    x = (x * factor[:, None] + zero[:, None]).to(ptr.dtype.element_ty)
    gl.store(
        ptr + (head * (4 * WIDTH))[:, None] + (HALF * 2 * WIDTH + channel)[None, :], x, mask=(head < GROUP)[:, None]
    )


def fits(query: Tensor, layer: LayerKV) -> bool:
    """Whether this kernel serves the call; the portable one serves every other."""
    k, v = layer.k, layer.v
    if not (query.is_cuda and isinstance(k, GroupPages) and isinstance(v, GroupPages)):
        return False
    return (
        query.dtype != torch.float32
        and k.head_dim in (64, 128)
        and v.head_dim in (64, 128)
        and query.shape[1] // k.codes.shape[1] <= 8
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 for x in (k.codes, v.codes))
        and all(x.data_ptr() % 8 == 0 and x.stride(0) % 4 == 0 for x in (k.scale, v.scale))
    )


def launch(layer: LayerKV) -> tuple[int, int]:
    """Tokens per tile and registers per thread."""
    return min(layer.block_size, 32), 168


def padded_heads(group: int) -> int:
    """Heads of a KV head that the kernel computes; each takes two of the eight columns of a product."""
    return 4 if group <= 4 else 8
