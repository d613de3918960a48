"""Coordinate descent: it lowers the error that it says it lowers, for every kind of file, and never adds any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.quant.awq import awq_round
from hf_paged.quant.descent import descend
from hf_paged.quant.gptq import gptq
from hf_paged.quant.grid import Grid
from hf_paged.quant.hessian import Factor, Hessian
from hf_paged.quant.rtn import rtn
from hf_paged.quant.weight import QuantizedWeight, dequantize


def inputs(k: int) -> Tensor:
    """Correlated, with outlier channels."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(600, k // 4, generator=g) @ torch.randn(k // 4, k, generator=g) + torch.randn(600, k, generator=g)
    x[:, ::17] *= 10
    return x


def factor_of(x: Tensor, *, act_order: bool = False) -> Factor:
    hessian = Hessian(x.shape[1])
    hessian.add(x)
    return hessian.factor(act_order=act_order)


def weights(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.05


def errors(x: Tensor, weight: QuantizedWeight, wanted: Tensor) -> Tensor:
    return (x @ (dequantize(weight, torch.float32) - wanted).t()).square().sum(0)


GRIDS = {
    "four": Grid(bits=4, group_size=32, sym=False, mse=True),
    "three, symmetric": Grid(bits=3, group_size=32, sym=True),
    "short last group": Grid(bits=4, group_size=100, sym=False),
    "one group": Grid(bits=2, group_size=-1, sym=False),
}


@pytest.mark.parametrize("order", ["natural", "static", "g_idx"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_gptq_leaves_something_to_gain_in_every_layout(grid: Grid, order: str) -> None:
    """Blocks cut groups, groups cut blocks, channels in and out of order: an index taken in the wrong order adds
    error. What is reported is what the file holds."""
    x, w = inputs(288), weights(24, 288)
    factor = factor_of(x, act_order=order != "natural")
    start, before = gptq(factor.target(w), factor, grid, static_groups=order == "static")
    found, after = descend(start, factor.target(w), factor, grid)
    assert (after <= before * 1.0001).all()
    assert after.sum() < before.sum()
    damped = factor.matrix() if factor.order is None else None
    if damped is not None:
        wrong = dequantize(found, torch.float32) - w
        assert torch.allclose(((wrong @ damped) * wrong).sum(1), after, rtol=2e-3)  # the file's weights are fp16
    assert errors(x, found, w).sum() < errors(x, start, w).sum()
    for name in ("zeros", "g_idx"):
        one, other = getattr(start, name), getattr(found, name)
        assert one is other or torch.equal(one, other)
    assert found.codes.dtype == torch.uint8 and found.codes.shape == (24, 288) and int(found.codes.max()) <= grid.top


def test_codes_rounded_to_nearest_become_better_than_those_of_gptq() -> None:
    """The feedback of later columns is what GPTQ lacks, and the order does not matter to it."""
    x, w = inputs(256), weights(32, 256)
    grid = Grid(bits=4, group_size=64, sym=False)
    factor = factor_of(x)
    ranges = awq_round(w, factor.matrix(), grid)
    found = descend(ranges, factor.target(w), factor, grid)[0]
    of_gptq = errors(x, gptq(factor.target(w), factor, grid)[0], w).sum()
    assert errors(x, found, w).sum() < of_gptq < errors(x, ranges, w).sum()


def test_a_drifted_input_is_made_up_for() -> None:
    """The target is that of the asymmetric Hessian, not the weight."""
    x, w = inputs(128), weights(16, 128)
    drifted = x + 0.3 * x.roll(1, dims=1)
    hessian = Hessian(128, asymmetric=True)
    hessian.add(drifted, x)
    factor = hessian.factor()
    grid = Grid(bits=4, group_size=32, sym=False)
    start, _ = gptq(factor.target(w), factor, grid)
    found, _ = descend(start, factor.target(w), factor, grid)

    def missed(weight: QuantizedWeight) -> float:
        return float((drifted @ dequantize(weight, torch.float32).t() - x @ w.t()).square().sum())

    assert missed(found) < missed(start)


def test_exact_weights_zero_weights_and_unseen_inputs_stay() -> None:
    grid = Grid(bits=4, group_size=32, sym=False)
    w = weights(8, 64)
    w[3] = 0
    start = rtn(w, grid)
    exact = dequantize(start, torch.float32)
    factor = factor_of(inputs(64))
    found, after = descend(start, factor.target(exact), factor, grid)
    assert torch.equal(found.codes, start.codes) and torch.equal(found.scales, start.scales)
    unseen = Hessian(64).factor()
    found, after = descend(start, unseen.target(w), unseen, grid)
    assert torch.isfinite(dequantize(found, torch.float32)).all() and torch.isfinite(after).all()
    assert (dequantize(found, torch.float32) - w).abs().max() <= 1.5 * (exact - w).abs().max()


def test_no_scale_beside_zero_points_turns_negative() -> None:
    """Inputs of nearly one direction: light groups would cancel what heavy ones got wrong; readers refuse the sign."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, generator=g) + 0.001 * torch.randn(300, 64, generator=g)
    w = torch.randn(32, 64, generator=g)
    w[:, 8:] *= 1e-3
    factor, grid = factor_of(x), Grid(bits=2, group_size=8, sym=False)
    start = awq_round(w, factor.matrix(), grid)
    found, _ = descend(start, factor.target(w), factor, grid)
    assert (found.scales > 0).all() and not torch.equal(found.scales, start.scales)
