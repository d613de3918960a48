"""What a step of coordinate descent over one block of columns means, column by column.

Rows here are weight columns: everything lies `[columns, N]`, so a step reads contiguous memory.
"""

from __future__ import annotations

from torch import Tensor


def descent_block_reference(
    gradient: Tensor, coupling: Tensor, scales: Tensor, group: Tensor, top: int, codes: Tensor, moved: Tensor
) -> None:
    """Move the codes of a block's columns, one after the other, to where the output error is least for all others as
    they are.

    The error is tr(E H E^T), E the weights' errors. Column c of half its gradient, E H, says that the best real step
    is -gradient_c / H[c, c].

    Args: `gradient [B, N]` fp32, E H of these columns (overwritten: on return it is that after all steps); `coupling
    [B, B]` fp32, H of these columns; `scales [groups, N]` fp32; `group [B]` int64; `top` the largest code; `codes
    [B, N]` uint8, replaced. Writes `moved [B, N]` fp32, the change of the weights.
    """
    for column in range(codes.shape[0]):
        scale, old = scales[group[column]], codes[column].float()
        code = (old - gradient[column] / (coupling[column, column] * scale) + 0.5).floor_().clamp_(0, top)
        codes[column] = code
        moved[column] = (code - old).mul_(scale)
        gradient.addr_(coupling[column], moved[column])
