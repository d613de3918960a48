"""GPTQ against the published algorithm written out column by column in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.quant.gptq import gptq
from hf_paged.quant.grid import Grid, encode
from hf_paged.quant.hessian import Factor, Hessian
from hf_paged.quant.rtn import fit_columns, rtn
from hf_paged.quant.weight import QuantizedWeight, dequantize

FOUR = Grid(bits=4, group_size=32, sym=False, scales_dtype=torch.float32)


def activations(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Correlated channels of very different size, as a layer's inputs are."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k, generator=g) + torch.randn(tokens, 8, generator=g) @ torch.randn(8, k, generator=g)
    return mixed * torch.exp(torch.randn(k, generator=g))


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def factor_of(x: Tensor, *, act_order: bool = False, damping: float = 0.01) -> Factor:
    hessian = Hessian(x.shape[1])
    hessian.add(x)
    return hessian.factor(act_order=act_order, damping=damping)


def gptq_of(
    weight: Tensor, factor: Factor, grid: Grid, *, static_groups: bool = False, asymmetry: float = 1.0
) -> tuple[QuantizedWeight, Tensor]:
    return gptq(factor.target(weight, asymmetry), factor, grid, static_groups=static_groups)


def output_error(x: Tensor, weight: Tensor, quantized: QuantizedWeight) -> Tensor:
    """`[N]`: squared output error of each channel."""
    return (x.double() @ (weight.double() - dequantize(quantized, torch.float64)).t()).square().sum(0)


def published_gptq(x: Tensor, weight: Tensor, grid: Grid, *, act_order: bool, static_groups: bool) -> QuantizedWeight:
    """Frantar et al. 2022, Algorithm 1, with the inverse's Cholesky factor, one column at a time."""
    w, h = weight.double().clone(), x.double().t() @ x.double()
    k, size = w.shape[1], grid.group(w.shape[1])
    h += 0.01 * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    order = torch.argsort(h.diagonal(), descending=True, stable=True) if act_order else torch.arange(k)
    w, h = w[:, order], h[order][:, order]
    inverse = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    scales, zeros = fit_columns(weight.t().contiguous(), grid)
    g_idx = torch.arange(k) // size
    group = g_idx[order] if static_groups else g_idx
    codes = torch.zeros_like(w)
    for c in range(k):
        if not static_groups and c % size == 0:
            fitted = fit_columns(w[:, c : c + size].float().t().contiguous(), grid)
            scales[c // size], zeros[c // size] = fitted[0][0], fitted[1][0]
        scale, zero = scales[group[c]].double(), zeros[group[c]].double()
        codes[:, c] = encode(w[:, c], scale, zero, grid.top)
        error = (w[:, c] - (codes[:, c] - zero) * scale) / inverse[c, c]
        w[:, c:] -= error[:, None] * inverse[c, c:]
    back = torch.argsort(order)
    return QuantizedWeight(
        codes=codes[:, back].to(torch.uint8),
        scales=scales,
        zeros=zeros.to(torch.uint8),
        g_idx=group[back].to(torch.int32),
        bits=grid.bits,
        group_size=size,
    )


@pytest.mark.parametrize("group_size", [32, 48, 128, 160, -1])
@pytest.mark.parametrize(("act_order", "static_groups"), [(False, False), (True, False), (False, True), (True, True)])
def test_codes_are_those_of_the_published_algorithm(act_order: bool, static_groups: bool, group_size: int) -> None:
    """288 columns are three blocks, the last short, and short last groups. A code near a tie may turn in fp32 and
    change the rest of its row; a wrong sign, order, group or update would change every row."""
    x, w = activations(900, 288), weights(24, 288)
    grid = Grid(bits=4, group_size=group_size, sym=False, scales_dtype=torch.float32)
    actual, _ = gptq_of(w, factor_of(x, act_order=act_order), grid, static_groups=static_groups)
    expected = published_gptq(x, w, grid, act_order=act_order, static_groups=static_groups)
    assert torch.equal(actual.group_index(), expected.group_index())
    same = (actual.codes == expected.codes).all(1)
    assert same.float().mean() > 0.5, same  # most rows; a wrong update leaves none
    assert torch.allclose(actual.scales[:, same], expected.scales[:, same], rtol=1e-3)
    ours, theirs = output_error(x, w, actual).sum(), output_error(x, w, expected).sum()
    assert abs(ours / theirs - 1) < 0.02, (ours, theirs)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [False, True])
