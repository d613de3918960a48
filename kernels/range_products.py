"""Triton kernel of AWQ's search: all ranges of a group tried on values that stay in registers.

In plain torch the levels of every range pass through memory a dozen times. The product with the Hessian keeps fp32's
precision on tensor cores: levels are whole numbers below 2 ** 11, which fp16 holds, and the Hessian comes in two fp16
halves of 22 bits together, raised by a power of two so that what is small beside its largest entry is not lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device

MOST_COLUMNS = 128  # of a group: the halves of its block fill shared memory
_ROWS = 16  # output channels per program
_WARPS = 4
_PROGRAMS = 512  # at least so many where there are as many ranges: a few for each multiprocessor


@triton.jit(do_not_specialize=["tried", "each"])
def range_products_kernel(
    values,  # [COLUMNS, N] fp32
    high,  # [COLUMNS, COLUMNS] fp16
    low,  # [COLUMNS, COLUMNS] fp16
    wanted,  # [COLUMNS, N] fp32
    scales,  # [tried, N] fp32
    zeros,  # [tried, N] fp32
    along,  # [tried, N] fp32
    square,  # [tried, N] fp32
    N,
    tried,
    each,  # ranges per program
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,  # COLUMNS, padded
    ROWS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_n = n < N
    column = tl.arange(0, BLOCK)
    in_column = column < COLUMNS
    tile_at = n[:, None] + column[None, :] * N
    in_tile = in_n[:, None] & in_column[None, :]
    value = tl.load(values + tile_at, mask=in_tile, other=0.0)
    want = tl.load(wanted + tile_at, mask=in_tile, other=0.0)
    block_at = column[:, None] * COLUMNS + column[None, :]
    in_block = in_column[:, None] & in_column[None, :]
    upper = tl.load(high + block_at, mask=in_block, other=0.0)
    lower = tl.load(low + block_at, mask=in_block, other=0.0)
    first = tl.program_id(1) * each
    for t in range(first, tl.minimum(first + each, tried)):
        at = t * N + n
        scale = tl.load(scales + at, mask=in_n, other=1.0)
        zero = tl.load(zeros + at, mask=in_n, other=0.0)[:, None]
        code = tl.floor(tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK))) + zero + 0.5)
        level = tl.minimum(tl.maximum(code, 0.0), TOP) - zero
        tl.store(along + at, tl.sum(level * want, axis=1), mask=in_n)
        exact = level.to(tl.float16)
        pushed = tl.dot(exact, upper, tl.dot(exact, lower))
        tl.store(square + at, tl.sum(level * pushed, axis=1), mask=in_n)


@on_device
def range_products_launch(
    values: Tensor, block: Tensor, wanted: Tensor, scales: Tensor, zeros: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """`range_reference.range_products_reference` with an `inverse` of ones, for at most MOST_COLUMNS columns."""
    columns, n = values.shape
    tried = len(scales)
    for tensor in (values, wanted, scales, zeros):
        assert tensor.is_contiguous(), tensor.shape
    assert columns <= MOST_COLUMNS and block.shape == (columns, columns), block.shape
    exponent = 15 - torch.frexp(block.abs().amax()).exponent
    raised = torch.ldexp(block, exponent)
    high = raised.half()
    low = (raised - high).half()
    along, square = torch.empty_like(scales), torch.empty_like(scales)
    tiles = triton.cdiv(n, _ROWS)
    each = triton.cdiv(tried, min(tried, triton.cdiv(_PROGRAMS, tiles)))
    range_products_kernel[(tiles, triton.cdiv(tried, each))](
        values,
        high,
        low,
        wanted,
        scales,
        zeros,
        along,
        square,
        n,
        tried,
        each,
        COLUMNS=columns,
        TOP=float(top),
        BLOCK=max(16, triton.next_power_of_2(columns)),
        ROWS=_ROWS,
        num_warps=_WARPS,
        num_stages=1,
    )
    return along, torch.ldexp(square, -exponent)
