"""The device function that stores a tile of K or V rows in pages: as values, or as codes with their scales.

Codes and scales equal `reference.quantize_rows` and `quantize_groups` bit for bit: divisions are IEEE, integer codes
round half to even. fp8 needs compute capability 8.9 (e4m3 conversion in hardware).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.layout import num_groups

groups_of = triton.constexpr_function(num_groups)


@triton.jit
def store_tile(
    x,  # [ROWS, BLOCK_D], zero beyond HEAD_DIM
    mask,  # [ROWS, BLOCK_D]
    live,  # [ROWS]
    pages_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM], 4-bit codes: HEAD_DIM / 2
    scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, 4-bit codes: [..., groups, 2]
    block,  # [ROWS] int64
    row_in_block,  # [ROWS], head * BLOCK_SIZE + offset
    page_stride,
    scale_stride,
    d,  # [BLOCK_D]
    HEAD_DIM: tl.constexpr,
    CODE_MAX: tl.constexpr,  # largest code, 0: values
):
    if CODE_MAX == 15:
        _store_groups(x, live, pages_ptr, scale_ptr, block, row_in_block, page_stride, scale_stride, d, HEAD_DIM)
    else:
        at = pages_ptr + (block * page_stride + row_in_block * HEAD_DIM)[:, None] + d[None, :]
        if CODE_MAX == 0:
            tl.store(at, x.to(pages_ptr.dtype.element_ty), mask=mask)
        else:
            x = x.to(tl.float32)
            exact = tl.div_rn(_largest(x), tl.full([x.shape[0]], CODE_MAX, tl.float32))
            finite = exact <= 65504.0
            scale = _half_above(tl.where(finite, exact, 0.0))
            divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
            codes = _divide(tl.where(finite[:, None], x, 0.0), divisor)
            if pages_ptr.dtype.element_ty == tl.int8:
                codes = _round(codes).to(tl.int8)
            else:
                codes = codes.to(pages_ptr.dtype.element_ty)
            tl.store(at, codes, mask=mask)
            scale_at = scale_ptr + block * scale_stride + row_in_block
            tl.store(scale_at, tl.where(finite, scale, float("nan")), mask=live)


@triton.jit
def _store_groups(
    x, live, pages_ptr, scale_ptr, block, row_in_block, page_stride, scale_stride, d, HEAD_DIM: tl.constexpr
):
    GROUPS: tl.constexpr = groups_of(HEAD_DIM)
    HALF: tl.constexpr = HEAD_DIM // 2
    x = x.to(tl.float32)
    finite = _largest(x) <= 65504.0
    x = tl.where(finite[:, None], x, 0.0)
    zeros = tl.zeros_like(x)
    divisors = tl.full(x.shape, 1.0, tl.float32)
    scale_at = scale_ptr + block * scale_stride + row_in_block * (2 * GROUPS)
    for g in tl.static_range(GROUPS):
        inside = (d // (HEAD_DIM // GROUPS) == g)[None, :]
        zero = _half_below(tl.min(tl.where(inside, x, float("inf")), 1))
        span = tl.max(tl.where(inside, x, float("-inf")), 1) - zero.to(tl.float32)
        span = tl.where(span > 0, span, 0.0)  # never -0
        scale = _half_above(tl.div_rn(span, tl.full([x.shape[0]], 15.0, tl.float32)))
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        zeros = tl.where(inside, zero.to(tl.float32)[:, None], zeros)
        divisors = tl.where(inside, divisor[:, None], divisors)
        tl.store(scale_at + 2 * g, tl.where(finite, scale, float("nan")), mask=live)
        tl.store(scale_at + 2 * g + 1, tl.where(finite, zero, float("nan")), mask=live)
    codes = _round(tl.div_rn(x - zeros, divisors)).to(tl.int32)
    at = pages_ptr + (block * page_stride + row_in_block * HALF)[:, None]
    if x.shape[1] == HEAD_DIM:
        pair = codes.reshape([x.shape[0], 2, HALF]).permute(0, 2, 1)
        first, second = pair.split()
        tl.store(at + tl.arange(0, HALF)[None, :], (first | second << 4).to(tl.uint8), mask=live[:, None])
    else:
        # the codes of the second half are with other threads: they meet the first half's in memory
        tl.store(at + d[None, :], codes.to(tl.uint8), mask=live[:, None] & (d < HALF)[None, :])
        tl.debug_barrier()
        at += (d - HALF)[None, :]
        mask = live[:, None] & ((d >= HALF) & (d < HEAD_DIM))[None, :]
        first = tl.load(at, mask=mask, other=0).to(tl.int32)
        tl.store(at, (first | codes << 4).to(tl.uint8), mask=mask)


@triton.jit
def _divide(x, divisor):
    """Rows `x` over `divisor` `[ROWS]`, fp16 values, to the bit what IEEE division gives (Markstein): the quotient by
    the rounded reciprocal, and what it lacks. Few instructions an element instead of a dozen.
    """
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]
    quotient = x * reciprocal
    lacks = tl.fma(-quotient, tl.broadcast_to(divisor[:, None], x.shape), x)
    exact = tl.fma(lacks, tl.broadcast_to(reciprocal, x.shape), quotient)
    return tl.where(quotient == 0, quotient, exact)  # keeps the sign of -0


@triton.jit
def _largest(x):
    """Largest magnitude of each row. An integer maximum of bits: unlike tl.max it keeps a NaN, which sorts on top."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _half_above(x):
    """The smallest fp16 that is not below `x`, 0 <= x <= 65504."""
    nearest = x.to(tl.float16)
    rounded_down = nearest.to(tl.float32) < x
    return (nearest.to(tl.int16, bitcast=True) + rounded_down.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _half_below(x):
    """The largest fp16 that is not above `x`, |x| <= 65504; never -0."""
    nearest = x.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    below = tl.where(nearest > 0, bits - 1, tl.where(nearest == 0, -0x7FFF, bits + 1)).to(tl.int16)
    result = tl.where(nearest.to(tl.float32) > x, below, bits).to(tl.float16, bitcast=True)
    return tl.where(result == 0, 0.0, result)


@triton.jit
def _round(x):
    """Half to even, |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits, so the adder rounds."""
    return (x + 12582912.0) - 12582912.0
