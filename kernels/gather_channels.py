"""Triton kernel for x[:, order]: the channels of a row in another order.

For act-order weights whose input nobody writes in their order. Few rows are read in that order from memory, by many
programs; of many rows each is read once, by one, and its channels change places in shared memory. torch's
`index_select` takes three times as long there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

MAX_SIZE = 32768  # channels that a program can hold
_FEW_ROWS = 16
_BLOCK = 1024  # channels of a program with few rows


@triton.jit
def _gather_channels(
    x_ptr,  # [T, K]
    order_ptr,  # [K] int32
    out_ptr,  # [T, K]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # a program has a whole row
    OVERLAP: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * K
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    order = tl.load(order_ptr + d, mask=d < K, other=0)  # part of a weight, which no kernel of a step writes
    begin(OVERLAP)
    if WHOLE:
        y = tl.gather(tl.load(x_ptr + at + d, mask=d < K, other=0.0), order, 0)
    else:
        y = tl.load(x_ptr + at + order, mask=d < K, other=0.0)
    tl.store(out_ptr + at + d, y, mask=d < K)


@on_device
def gather_channels(x: Tensor, order: Tensor) -> Tensor:
    """`x[..., order]` on a GPU, `x` contiguous."""
    k = x.shape[-1]
    if k > MAX_SIZE or not x.is_contiguous():
        return x.index_select(-1, order)
    out = torch.empty_like(x)
    rows = x.numel() // k
    block = triton.next_power_of_2(k) if rows > _FEW_ROWS else _BLOCK
    _gather_channels[(rows, triton.cdiv(k, block))](
        x,
        order,
        out,
        K=k,
        BLOCK=block,
        WHOLE=rows > _FEW_ROWS,
        num_warps=min(max(block // 256, 1), 16),
        **overlap(x),
    )
    return out
