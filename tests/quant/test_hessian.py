"""Statistics of calibration inputs and their factor."""

from __future__ import annotations

import pytest
import torch

from hf_paged.quant import hessian as module
from hf_paged.quant.hessian import Hessian, permute_


def test_sums_do_not_depend_on_how_tokens_are_batched() -> None:
    x = torch.randn(6, 50, 24, generator=torch.Generator().manual_seed(0))
    whole, parts = Hessian(24), Hessian(24)
    whole.add(x)
    for row in x:
        parts.add(row)
    assert whole.tokens == parts.tokens == 300
    exact = x.double().view(-1, 24)
    assert torch.allclose(parts.matrix.double(), exact.t() @ exact, rtol=1e-4, atol=1e-3)
    assert torch.allclose(whole.matrix, parts.matrix, rtol=1e-4, atol=1e-3)
    assert torch.allclose(whole.mean_abs.double(), exact.abs().mean(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_summed_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    """65,504 is fp16's largest value: squares of ordinary activations over thousands of tokens pass it, and bf16 sums
    stop growing after a few hundred."""
    x = torch.full((4096, 8), 20.0, dtype=dtype, device=device)
    hessian = Hessian(8, device=device)
    hessian.add(x)
    assert torch.equal(hessian.matrix.cpu(), torch.full((8, 8), 4096 * 400.0))
    assert torch.equal(hessian.mean_abs.cpu(), torch.full((8,), 20.0))


@pytest.mark.parametrize("act_order", [False, True])
def test_the_factor_gives_back_the_damped_hessian(act_order: bool) -> None:
    x = torch.randn(400, 70, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 70)
    hessian = Hessian(70)
    hessian.add(x)
    expected = hessian.matrix.clone()
    expected.diagonal().add_(0.05 * expected.diagonal().mean())
    factor = hessian.factor(damping=0.05, act_order=act_order)
    if act_order:
        assert factor.order is not None
        assert torch.equal(factor.order, torch.argsort(expected.diagonal(), descending=True, stable=True))
        expected = expected[factor.order][:, factor.order]
    upper = factor.unit * factor.diagonal
    assert torch.equal(factor.unit, factor.unit.triu()) and torch.equal(factor.unit.diagonal(), torch.ones(70))
    assert torch.allclose(upper @ upper.t(), expected, rtol=1e-4, atol=1e-3)


def test_permuting_in_place_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRIP", 16)
    matrix, order = torch.randn(50, 50), torch.randperm(50)
    expected = matrix[order][:, order]
    permute_(matrix, order)
    assert torch.equal(matrix, expected)


def test_a_spent_hessian_says_so() -> None:
    hessian = Hessian(4)
    hessian.add(torch.randn(8, 4))
    hessian.factor()
    with pytest.raises(ValueError, match="consumed by factor"):
        hessian.factor()
    with pytest.raises(ValueError, match="consumed by factor"):
        hessian.add(torch.randn(8, 4))


def test_nan_activations_are_refused_before_the_factor() -> None:
    hessian = Hessian(4)
    x = torch.randn(8, 4)
    x[2, 2] = float("nan")
    hessian.add(x)
    with pytest.raises(ValueError, match="activations hold NaN or infinite"):
        hessian.factor()


def test_wrong_shapes_and_reference_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activations have 5 channels, expected 4"):
        Hessian(4).add(torch.randn(8, 5))
    with pytest.raises(ValueError, match="reference activations"):
        Hessian(4).add(torch.randn(8, 4), torch.randn(8, 4))
    with pytest.raises(ValueError, match="reference activations"):
        Hessian(4, asymmetric=True).add(torch.randn(8, 4))
    with pytest.raises(ValueError, match="reference activations are \\[7, 4\\]"):
        Hessian(4, asymmetric=True).add(torch.randn(8, 4), torch.randn(7, 4))
    for damping in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="damping is"):
            Hessian(4).factor(damping=damping)


def test_the_smallest_damping_still_factors_a_rank_one_hessian() -> None:
    """One direction holds all the energy: fp32 rounding alone would make the matrix indefinite."""
    x = torch.ones(64, 512) * torch.linspace(0.5, 50, 512)
    hessian = Hessian(512)
    hessian.add(x)
    factor = hessian.factor(damping=1e-9)
    assert torch.isfinite(factor.unit).all() and bool((factor.diagonal > 0).all())
