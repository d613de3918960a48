"""What a GPTQ step over one block of columns means, column by column.

Rows here are weight columns: everything lies `[columns, N]`, so a step reads contiguous memory.
"""

from __future__ import annotations

from torch import Tensor


def gptq_block_reference(
    target: Tensor,
    shifted: Tensor,
    unit: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group: Tensor,
    top: int,
    codes: Tensor,
    residual: Tensor,
) -> None:
    """Choose the codes of a block's columns one after the other, each making up for the rounding of those before.

    The error to keep small is |(target - value) U|^2, U = unit * diagonal; its column c is zero for the real value
    target_c + sum_{i < c} (target_i - value_i) unit[i, c], which is rounded.

    Args: `target [B, N]` fp32, the weights to approximate; `shifted [B, N]` fp32, target plus the sum over the columns
    before this block (overwritten); `unit [B, B]` fp32 unit upper triangular; `scales`, `zeros [groups, N]` fp32;
    `group [B]` int64; `top` the largest code. Writes `codes [B, N]` uint8 and `residual [B, N]` fp32, target - value.
    On return `shifted` holds the rounding errors of the columns, real value - value.
    """
    for column in range(target.shape[0]):
        scale, zero = scales[group[column]], zeros[group[column]]
        code = (shifted[column] / scale + zero + 0.5).floor_().clamp_(0, top)
        value = (code - zero).mul_(scale)
        codes[column] = code
        residual[column] = target[column] - value
        shifted[column + 1 :].addr_(unit[column, column + 1 :], residual[column])
        shifted[column] -= value
