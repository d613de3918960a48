"""What a GPTQ step over one block of columns means, column by column."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GptqBlock:
    """B columns of a weight of N output channels, which lie `[columns, N]`: a step reads contiguous memory."""

    target: Tensor  # [B, N] fp32, the weights to approximate
    shifted: Tensor  # [B, N] fp32, target plus the sum over the columns before this block; overwritten
    unit: Tensor  # [B, B] fp32, unit upper triangular
    scales: Tensor  # [groups, N] fp32
    zeros: Tensor  # [groups, N] fp32
    group: Tensor  # [B] int64
    top: int  # the largest code


def gptq_block_reference(block: GptqBlock, codes: Tensor, residual: Tensor) -> None:
    """Choose the codes of a block's columns one after the other, each making up for the rounding of those before.

    The error to keep small is |(target - value) U|^2, U = unit * diagonal; its column c is zero for the real value
    target_c + sum_{i < c} (target_i - value_i) unit[i, c], which is rounded. Writes `codes [B, N]` uint8 and
    `residual [B, N]` fp32, target - value. On return `shifted` holds the rounding errors of the columns, real value -
    value.
    """
    shifted, unit = block.shifted, block.unit
    for column in range(block.target.shape[0]):
        scale, zero = block.scales[block.group[column]], block.zeros[block.group[column]]
        code = (shifted[column] / scale + zero + 0.5).floor_().clamp_(0, block.top)
        value = (code - zero).mul_(scale)
        codes[column] = code
        residual[column] = block.target[column] - value
        shifted[column + 1 :].addr_(unit[column, column + 1 :], residual[column])
        shifted[column] -= value