def test_output_error_is_below_round_to_nearest(bits: int, sym: bool, act_order: bool) -> None:
    """Else the feedback between columns has the wrong sign or reaches the wrong columns."""
    x, w = activations(2000, 256), weights(32, 256)
    grid = Grid(bits=bits, group_size=64, sym=sym)
    ours, _ = gptq_of(w, factor_of(x, act_order=act_order), grid)
    assert output_error(x, w, ours).sum() < output_error(x, w, rtn(w, grid)).sum()


def test_reported_error_is_the_output_error_with_the_damping() -> None:
    """A report that says less than what happens would hide a bad layer."""
    x, w = activations(2000, 96), weights(16, 96)
    actual, error = gptq_of(w, factor_of(x), FOUR)
    wrong = w.double() - dequantize(actual, torch.float64)
    damping = 0.01 * x.double().square().sum(0).mean()
    expected = output_error(x, w, actual) + damping * wrong.square().sum(1)
    assert torch.allclose(error.double(), expected, rtol=1e-3)


def test_act_order_does_not_depend_on_how_channels_are_numbered() -> None:
    """Permuted inputs and weight columns must give the permuted result, bit for bit where no tie is near."""
    x, w = activations(900, 96), weights(16, 96)
    shuffle = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    plain, error = gptq_of(w, factor_of(x, act_order=True), FOUR)
    moved, moved_error = gptq_of(w[:, shuffle], factor_of(x[:, shuffle], act_order=True), FOUR)
    rows = (moved.codes == plain.codes[:, shuffle]).all(1)
    assert rows.float().mean() > 0.5  # most; another order of channels leaves none
    assert torch.equal(moved.group_index(), plain.group_index()[shuffle])
    assert torch.allclose(error.sum(), moved_error.sum(), rtol=0.02)


def test_static_groups_with_act_order_need_no_group_index() -> None:
    """The point of static groups: readers that know no g_idx, and groups that stay contiguous in memory."""
    x, w = activations(900, 96), weights(16, 96)
    static, _ = gptq_of(w, factor_of(x, act_order=True), FOUR, static_groups=True)
    moving, _ = gptq_of(w, factor_of(x, act_order=True), FOUR)
    assert static.g_idx is None and moving.g_idx is not None
    assert torch.equal(torch.bincount(moving.g_idx), torch.tensor([32, 32, 32]))
    expected = fit_columns(w.t().contiguous(), FOUR)
    assert torch.equal(static.scales, expected[0])


def test_a_short_last_group_and_rows_that_no_program_fills() -> None:
    x, w = activations(600, 200), weights(3, 200)
    for act_order in (False, True):
        actual, _ = gptq_of(w, factor_of(x, act_order=act_order), Grid(bits=4, group_size=128, sym=True))
        assert actual.scales.shape == (2, 3) and actual.codes.shape == (3, 200)
        assert torch.bincount(actual.group_index()).tolist() == [128, 72]


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    """q, k and v are quantized as one matrix or as three: the codes must be the same."""
    x, w = activations(900, 96), weights(40, 96)
    factor = factor_of(x)
    whole, error = gptq_of(w, factor, FOUR)
    part, part_error = gptq_of(w[8:24].contiguous(), factor, FOUR)
    same = (whole.codes[8:24] == part.codes).all(1)
    assert same.float().mean() > 0.9
    assert torch.allclose(error[8:24].sum(), part_error.sum(), rtol=0.02)


