"""Gluon decode attention over pages of which K, V or both are 4-bit: codes become matrix-unit operands in registers.

As in `decode_registers.py`, whose 8-bit tiles this kernel uses for the other side, a program is one warp, S^T = K q^T
and O^T = V^T P^T, and what a lane loads is what `mma.m16n8k16` wants from that lane. What 4 bits add:

- A code needs no conversion: the bits 0x000F of an fp16 are the subnormal number code * 2^-24, the bits 0x00F0 are
  code * 2^-20, exactly, and the matrix unit takes subnormals at full speed. So one `and` makes two operands; q (for K)
  and the output (for V) carry the powers of two. 0.6 instructions per code of K, 0.75 of V.
- score = sum_g k_scale[t, g] * (q_g . codes) + k_zero[t, g] * sum(q_g). The low and the high bits of a byte belong to
  different groups, and a product has eight columns where few heads share a KV head: a head takes two, one per half, and
  a lane finds both halves' products in its own registers.
- The values' zeros, weighted by the probabilities, are summed per token and group like the softmax denominator.
- Running maxima seldom change after the first tiles, so accumulators are rescaled under a branch.

Serves head_dim 64 and 128 in 16-byte aligned pages, 16-bit queries, up to 8 heads per KV head; `fits` says when. Any
GPU with `mma.m16n8k16` (compute capability 8.0), for e4m3 8.9. Not in the interpreter: GPU tests cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.int4_tiles import (
    CODE_UNIT,
    columns,
    halves,
    head_layout,
    int4_codes,
    int4_k_layout,
    int4_k_operand,
    int4_queries,
    int4_scale_layout,
    int4_v_layout,
    power_of_two_above,
    row_words,
    scales_of_rows,
    short_words,
    store_heads,
    value_operands,
)
from hf_paged.kernels.layout import GroupPages, LayerKV, PlainPages
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.kernels.register_tiles import (
    INT8_BIAS,
    add_code_products,
    at_edge,
    block_of,
    capped,
    inverse_denominator,
    k_layout,
    q_layout,
    q_operands,
    run_of,
    v_layout,
)


@gluon.jit
def attend_int4(
    keys,  # first tile, tile after the last, first visible token, tokens
    table_ptr, q_row, q_stride_h,
    k_pages,  # `head_of_pages`, as v_pages
    v_pages, scale, softcap,
    results,  # `result_pointers`
    K_TYPE: gl.constexpr, V_TYPE: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, K_DIM: gl.constexpr,
    V_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Tiles of one sequence and KV head, from the first key to the stored result."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    H: gl.constexpr = head_layout(TILE, N)
    KL: gl.constexpr = int4_k_layout(TILE, K_DIM // 8) if gl.uint8 == K_TYPE else k_layout(TILE, K_DIM // 4)
    V8: gl.constexpr = v_layout(TILE, V_DIM // 4, run_of(V_DIM // 4), False)
    VL: gl.constexpr = int4_v_layout(TILE, V_DIM // 8, False) if gl.uint8 == V_TYPE else V8
    begin, end, first_token, seq_len = keys
    last = end - 1
    block = block_of(table_ptr, begin, TILE, BLOCK_SIZE)
    next_block = block_of(table_ptr, gl.minimum(begin + 1, last), TILE, BLOCK_SIZE)
    row = begin * TILE % BLOCK_SIZE
    EVICT: gl.constexpr = "evict_first" if N == 8 else ""  # 4: 180 -> 157 us without (32 heads on 8, 64 x 8,192)
    k, k_scale = _load(k_pages, block, row, K_TYPE, K_DIM, TILE, KL, H, EVICT)
    v, v_scale = _load(v_pages, block, row, V_TYPE, V_DIM, TILE, VL, H, EVICT)
    q = _queries(q_row, q_stride_h, scale, K_TYPE, K_DIM, GROUP, N, MMA, gl.SliceLayout(0, H))
    factor = q[5]
    if SOFTCAP:
        factor = gl.full([N], 1.0, gl.float32, layout=gl.SliceLayout(0, H))
    top = gl.full([N], float("-inf"), gl.float32, layout=gl.SliceLayout(0, H))  # running maximum of base-2 scores
    v_unit = 2.0**-100  # a power of two, no smaller than any scale of v so far
    sums = _no_sums(TILE, N, V_DIM, MMA, H)
    for tile in range(begin, end):
        scores = _scores(k, k_scale, q, K_TYPE, TILE, K_DIM, MMA, H)
        block = next_block
        next_block = block_of(table_ptr, gl.minimum(tile + 2, last), TILE, BLOCK_SIZE)
        row = gl.minimum(tile + 1, last) * TILE % BLOCK_SIZE  # the last tile is loaded again: no load has a mask
        k, k_scale = _load(k_pages, block, row, K_TYPE, K_DIM, TILE, KL, H, EVICT)
        if SOFTCAP:
            scores = capped(scores * q[5][None, :], softcap)
        scales = _value_scales(v_scale, V_TYPE, TILE, V_DIM, H)
        if at_edge(tile, first_token, seq_len, TILE, WINDOW):
            scores, v, scales = _living(
                first_token - tile * TILE, seq_len - tile * TILE, scores, v, scales, V_TYPE, TILE, VL, H
            )
        top, v_unit, sums = _raised(top, gl.max(scores, 0) * factor, v_unit, scales, sums, MMA)
        probs = gl.exp2(scores * factor[None, :] - top[None, :])  # one multiply-add
        sums = _add_values(v, probs, scales, 1.0 / v_unit, sums, V_TYPE, TILE, V_DIM, MMA)
        v, v_scale = _load(v_pages, block, row, V_TYPE, V_DIM, TILE, VL, H, EVICT)
    _store(sums, top, v_unit, results, V_TYPE, V_DIM, GROUP, SINKS, OFFSET)


@gluon.jit
def _no_sums(TILE: gl.constexpr, N: gl.constexpr, DIM: gl.constexpr, MMA: gl.constexpr, H: gl.constexpr):
    """Zeros for the sums over tiles: four accumulators of weighted codes / v_unit, one for each code of a word; of the
    softmax denominator; of the weighted zeros of low and of high codes."""
    a = gl.zeros([DIM // 4, 2 * N], gl.float32, layout=MMA)
    s = gl.zeros([TILE, N], gl.float32, layout=H)
    return a, a, a, a, s, s, s


@gluon.jit
def _value_scales(v_scale, TYPE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr, H: gl.constexpr):
    """Scale and zero of the low and of the high codes of each row; 8 bits have one scale."""
    if gl.uint8 == TYPE:
        low_scale, low_zero, high_scale, high_zero = scales_of_rows(v_scale, TILE, DIM // 64, H)
    else:
        low_scale = v_scale.to(gl.float32)
        low_zero, high_scale, high_zero = low_scale, low_scale, low_scale
    return low_scale, low_zero, high_scale, high_zero


@gluon.jit
def _add_values(
    v, probs, scales, inverse_unit, sums, TYPE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr, MMA: gl.constexpr
):
    """The sums with a tile more, whose codes weigh probabilities times the scales of the low and of the high ones."""
    a0, a1, a2, a3, total, low_zeros, high_zeros = sums
    total += probs
    low = probs * (scales[0] * inverse_unit)[:, None]
    high = low
    if gl.uint8 == TYPE:
        low_zeros += probs * scales[1][:, None]
        if DIM == 128:
            high_zeros += probs * scales[3][:, None]
            high = probs * (scales[2] * inverse_unit)[:, None]
    weights = gl.convert_layout(columns(low, high, MMA).to(gl.float16), gl.DotOperandLayout(1, MMA, 2))
    v0, v1, v2, v3 = value_operands(v, TYPE, TILE, DIM, MMA)
    a0 = mma_v2(v0, weights, a0)
    a1 = mma_v2(v1, weights, a1)
    a2 = mma_v2(v2, weights, a2)
    a3 = mma_v2(v3, weights, a3)
    return a0, a1, a2, a3, total, low_zeros, high_zeros


@gluon.jit
def _living(first, left, scores, v, scales, TYPE: gl.constexpr, TILE: gl.constexpr, VL: gl.constexpr, H: gl.constexpr):
    """A tile at an edge, of which the rows from `first` to `left` are seen: what lies in dead slots may be NaN (4-bit
    and int8 codes never are) and has no weight."""
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, H))
    keep = (n >= first) & (n < left)
    scores = gl.where(keep[:, None], scores, float("-inf"))
    low_scale = gl.where(keep, scales[0], 0.0)
    low_zero = gl.where(keep, scales[1], 0.0)
    high_scale = gl.where(keep, scales[2], 0.0)
    high_zero = gl.where(keep, scales[3], 0.0)
    if gl.float8e4nv == TYPE:
        v = gl.where((gl.arange(0, TILE, layout=gl.SliceLayout(1, VL)) < left)[:, None], v, 0)
    return scores, v, (low_scale, low_zero, high_scale, high_zero)


@gluon.jit
def _raised(top, tile_top, v_unit, scales, sums, MMA: gl.constexpr):
    """Maxima `[N]` and unit with a tile's, and the sums under them; they seldom change."""
    new_top = gl.maximum(top, tile_top)
    new_unit = gl.maximum(v_unit, power_of_two_above(gl.max(gl.maximum(scales[0], scales[2]), 0)))
    if (gl.max((new_top > top).to(gl.int32), 0) > 0) | (new_unit > v_unit):
        sums = _rescaled(gl.exp2(top - new_top), v_unit / new_unit, sums, MMA)
    return new_top, new_unit, sums


