"""Triton kernel of one GPTQ block: 128 columns chosen in one launch, not in 128 times six.

Bound by the chain of columns: a program holds all columns of ROWS output channels in registers, so a step waits for no
memory but one row of the triangular matrix, which every program reads and the cache holds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.gptq_reference import GptqBlock
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.rounding_ops import BLOCK

ROWS = 16  # output channels per program


@triton.jit(do_not_specialize=["columns"])
def gptq_block_kernel(
    target,  # [B, N] fp32
    shifted,  # [B, N] fp32, overwritten
    unit,  # [B, B] fp32, rows unit_stride apart
    scales,  # [groups, N] fp32
    zeros,  # [groups, N] fp32
    group,  # [B] int64
    codes,  # [B, N] uint8
    residual,  # [B, N] fp32
    N,
    columns,
    unit_stride,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_n = n < N
    column = tl.arange(0, BLOCK)
    tile_at = column[:, None] * N + n[None, :]
    in_tile = (column < columns)[:, None] & in_n[None, :]
    tile = tl.load(shifted + tile_at, mask=in_tile, other=0.0)
    for c in range(columns):
        at = n + c * N  # a block of 128 columns stays below 2 ** 31 elements
        g = tl.load(group + c)
        scale = tl.load(scales + g * N + n, mask=in_n, other=1.0)
        zero = tl.load(zeros + g * N + n, mask=in_n, other=0.0)
        wanted = tl.sum(tl.where(column[:, None] == c, tile, 0.0), axis=0)
        code = tl.floor(tl.div_rn(wanted, scale) + zero + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), TOP)
        value = (code - zero) * scale
        left = tl.load(target + at, mask=in_n, other=0.0) - value
        later = (column > c) & (column < columns)
        coupling = tl.load(unit + c * unit_stride + column, mask=later, other=0.0)
        tile += coupling[:, None] * left[None, :]
        tl.store(codes + at, code.to(tl.uint8), mask=in_n)
        tl.store(residual + at, left, mask=in_n)
        tl.store(shifted + at, wanted - value, mask=in_n)


@on_device
def gptq_block_launch(block: GptqBlock, codes: Tensor, residual: Tensor) -> None:
    """`gptq_block_reference` for at most BLOCK columns.

    The `[B, N]` and `[groups, N]` tensors are contiguous, `unit` has contiguous rows.
    """
    columns, n = block.target.shape
    for tensor in (block.target, block.shifted, block.scales, block.zeros, codes, residual):
        assert tensor.is_contiguous(), tensor.shape
    assert block.unit.stride(1) == 1 and block.unit.shape == (columns, columns), block.unit.shape
    gptq_block_kernel[(triton.cdiv(n, ROWS),)](
        block.target,
        block.shifted,
        block.unit,
        block.scales,
        block.zeros,
        block.group,
        codes,
        residual,
        n,
        columns,
        block.unit.stride(0),
        TOP=float(block.top),
        BLOCK=BLOCK,
        ROWS=ROWS,
        num_warps=1,
    )