def test_channels_never_excited_are_rounded_to_nearest() -> None:
    """Setting them to zero, as published code does, breaks whatever the calibration text did not reach, and zeroes an
    expert that no token was sent to."""
    x, w = activations(900, 96), weights(16, 96)
    x[:, 40:48] = 0
    grid = Grid(bits=8, group_size=32, sym=True, scales_dtype=torch.float32)
    for act_order in (False, True):
        actual, _ = gptq_of(w, factor_of(x, act_order=act_order), grid, static_groups=True)
        assert torch.equal(actual.codes[:, 40:48], rtn(w, grid).codes[:, 40:48])
    nothing, error = gptq_of(w, factor_of(torch.zeros(5, 96)), FOUR)
    assert torch.equal(nothing.codes, rtn(w, FOUR).codes) and torch.isfinite(error).all()


def test_zero_and_constant_rows_come_back_exactly() -> None:
    """A scale of 0 would divide by zero, and constants are what pruned or tied rows look like."""
    x, w = activations(900, 96), weights(4, 96)
    w[0], w[1], w[2] = 0, 0.75, -0.5
    actual, error = gptq_of(w, factor_of(x), FOUR)
    values = dequantize(actual, torch.float32)
    assert torch.isfinite(values).all() and torch.isfinite(error).all()
    assert torch.allclose(values[:3], w[:3], atol=1e-6)


def test_more_channels_than_tokens_still_has_a_factor() -> None:
    """A rank-deficient Hessian: damping must make it definite."""
    x, w = activations(20, 256), weights(8, 256)
    actual, error = gptq_of(w, factor_of(x), FOUR)
    assert torch.isfinite(error).all()
    assert output_error(x, w, actual).sum() < output_error(x, w, rtn(w, FOUR)).sum()


def test_asymmetric_targets_lower_the_error_towards_the_full_precision_output() -> None:
    """The inputs have drifted; what counts is the distance to the output of the inputs that did not."""
    reference, w = activations(3000, 96), weights(24, 96)
    x = reference + 0.3 * activations(3000, 96, seed=7) * 0.5 + 0.05 * reference.roll(1, 1)
    hessian = Hessian(96, asymmetric=True)
    hessian.add(x, reference)
    aware, _ = gptq_of(w, hessian.factor(), FOUR)
    blind, _ = gptq_of(w, factor_of(x), FOUR)

    def distance(quantized: QuantizedWeight) -> Tensor:
        out = x.double() @ dequantize(quantized, torch.float64).t()
        return (reference.double() @ w.double().t() - out).square().sum()

    assert distance(aware) < distance(blind)
    hessian = Hessian(96, asymmetric=True)
    hessian.add(x, reference)
    off, _ = gptq_of(w, hessian.factor(), FOUR, asymmetry=0.0)
    assert torch.equal(off.codes, blind.codes)


@pytest.mark.parametrize("act_order", [False, True])
def test_the_asymmetric_target_is_the_best_real_weight(act_order: bool) -> None:
    reference, w = activations(900, 48), weights(6, 48)
    x = reference + 0.2 * activations(900, 48, seed=5)
    hessian = Hessian(48, asymmetric=True)
    hessian.add(x, reference)
    factor = hessian.factor(act_order=act_order)
    target = factor.target(w)
    wide, goal = x.double(), (reference - x).double() @ w.double().t()  # ridge regression of what is missing
    h = wide.t() @ wide
    h += 0.01 * h.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    best = w.double().t() + torch.linalg.solve(h, wide.t() @ goal)
    best = best if factor.order is None else best[factor.order]
    assert torch.allclose(target.double(), best, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    "grid", [Grid(bits=4, group_size=64, sym=False, mse=True), Grid(bits=3, group_size=-1, sym=True)]
)
def test_a_gpu_leaves_the_error_that_the_cpu_leaves(grid: Grid, act_order: bool) -> None:
    """Kernel, factor and 16-bit statistics together; codes near ties may differ, the error may not."""
    x, w = activations(4000, 384).half(), weights(200, 384).half()
    errors = {}
    for device in ("cpu", "cuda"):
        hessian = Hessian(384, device=device, asymmetric=True)
        hessian.add(x.to(device), x.roll(1, 0).to(device) * 0.05 + x.to(device))
        quantized, reported = gptq_of(w.to(device), hessian.factor(act_order=act_order), grid)
        errors[device] = float(reported.sum())
        assert quantized.codes.device.type == device
    assert abs(errors["cuda"] / errors["cpu"] - 1) < 0.02, errors