@gluon.jit
def _rescaled(decay, unit_decay, sums, MMA: gl.constexpr):
    """All sums times `decay` `[N]`, the accumulators also times `unit_decay`."""
    a0, a1, a2, a3, total, low_zeros, high_zeros = sums
    factor = decay * unit_decay
    factor = columns(factor, factor, gl.SliceLayout(0, MMA))[None, :]
    decay = decay[None, :]
    return (
        a0 * factor, a1 * factor, a2 * factor, a3 * factor, total * decay, low_zeros * decay, high_zeros * decay
    )  # fmt: skip


@gluon.jit
def _store(
    sums, top, v_unit, results, TYPE: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr, SINKS: gl.constexpr,
    OFFSET: gl.constexpr,
):  # fmt: skip
    """Sums / denominator into `out` for a whole head, else into a partial result."""
    whole, out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr = results
    a0, a1, a2, a3, total, low_zeros, high_zeros = sums
    inverse = inverse_denominator(top, gl.sum(total, 0), whole, lse_ptr, sinks_ptr, GROUP, SINKS)
    low_zero = gl.sum(low_zeros, 0) * inverse
    high_zero = low_zero
    if gl.uint8 == TYPE and DIM == 128:
        high_zero = gl.sum(high_zeros, 0) * inverse
    if whole:
        store_heads(
            out_ptr, a0, a1, a2, a3, v_unit * inverse, low_zero, high_zero, offset_ptr, TYPE, DIM, GROUP, OFFSET
        )
    else:
        store_heads(
            partial_ptr, a0, a1, a2, a3, v_unit * inverse, low_zero, high_zero, offset_ptr, TYPE, DIM, GROUP, False
        )


