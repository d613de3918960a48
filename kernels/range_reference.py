"""What AWQ's search asks of every range that a group's weights may be rounded over.

Rows here are weight columns: everything lies `[columns, N]`, as in `gptq_reference.GptqBlock`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 2**22  # levels at a time: temporaries of 16 MB stay in a GPU's L2


def range_products_reference(
    values: Tensor, inverse: Tensor, block: Tensor, wanted: Tensor, scales: Tensor, zeros: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Two sums over the columns of a group, for each range tried and each output channel: what its levels have along
    the change that is wanted, and their square under the Hessian.

    The levels of a range are l = code - zero, the codes those nearest to the values. With p = l * inverse the sums are
    l . wanted and p . (block p); as sizes of a scale they say what error it leaves.

    Args: `values`, `wanted` `[columns, N]` fp32; `inverse [columns, N or 1]` fp32; `block [columns, columns]` fp32,
    symmetric; `scales`, `zeros` `[tried, N]` fp32; `top` the largest code. Returns `[tried, N]` fp32 twice.
    Scales are not 0: what a code of 0 / 0 becomes differs with the device.
    """
    along, square = [], []
    batch = max(1, _ELEMENTS // values.numel())
    for scale, zero in zip(scales.split(batch), zeros.split(batch), strict=True):
        levels = torch.floor(values / scale[:, None] + zero[:, None] + 0.5).clamp_(0, top).sub_(zero[:, None])
        along.append((levels * wanted).sum(1))
        levels.mul_(inverse)
        square.append((levels * (block @ levels)).sum(1))
    return torch.cat(along), torch.cat(square)
