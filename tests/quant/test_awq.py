"""AWQ's searches: what they must never make worse, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.kernels import range_reference
from hf_paged.quant import awq
from hf_paged.quant.awq import awq_round, awq_scales
from hf_paged.quant.grid import Grid
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.rtn import rtn
from hf_paged.quant.weight import dequantize

FOUR = Grid(bits=4, group_size=32, sym=False)


def layer(n: int = 48, k: int = 128) -> tuple[Tensor, Tensor, Hessian]:
    """Inputs of which a few channels are large, as a model's are; weights; their Hessian."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(800, k, generator=g)
    x[:, ::17] *= 30
    w = torch.randn(n, k, generator=g) * 0.05
    hessian = Hessian(k)
    hessian.add(x)
    return x, w, hessian


def acts_as(weight: Tensor, scales: Tensor) -> Tensor:
    return dequantize(rtn(weight * scales, FOUR), torch.float32) / scales


def channel_errors(x: Tensor, wrong: Tensor) -> Tensor:
    return (x @ wrong.t()).square().sum(0)


def output_error(x: Tensor, wrong: Tensor) -> float:
    return float(channel_errors(x, wrong).sum())


def test_scales_take_most_of_the_error_of_outlier_channels() -> None:
    x, w, hessian = layer()
    scales = awq_scales([w], hessian, FOUR)
    assert scales.shape == (128,) and bool((scales > 0).all())
    assert scales[::17].min() > scales[1::17].max()
    plain = output_error(x, rounded(w) - w)
    assert output_error(x, acts_as(w, scales) - w) < plain / 2  # most of it is gone


def rounded(weight: Tensor) -> Tensor:
    return dequantize(rtn(weight, FOUR), torch.float32)


def test_scales_are_one_where_no_scaling_helps() -> None:
    """Scaling is not free: weights that the grid holds exactly must be left alone."""
    _, w, hessian = layer()
    constant = torch.full_like(w, 0.5)
    constant[::2] = -1
    scales = awq_scales([constant], hessian, FOUR)
    assert torch.equal(scales, torch.ones(128))


def test_one_scale_serves_all_linears_that_read_the_input() -> None:
    _, w, hessian = layer()
    parts = [w[:16], w[16:]]
    assert torch.allclose(awq_scales(parts, hessian, FOUR), awq_scales([w], hessian, FOUR))


def test_channels_that_come_from_one_row_share_a_scale() -> None:
    """With fewer KV heads o_proj's scale is divided out of v_proj's rows, each feeding several channels."""
    _, w, hessian = layer()
    share = torch.arange(128) % 32
    scales = awq_scales([w], hessian, FOUR, share=share)
    assert torch.equal(scales, scales[:32].repeat(4)) and scales.unique().numel() > 4


def test_scales_compared_on_some_output_channels_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, hessian = layer(n=300)
    errors = []
    for rows in (300, 80):
        monkeypatch.setattr(awq, "_ROWS", rows)
        scales = awq_scales([w[:100], w[100:]], hessian, FOUR)
        found = awq_round(w * scales, hessian.matrix / scales / scales[:, None], FOUR)
        errors.append(channel_errors(x, dequantize(found, torch.float32) / scales - w))
    spread = float(errors[0].std() / errors[0].mean()) / 80**0.5  # standard error of what 80 channels say of the mean
    assert errors[1].mean() < (1 + 3 * spread) * errors[0].mean()


def test_channels_never_excited_keep_a_moderate_scale() -> None:
    """A scale near 0 would round their weights away, and a later text may excite them."""
    x, w, _ = layer()
    x[:, 7] = 0
    hessian = Hessian(128)
    hessian.add(x)
    scales = awq_scales([w], hessian, FOUR)
    assert torch.isfinite(scales).all()
    assert scales.min() <= scales[7] <= scales[::17].min()
    assert torch.equal(awq_scales([w], Hessian(128), FOUR), torch.ones(128))


