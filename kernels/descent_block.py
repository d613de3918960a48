"""Triton kernel of one block of coordinate descent: 128 columns moved in one launch, not in 128 times six.

Built as `gptq_block.py` is: a program holds the gradient of all columns of ROWS output channels in registers, so a step
waits for no memory but one row of `coupling`, which every program reads and the cache holds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.rounding_ops import BLOCK

ROWS = 16  # output channels per program


@triton.jit(do_not_specialize=["columns"])
def descent_block_kernel(
    gradient,  # [B, N] fp32, overwritten
    coupling,  # [B, B] fp32
    scales,  # [groups, N] fp32
    group,  # [B] int64
    codes,  # [B, N] uint8, replaced
    moved,  # [B, N] fp32
    N,
    columns,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_n = n < N
    column = tl.arange(0, BLOCK)
    tile_at = column[:, None] * N + n[None, :]
    in_tile = (column < columns)[:, None] & in_n[None, :]
    tile = tl.load(gradient + tile_at, mask=in_tile, other=0.0)
    for c in range(columns):
        at = n + c * N  # a block of 128 columns stays below 2 ** 31 elements
        scale = tl.load(scales + tl.load(group + c) * N + n, mask=in_n, other=1.0)
        old = tl.load(codes + at, mask=in_n, other=0).to(tl.float32)
        own = tl.load(coupling + c * columns + c)
        pull = tl.sum(tl.where(column[:, None] == c, tile, 0.0), axis=0)
        code = tl.floor(old - tl.div_rn(pull, own * scale) + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), TOP)
        step = (code - old) * scale
        row = tl.load(coupling + c * columns + column, mask=column < columns, other=0.0)
        tile += row[:, None] * step[None, :]
        tl.store(codes + at, code.to(tl.uint8), mask=in_n)
        tl.store(moved + at, step, mask=in_n)
    tl.store(gradient + tile_at, tile, mask=in_tile)


@on_device
def descent_block_launch(
    gradient: Tensor, coupling: Tensor, scales: Tensor, group: Tensor, top: int, codes: Tensor, moved: Tensor
) -> None:
    """`descent_reference.descent_block_reference` for at most BLOCK columns; all tensors are contiguous."""
    columns, n = gradient.shape
    for tensor in (gradient, coupling, scales, group, codes, moved):
        assert tensor.is_contiguous(), tensor.shape
    assert coupling.shape == (columns, columns), coupling.shape
    descent_block_kernel[(triton.cdiv(n, ROWS),)](
        gradient,
        coupling,
        scales,
        group,
        codes,
        moved,
        n,
        columns,
        TOP=float(top),
        BLOCK=BLOCK,
        ROWS=ROWS,
        num_warps=1,
    )
