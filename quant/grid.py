"""The grid a group of weights is rounded to: scale and zero point, and the codes on it.

    value = (code - zero) * scale,   code in [0, 2 ** bits),   zero the midpoint 2 ** (bits - 1) when symmetric

Here a weight lies as `[groups, columns, N]` (one scale per group and output channel): reductions over a group and the
steps of GPTQ are then over contiguous rows. Scales are rounded to the dtype of the file before a code is chosen, so
what is measured is what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHRINKS = 64  # ranges tried per group by the search, from the whole range down to _SMALLEST of it
_SMALLEST = 0.4
_ELEMENTS = 2**22  # values searched at a time: temporaries of 16 MB stay in a GPU's L2


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How integers and scales are chosen. `group_size` -1 is one group per output channel."""

    bits: int
    group_size: int
    sym: bool
    mse: bool = False  # search the range of least squared error instead of taking the extremes
    signed: bool = False  # let the search give a symmetric grid a negative scale: the side with one more code is chosen
    scales_dtype: torch.dtype = torch.float16
    lowest_zero: int = 0  # 1 for GPTQ v1 files: they store zero - 1, and old readers do not wrap it back

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise ValueError(f"bits is {self.bits}, expected 2, 3, 4 or 8")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}, expected -1 or at least 1")
        if self.scales_dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"scales_dtype is {self.scales_dtype}, expected float16, bfloat16 or float32")
        if self.lowest_zero not in (0, 1):
            raise ValueError(f"lowest_zero is {self.lowest_zero}, expected 0 or 1")

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 2 ** (self.bits - 1)

    def group(self, in_features: int) -> int:
        """Columns per group."""
        return in_features if self.group_size == -1 else min(self.group_size, in_features)


def fit(values: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zero points of groups of weights.

    Args: `values [groups, columns, N]` fp32; `importance [groups, columns]` fp32 weighs a column's squared error in the
    search. Returns scales and zeros `[groups, N]` fp32 (zeros integral), scales representable in the file's dtype.
    """
    step = max(1, _ELEMENTS // max(1, values.shape[1] * values.shape[2]))
    parts = [
        _fit(values[i : i + step], grid, None if importance is None else importance[i : i + step])
        for i in range(0, values.shape[0], step)
    ]
    return torch.cat([scales for scales, _ in parts]), torch.cat([zeros for _, zeros in parts])


def encode(values: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
    """The nearest codes, as floats. Ties go up, in the kernel too."""
    return torch.floor(values / scales + zeros + 0.5).clamp_(0, top)


def _fit(values: Tensor, grid: Grid, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    low, high = values.amin(1).clamp_(max=0), values.amax(1).clamp_(min=0)
    if not grid.mse:
        return parameters(low, high, grid)
    scales, zeros = _candidates(low, high, grid)
    batch = max(1, _ELEMENTS // values.numel())
    parts = zip(scales.split(batch), zeros.split(batch))
    errors = torch.cat([_error(values, *part, grid.top, importance) for part in parts])
    best = errors.argmin(0, keepdim=True)
    return scales.gather(0, best)[0], zeros.gather(0, best)[0]


def _candidates(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales and zeros `[candidates, groups, N]` of the range `[low, high]` and of smaller ones."""
    shrinks = torch.linspace(1, _SMALLEST, _SHRINKS, device=low.device)[:, None, None]
    scales, zeros = parameters(low * shrinks, high * shrinks, grid)
    if grid.sym and grid.signed:
        reach = torch.maximum(-low, high) * shrinks / grid.middle  # the code 0 at one end of the range, or the other
        scales = torch.cat([scales, stored(reach, grid), stored(-reach, grid)])
        zeros = zeros.repeat(3, 1, 1)
    return scales, zeros


def parameters(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The grid over `[low, high]` (which holds 0)."""
    if grid.sym:
        scales = stored(torch.maximum(-low, high) * (2 / grid.top), grid)
        return scales, torch.full_like(scales, grid.middle)
    scales = stored((high - low) / grid.top, grid)
    return scales, torch.round(-low / scales).clamp_(grid.lowest_zero, grid.top)


def stored(scales: Tensor, grid: Grid) -> Tensor:
    """As the file will hold them. A scale of 0, of an all-zero group, becomes 1, so that a reader may divide by it."""
    rounded = scales.to(grid.scales_dtype).float()
    return torch.where(rounded == 0, 1.0, rounded)


def _error(values: Tensor, scales: Tensor, zeros: Tensor, top: int, importance: Tensor | None) -> Tensor:
    """`[candidates, groups, N]`: squared error of rounding `values [groups, columns, N]` to each grid."""
    scales, zeros = scales[:, :, None], zeros[:, :, None]
    error = encode(values, scales, zeros, top).sub_(zeros).mul_(scales).sub_(values).square_()
    if importance is not None:
        error.mul_(importance[:, :, None])
    return error.sum(2)
