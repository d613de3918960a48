"""The device function that rotates a tile of rows as `kv_transform.hadamard` does, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_tile(x, BLOCK: tl.constexpr):
    """Each block of BLOCK channels of `x` `[ROWS, D]` fp32, D a multiple of BLOCK; BLOCK a power of two, 1: none.

    A stage adds and subtracts neighbours and puts the differences behind the sums, so the lowest bit of the channel
    becomes the highest; after one stage per bit all are where they were. Sums only: the order is the definition's.
    """
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    STAGES: tl.constexpr = BLOCK.bit_length() - 1
    if STAGES > 0:
        x = tl.reshape(x, [ROWS * D // BLOCK, BLOCK])
        for _ in tl.static_range(STAGES):
            even, odd = tl.split(tl.reshape(x, [ROWS * D // BLOCK, BLOCK // 2, 2]))
            pair = tl.join(even + odd, even - odd)
            x = tl.reshape(tl.permute(pair, (0, 2, 1)), [ROWS * D // BLOCK, BLOCK])
        x = tl.reshape(x * BLOCK**-0.5, [ROWS, D])
    return x