@gluon.jit
def _load(
    pages, block, row,
    TYPE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, L: gl.constexpr, H: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """TILE rows of a block from `row` on, in layout L, and their scales: `[TILE, groups]` pairs or `[TILE]` fp16."""
    ptr, scale_ptr, stride, scale_stride = pages
    if gl.uint8 == TYPE:
        GROUPS: gl.constexpr = DIM // 64
        S: gl.constexpr = int4_scale_layout(TILE, GROUPS)
        words = gl.load(row_words(ptr, block, row, stride, TILE, DIM // 8, L), eviction_policy=EVICT)
        scales = gl.load(row_words(scale_ptr, block, row, scale_stride, TILE, GROUPS, S))
    else:
        n = gl.arange(0, TILE, layout=gl.SliceLayout(1, H))
        words = gl.load(row_words(ptr, block, row, stride, TILE, DIM // 4, L), eviction_policy=EVICT)
        scales = gl.load(scale_ptr + (block.to(gl.int64) * scale_stride + row) + n)
    return words, scales


@gluon.jit
def _queries(
    q_row, stride, scale, TYPE: gl.constexpr, K_DIM: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    MMA: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Right operands, what their sums add to products, and the heads' units `[N]`: scores times it are of base 2."""
    if gl.uint8 == TYPE:
        q0, q1, q2, q3, sums, unit = int4_queries(q_row, stride, scale, K_DIM, GROUP, N, MMA)
        sums *= 1.0 / CODE_UNIT
        unit *= CODE_UNIT
    else:
        q0, q1, q2, q3, sums, unit = _code_queries(q_row, stride, scale, TYPE, K_DIM, GROUP, N, MMA)
    unit, _ = gl.split(unit.reshape([N, 2]))
    return q0, q1, q2, q3, sums, gl.convert_layout(unit, HEADS)


@gluon.jit
def _code_queries(
    q_ptr, stride, scale, TYPE: gl.constexpr, K_DIM: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """`int4_queries` for 8-bit keys: the low columns alone; for int8 the sums are what INT8_BIAS adds to products."""
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    L: gl.constexpr = q_layout(2 * N, K_DIM, 4)
    column = gl.arange(0, 2 * N, layout=gl.SliceLayout(1, L))
    channel = gl.arange(0, K_DIM, layout=gl.SliceLayout(0, L))
    live = ((column < 2 * GROUP) & (column % 2 == 0))[:, None]
    q = gl.load(q_ptr + (column // 2 * stride)[:, None] + channel[None, :], mask=live, other=0.0)
    q = q.to(gl.float32) * scale
    largest = gl.max(gl.abs(q), 1)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    q = (q * (1.0 / unit)[:, None]).to(gl.float16)
    sums = gl.convert_layout(gl.sum(q.to(gl.float32), 1), COLUMNS)
    q0, q1, q2, q3 = q_operands(q, TYPE, K_DIM // 4, 2 * N, B)
    return q0, q1, q2, q3, sums * INT8_BIAS, gl.convert_layout(unit, COLUMNS)


@gluon.jit
def _scores(
    k, k_scale, queries,
    TYPE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr, MMA: gl.constexpr, H: gl.constexpr,
):  # fmt: skip
    """K q^T of one tile, `[TILE, N]` fp32; of 4-bit keys / CODE_UNIT."""
    q0, q1, q2, q3, q_sum, _ = queries
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    products = gl.zeros([TILE, q0.shape[1]], gl.float32, layout=MMA)
    if gl.uint8 == TYPE:
        k0, k1, k2, k3 = int4_codes(short_words(k))
        products = mma_v2(int4_k_operand(k0, TILE, DIM // 4, A), q0, products)
        products = mma_v2(int4_k_operand(k1, TILE, DIM // 4, A), q1, products)
        products = mma_v2(int4_k_operand(k2, TILE, DIM // 4, A), q2, products)
        products = mma_v2(int4_k_operand(k3, TILE, DIM // 4, A), q3, products)
        low, high = halves(products, H)
        low_scale, low_zero, high_scale, high_zero = scales_of_rows(k_scale, TILE, DIM // 64, H)
        low_sum, high_sum = gl.split(q_sum.reshape([q_sum.shape[0] // 2, 2]))
        low_sum = gl.convert_layout(low_sum, gl.SliceLayout(0, H))
        high_sum = gl.convert_layout(high_sum, gl.SliceLayout(0, H))
        offset = low_zero[:, None] * low_sum[None, :] + high_zero[:, None] * high_sum[None, :]
        scores = low * low_scale[:, None] + (high * high_scale[:, None] + offset)
    else:
        if gl.int8 == TYPE:
            products = products - q_sum[None, :]
        low, _ = halves(add_code_products(products, k, q0, q1, q2, q3, TYPE, DIM // 4, A), H)
        scores = low * k_scale.to(gl.float32)[:, None]
    return scores


def fits(query: Tensor, layer: LayerKV) -> bool:
    """Whether this kernel serves the call; the portable one serves every other with a 4-bit side."""
    sides = (layer.k, layer.v)
    if not any(isinstance(pages, GroupPages) for pages in sides) or any(isinstance(p, PlainPages) for p in sides):
        return False
    capability = (8, 9) if any(pages.tensor.dtype == torch.float8_e4m3fn for pages in sides) else (8, 0)
    return (
        query.is_cuda
        and cuda_capability(query.device) >= capability
        and query.dtype != torch.float32
        and all(pages.head_dim in (64, 128) for pages in sides)
        and query.shape[1] // layer.k.tensor.shape[1] <= 8
        and all(p.tensor.data_ptr() % 16 == 0 and p.tensor.stride(0) % 16 == 0 for p in sides)
        and all(p.scale.data_ptr() % 8 == 0 and p.scale.stride(0) % 4 == 0 for p in sides if isinstance(p, GroupPages))
    )


def launch(layer: LayerKV, group: int) -> tuple[int, int]:
    """Tokens per tile and registers per lane: as few as hold a tile, for more warps, but none in memory."""
    wide = max(layer.k.head_dim, layer.v.head_dim) == 128
    registers = (255 if wide else 168) if group > 4 else (168 if wide else 96)
    return min(layer.block_size, 32), registers


def padded_heads(group: int) -> int:
    """Heads of a KV head that the kernel computes; each takes two of the eight columns of a product."""
    return 4 if group <= 4 else 8