@pytest.mark.parametrize("grid", [FOUR, Grid(bits=3, group_size=64, sym=True)], ids=["asymmetric", "symmetric"])
def test_searched_ranges_leave_every_output_channel_less_error(grid: Grid) -> None:
    x, w, hessian = layer()
    w[3, 40] = 1.0  # an outlier on a channel that is small
    before = w.clone()
    found = awq_round(w, hessian.matrix, grid)
    assert torch.equal(w, before)
    assert (found.zeros is None) == grid.sym and found.group_size == grid.group_size
    plain = channel_errors(x, dequantize(rtn(w, grid), torch.float32) - w)
    searched = channel_errors(x, dequantize(found, torch.float32) - w)
    assert (searched <= plain * 1.001).all()
    assert searched.sum() < plain.sum()


def test_groups_make_up_for_each_other() -> None:
    """All inputs have a common part: of the sum of errors that it sees one group can cancel another's."""
    w = layer()[1]
    x = torch.randn(800, 128, generator=torch.Generator().manual_seed(1)) + 3
    hessian = x.t() @ x
    apart = torch.block_diag(*(hessian[at : at + 32, at : at + 32] for at in range(0, 128, 32)))
    together, alone = (dequantize(awq_round(w, matrix, FOUR), torch.float32) for matrix in (hessian, apart))
    assert output_error(x, together - w) < output_error(x, alone - w)


def test_a_search_in_parts_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, w, hessian = layer()
    whole = awq_round(w, hessian.matrix, FOUR)
    together = awq_scales([w], hessian, FOUR)
    monkeypatch.setattr(range_reference, "_ELEMENTS", 3 * 32 * 48)
    monkeypatch.setattr(awq, "_BATCH", 3 * 48)
    assert torch.equal(awq_scales([w], hessian, FOUR), together)
    parts = awq_round(w, hessian.matrix, FOUR)
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)


@pytest.mark.gpu
def test_a_gpu_leaves_the_error_that_the_cpu_leaves() -> None:
    x, w, _ = layer()
    errors = {}
    for device in ("cpu", "cuda"):
        hessian = Hessian(128, device=device)
        hessian.add(x.to(device))
        scales = awq_scales([w.to(device)], hessian, FOUR)
        found = awq_round(w.to(device) * scales, hessian.matrix / scales / scales[:, None], FOUR)
        assert found.codes.device.type == scales.device.type == device
        errors[device] = output_error(x, (dequantize(found, torch.float32) / scales).cpu() - w)
    assert abs(errors["cuda"] / errors["cpu"] - 1) < 0.02, errors  # near ties are rounded apart


def test_weights_that_no_input_reaches_and_zero_weights_stay_finite() -> None:
    w = torch.zeros(8, 128)
    w[2] = torch.linspace(-1, 1, 128)
    found = dequantize(awq_round(w, torch.zeros(128, 128), FOUR), torch.float32)
    assert torch.isfinite(found).all() and (found - w).abs().max() < 0.5


def test_a_group_that_would_be_short_is_refused_by_name_of_the_size() -> None:
    _, w, hessian = layer()
    grid = Grid(bits=4, group_size=48, sym=False)
    for search in (lambda: awq_scales([w], hessian, grid), lambda: awq_round(w, hessian.matrix, grid)):
        with pytest.raises(ValueError, match="in_features 128 is no multiple of group_size 48, which AWQ cannot store"):
            search()


def test_broken_weights_and_activations_are_refused() -> None:
    x, w, hessian = layer()
    bad = w.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight holds 1 NaN"):
        awq_scales([w, bad], hessian, FOUR)
    x[5, 5] = float("inf")
    broken = Hessian(128)
    broken.add(x)
    with pytest.raises(ValueError, match="activations hold NaN or infinite"):
        awq_scales([w], broken, FOUR)


def test_a_weight_that_scaling_would_take_out_of_fp16_is_scaled_less() -> None:
    """Scales are compared on some rows; an outlier in another one made them win, and the whole run ended there."""
    _, w, hessian = layer(n=2000)
    w[1] = 6e4  # a row that is not compared
    scales = awq_scales([w], hessian, FOUR)
    awq_round(w * scales, hessian.matrix / scales / scales[:, None], FOUR)
