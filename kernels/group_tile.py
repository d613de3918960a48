"""The device function that reads a tile of 4-bit pages as values for the portable attention kernels.

A row becomes fp16 (or fp32) numbers of magnitude at most 1 and one fp32 unit, so the kernels treat it as 8-bit codes
under a scale: nothing overflows, whatever the stored scales and zeros. Each byte is read for both of its channels, the
second time from L1, so channels keep their order and no head_dim is special. It trades instructions for generality:
`decode_int4` is what is fast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.store_tile import groups_of


@triton.jit
def group_tile(
    codes_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, DIM / 2] uint8
    scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, groups, 2] fp16
    block,  # [N] or scalar int64
    row_in_block,  # [N], head * BLOCK_SIZE + offset
    stride,
    scale_stride,
    d,  # [BLOCK]
    keep,  # [N] bool, rows that may be read; others are zeros
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Values / unit `[N, BLOCK]` of DTYPE, zero beyond DIM, and the unit `[N]` fp32."""
    GROUPS: tl.constexpr = groups_of(DIM)
    HALF: tl.constexpr = DIM // 2
    at = (block * stride + row_in_block * HALF)[:, None] + (d % HALF)[None, :]
    codes = tl.load(codes_ptr + at, mask=keep[:, None] & (d < DIM)[None, :], other=0)
    codes = (codes >> tl.where(d < HALF, 0, 4).to(tl.uint8)[None, :]) & 15
    scale_at = scale_ptr + block * scale_stride + row_in_block * (2 * GROUPS)
    unit = tl.zeros([row_in_block.shape[0]], tl.float32)
    steps = tl.zeros(codes.shape, tl.float32)
    zeros = tl.zeros(codes.shape, tl.float32)
    for g in tl.static_range(GROUPS):
        step = tl.load(scale_at + 2 * g, mask=keep, other=0.0).to(tl.float32)
        zero = tl.load(scale_at + 2 * g + 1, mask=keep, other=0.0).to(tl.float32)
        unit = tl.maximum(unit, tl.maximum(tl.abs(zero), tl.abs(zero + 15.0 * step)))
        inside = (d // (DIM // GROUPS) == g)[None, :]
        steps = tl.where(inside, step[:, None], steps)
        zeros = tl.where(inside, zero[:, None], zeros)
    inverse = (1.0 / tl.where(unit > 0, unit, 1.0))[:, None]
    return (codes.to(tl.float32) * (steps * inverse) + zeros * inverse).to(DTYPE), unit
