"""GPTQ: codes chosen column by column, each column making up for the rounding of those before it.

Frantar et al. 2022 (arXiv 2210.17323), in the form of `hessian.py`: the columns of U take the place of the rows of the
inverse's Cholesky factor, nothing is inverted, and the codes are the same. Updates are lazy: within a block of 128
columns a kernel goes step by step (`kernels/gptq_block.py`), across blocks one matrix product brings in all before.

Cost: N K^2 multiply-adds in fp32 plus K^3 / 3 for the factor. Memory beside the factor: 17 bytes per weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.kernels.gptq_reference import GptqBlock
from hf_paged.kernels.rounding_ops import BLOCK, gptq_block
from hf_paged.quant.grid import Grid, fit
from hf_paged.quant.hessian import Factor
from hf_paged.quant.rtn import fit_columns, quantized
from hf_paged.quant.weight import QuantizedWeight


def gptq(target: Tensor, factor: Factor, grid: Grid, *, static_groups: bool = False) -> tuple[QuantizedWeight, Tensor]:
    """Finite weights `[K, N]` fp32 in the order of quantization, as `Factor.target` gives them, quantized for the
    inputs that `factor` has seen. Output channels are independent of each other.

    Groups are runs of columns in the order of quantization, their grids fitted when their turn comes, to the weights as
    corrected by then. `static_groups` fits all grids beforehand and keeps groups in the natural order, also with
    act-order, so that no `g_idx` is needed.

    Returns the weight and, per output channel, the squared output error summed over the calibration tokens `[N]` fp32
    (damping included; less the part that no weight could avoid when asymmetric).
    """
    k = len(target)
    groups, g_idx = _group_index(factor, grid, static_groups)
    work = _Work(target, factor, grid)
    if static_groups:
        work.fit_naturally()
    size = k if static_groups else grid.group(k)
    for start in range(0, k, size):
        stop = min(start + size, k)
        if not static_groups:
            work.fit_group(start // size, start, stop)
        for at in range(start, stop, BLOCK):
            work.choose(at, min(at + BLOCK, stop), groups)
    return work.result(g_idx)


def _group_index(factor: Factor, grid: Grid, static_groups: bool) -> tuple[Tensor, Tensor | None]:
    """The group of each column in the order of quantization `[K]` int64, and the file's `g_idx` where it needs one."""
    k = factor.unit.shape[0]
    natural = torch.arange(k, device=factor.unit.device) // grid.group(k)
    if factor.order is None or grid.group(k) == k:
        return natural, None
    if static_groups:
        return natural[factor.order], None
    g_idx = torch.empty_like(natural)
    g_idx[factor.order] = natural
    return natural, g_idx.to(torch.int32)


class _Work:
    """The state of one weight; every tensor is `[K, N]` or `[groups, N]`, in the order of quantization."""

    def __init__(self, target: Tensor, factor: Factor, grid: Grid) -> None:
        k, n = target.shape
        count = -(-k // grid.group(k))
        self.target, self.factor, self.grid = target, factor, grid
        self.codes = torch.empty((k, n), dtype=torch.uint8, device=target.device)
        self.residual = torch.empty_like(target)
        self.scales, self.zeros = target.new_empty((count, n)), target.new_empty((count, n))
        self.error = target.new_zeros(n)

    def fit_naturally(self) -> None:
        """All grids from the weights as they are, groups in the natural order."""
        order = self.factor.order
        weights, importance = self.target, self.factor.diagonal.square()
        if order is not None:
            back = torch.argsort(order)
            weights, importance = weights[back], importance[back]
        self.scales, self.zeros = fit_columns(weights, self.grid, importance)

    def fit_group(self, group: int, start: int, stop: int) -> None:
        """The grid of one group from its weights as corrected for all columns before it."""
        weights = self.target[start:stop]
        if start > 0:
            inner = self.factor.unit[start:stop, start:stop]
            pull = self._pull(start, stop)
            weights = weights + torch.linalg.solve_triangular(inner.t(), pull, upper=False, unitriangular=True)
        importance = self.factor.diagonal[start:stop].square()[None]
        scales, zeros = fit(weights[None], self.grid, importance)
        self.scales[group], self.zeros[group] = scales[0], zeros[0]

    def choose(self, start: int, stop: int, groups: Tensor) -> None:
        """The codes of columns start to stop, at most 128."""
        target = self.target[start:stop]
        shifted = target.clone() if start == 0 else target + self._pull(start, stop)
        block = GptqBlock(
            target=target,
            shifted=shifted,
            unit=self.factor.unit[start:stop, start:stop],
            scales=self.scales,
            zeros=self.zeros,
            group=groups[start:stop],
            top=self.grid.top,
        )
        gptq_block(block, self.codes[start:stop], self.residual[start:stop])
        self.error += self.factor.diagonal[start:stop].square() @ shifted.square_()

    def _pull(self, start: int, stop: int) -> Tensor:
        """What the residuals of all columns before `start` add to these columns."""
        return self.factor.unit[:start, start:stop].t() @ self.residual[:start]

    def result(self, g_idx: Tensor | None) -> tuple[QuantizedWeight, Tensor]:
        codes = self.codes
        if self.factor.order is not None:
            codes = torch.empty_like(codes).index_copy_(0, self.factor.order, codes)
        return quantized(codes, self.scales, self.zeros, g_idx, self.grid), self.error
