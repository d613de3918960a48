"""Triton kernel that interleaves rows: attention's output for a product that reads it in another order.

A program reads a piece of eight rows and stores 16 bytes for each channel. Gathering 2 bytes from each row instead
takes a sector of 32 for each: 4,096 channels of 16 rows 0.9 us either way, 28,672 of them 5.5 us and here 2.6.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.interleaved_rows import TOGETHER, InterleavedRows
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

_BLOCK = 32  # channels of a program


@triton.jit(do_not_specialize=["M"])
def _interleave(
    x_ptr,  # [M, K]
    places_ptr,  # [K] int32
    out_ptr,  # [ceil(M / TOGETHER), K, TOGETHER]
    M,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    eight = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, TOGETHER)
    m = eight * TOGETHER + t
    places = tl.load(places_ptr + d, mask=d < K, other=0)  # derived from a weight, which no kernel of a step writes
    begin(OVERLAP)
    x = tl.load(x_ptr + m[:, None] * K + d[None, :], mask=(m < M)[:, None] & (d < K)[None, :], other=0.0)
    out = out_ptr + (eight * K + places)[:, None] * TOGETHER + t[None, :]
    tl.store(out, tl.trans(x), mask=(d < K)[:, None])


@on_device
def interleave(x: Tensor, places: Tensor) -> InterleavedRows:
    """`InterleavedRows.of` a contiguous `x` on a GPU."""
    m, k = x.shape
    interleaved = InterleavedRows.empty(m, k, like=x)
    eights = interleaved.data.shape[0]
    _interleave[(triton.cdiv(k, _BLOCK), eights)](
        x, places, interleaved.data, m, K=k, BLOCK=_BLOCK, TOGETHER=TOGETHER, num_warps=1, **overlap(x)
    )
    return interleaved
