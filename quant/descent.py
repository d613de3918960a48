"""Coordinate descent: codes move one at a time to where the error of the whole output is least, scales follow them.

Behdin et al. 2023 (arXiv 2309.01885, "QuantEase"), from the codes that GPTQ or AWQ chose. A column is rounded once more
knowing what all others became, those after it too, which GPTQ cannot know. No step adds error: with everything else as
it is, the error is a parabola in one code, and in one group's scale.

The error is the squared length of R = E U, with E the weights' errors and U the factor of `hessian.py`: R is kept, the
gradient of a block is R times its rows of U, and no K x K matrix is needed beside the factor.

Cost: 2 N K^2 multiply-adds in fp32 per sweep. Memory beside the factor: 13 bytes per weight.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_paged.kernels.rounding_ops import BLOCK, descent_block
from hf_paged.quant.grid import Grid, stored
from hf_paged.quant.hessian import Factor
from hf_paged.quant.weight import QuantizedWeight

_ROUNDS = 2  # of codes, then scales
_SWEEPS = 2  # over all codes in a round


def descend(weight: QuantizedWeight, target: Tensor, factor: Factor, grid: Grid) -> tuple[QuantizedWeight, Tensor]:
    """`weight` with codes and scales nearer to `target [K, N]` fp32 (`Factor.target`) on what `factor` has seen.

    Zero points, groups and everything about the file stay. Returns the weight and, per output channel, the squared
    output error summed over the calibration tokens `[N]` fp32, damping included: at most that of `weight`.
    """
    work = _Descent(weight, target, factor, grid)
    for _ in range(_ROUNDS):
        for _ in range(_SWEEPS):
            work.move_codes()
        work.fit_scales()
    return work.result(), work.pushed.square().sum(0)


class _Descent:
    """The state of one weight; every tensor is `[K, N]` or `[groups, N]`, in the order of quantization."""

    def __init__(self, weight: QuantizedWeight, target: Tensor, factor: Factor, grid: Grid) -> None:
        self.weight, self.factor, self.grid = weight, factor, grid
        index = weight.group_index()
        self.group = index if factor.order is None else index[factor.order]
        self.codes = factor.ordered(weight.codes.t())
        self.scales = weight.scales.float()
        zeros = torch.full_like(self.scales, grid.middle) if weight.zeros is None else weight.zeros.float()
        self.zeros = zeros
        errors = ((self.codes - zeros[self.group]) * self.scales[self.group]).sub_(target)
        self.pushed = self._push(torch.arange(len(target), device=target.device), errors)  # R^T

    def move_codes(self) -> None:
        """Every code once."""
        k, n = self.codes.shape
        for start in range(0, k, BLOCK):
            stop = min(start + BLOCK, k)
            rows = self.factor.unit[start:stop, start:].triu() * self.factor.diagonal[start:]
            gradient, moved = rows @ self.pushed[start:], self.pushed.new_empty((stop - start, n))
            codes, group = self.codes[start:stop], self.group[start:stop]
            descent_block(gradient, rows @ rows.t(), self.scales, group, self.grid.top, codes, moved)
            self.pushed[start:].addmm_(rows.t(), moved)

    def fit_scales(self) -> None:
        """Every group's scale once: the one that suits its codes best, where the file's dtype has a better one."""
        for group in range(len(self.scales)):
            columns = (self.group == group).nonzero()[:, 0]
            along = self._push(columns, self.codes[columns] - self.zeros[group])
            slope, curve = (along * self.pushed).sum(0), along.square().sum(0)
            change = stored(self.scales[group] - slope / curve, self.grid) - self.scales[group]
            better = change * (2 * slope + change * curve) < 0  # false for NaN: all codes are zero
            if self.weight.zeros is not None:  # readers take a negative scale beside zero points for damage
                better &= self.scales[group] + change > 0
            change = torch.where(better, change, 0.0)
            self.scales[group] += change
            self.pushed.addcmul_(along, change)

    def _push(self, columns: Tensor, values: Tensor) -> Tensor:
        """`[K, N]`: U^T, only these `columns` of it, times `values [columns, N]`."""
        total = values.new_zeros(self.codes.shape)
        place = torch.arange(len(total), device=values.device)
        for some, part in zip(columns.split(BLOCK), values.split(BLOCK), strict=True):
            rows = torch.where(place >= some[:, None], self.factor.unit[some], 0.0)
            total.addmm_(rows.t(), part)
        return total.mul_(self.factor.diagonal[:, None])

    def result(self) -> QuantizedWeight:
        codes = self.codes
        if self.factor.order is not None:
            codes = torch.empty_like(codes).index_copy_(0, self.factor.order, codes)
        return replace(self.weight, codes=codes.t().contiguous(), scales=self.scales.to(self.weight.scales.dtype))
