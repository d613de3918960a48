"""The device function that stores a tile of K or V rows in pages: as values, or as codes with one scale per row.

Codes and scales equal `reference.quantize_rows` bit for bit: divisions are IEEE, int8 rounds half to even. fp8 needs
compute capability 8.9 (e4m3 conversion in hardware).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tile(
    x,  # [ROWS, BLOCK_D], zero beyond HEAD_DIM
    mask,  # [ROWS, BLOCK_D]
    live,  # [ROWS]
    pages_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    page_offset,  # [ROWS] int64, of a row's first channel in pages_ptr
    scale_offset,  # [ROWS] int64, of a row in scale_ptr
    d,  # [BLOCK_D]
    CODE_MAX: tl.constexpr,  # largest code, 0: values
):
    at = pages_ptr + page_offset[:, None] + d[None, :]
    if CODE_MAX == 0:
        tl.store(at, x.to(pages_ptr.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        # integer maximum of the magnitude's bits: unlike tl.max on floats it keeps a NaN, which sorts above inf
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        exact = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([x.shape[0]], CODE_MAX, tl.float32))
        finite = exact <= 65504.0
        exact = tl.where(finite, exact, 0.0)
        nearest = exact.to(tl.float16)
        rounded_down = nearest.to(tl.float32) < exact
        scale = (nearest.to(tl.int16, bitcast=True) + rounded_down.to(tl.int16)).to(tl.float16, bitcast=True)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        codes = tl.div_rn(tl.where(finite[:, None], x, 0.0), tl.broadcast_to(divisor[:, None], x.shape))
        if pages_ptr.dtype.element_ty == tl.int8:
            # adding 1.5 * 2^23 leaves no fraction bits: the sum is rounded half to even by the adder
            codes = ((codes + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            codes = codes.to(pages_ptr.dtype.element_ty)
        tl.store(at, codes, mask=mask)
        tl.store(scale_ptr + scale_offset, tl.where(finite, scale, float("nan")), mask=live)
