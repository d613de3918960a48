"""Rounding to nearest: grids, codes, extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.quant.grid import Grid, encode, fit
from hf_paged.quant.rtn import fit_columns, rtn, rtn_fp8
from hf_paged.quant.weight import dequantize


def weights(n: int, k: int) -> Tensor:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05
    w[0, 0], w[1, 3] = 2.0, -1.5  # outliers of both signs
    return w


def error_bound(scales: Tensor, group: Tensor) -> Tensor:
    """Half a step, and the scale's own rounding over the codes' reach."""
    return scales[group].t() * 0.5 * 1.001


@pytest.mark.parametrize("group_size", [-1, 32, 60, 100])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_value_is_within_half_a_step_of_an_asymmetric_grid(bits: int, group_size: int) -> None:
    """The zero point is rounded, too, so an extreme may be cut by another half step, and no more."""
    w = weights(7, 100)
    grid = Grid(bits=bits, group_size=group_size, sym=False, scales_dtype=torch.float32)
    q = rtn(w, grid)
    assert q.codes.max() <= grid.top and q.zeros is not None and q.zeros.max() <= grid.top
    assert q.scales.shape == (-(-100 // grid.group(100)), 7)
    step = q.scales[q.group_index()].t()
    wrong = (dequantize(q) - w).abs()
    assert (wrong <= 1.0001 * step).all() and (wrong <= 0.5001 * step).float().mean() > 0.95


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_symmetric_grid_has_no_zeros_and_cuts_half_a_step_at_most(bits: int) -> None:
    w = weights(7, 128)
    q = rtn(w, Grid(bits=bits, group_size=64, sym=True, scales_dtype=torch.float32))
    assert q.zeros is None
    assert ((dequantize(q) - w).abs() <= 0.5001 * q.scales[q.group_index()].t()).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_search_never_adds_error(bits: int, sym: bool, signed: bool) -> None:
    """The extremes are among what it tries; the error it minimises is the one that counts."""
    w = weights(16, 256)

    def error(grid: Grid) -> Tensor:
        q = rtn(w, grid)
        return (dequantize(q, torch.float32) - w).square().view(16, -1, 64).sum(2)

    plain = error(Grid(bits=bits, group_size=64, sym=sym))
    searched = error(Grid(bits=bits, group_size=64, sym=sym, mse=True, signed=signed))
    assert (searched <= plain * 1.001 + 1e-9).all() and searched.sum() < 0.98 * plain.sum()


def test_the_search_follows_the_importance_of_columns() -> None:
    """One column counts, so its error must become small at the others' cost."""
    w, importance = weights(8, 64), torch.full((64,), 1e-6)
    importance[5] = 1
    grid = Grid(bits=3, group_size=64, sym=False, mse=True)
    columns = w.t().contiguous()

    def error(importance: Tensor | None) -> Tensor:
        scales, zeros = fit_columns(columns, grid, importance)
        return ((encode(columns, scales, zeros, grid.top) - zeros) * scales - columns)[5].square().sum()

    assert error(importance) < 0.2 * error(None)


def test_signed_scales_hold_a_one_sided_group_exactly() -> None:
    """A symmetric grid has one more code below zero; with a negative scale constants of either sign lie on it."""
    w = torch.tensor([[0.5], [-0.25]]).expand(2, 64)
    q = rtn(w, Grid(bits=4, group_size=64, sym=True, mse=True, signed=True))
    assert torch.equal(dequantize(q, torch.float32), w)


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("mse", [False, True])
def test_zero_rows_stay_zero_with_a_scale_that_divides(sym: bool, mse: bool) -> None:
    q = rtn(torch.zeros(3, 64, dtype=torch.bfloat16), Grid(bits=4, group_size=32, sym=sym, mse=mse))
    assert (q.scales == 1).all() and (dequantize(q) == 0).all()


def test_tiny_weights_do_not_make_a_zero_scale_in_fp16() -> None:
    """bf16 weights reach below fp16's smallest step; a scale rounded to 0 would give NaN codes."""
    q = rtn(torch.full((2, 32), 1e-9, dtype=torch.bfloat16), Grid(bits=4, group_size=32, sym=False))
    assert torch.isfinite(dequantize(q)).all() and (q.scales > 0).all()


def test_codes_are_chosen_for_the_scale_as_it_is_stored() -> None:
    """With the unrounded scale 8-bit codes near the ends would be off by one."""
    w = weights(32, 128)
    q = rtn(w, Grid(bits=8, group_size=128, sym=False))
    assert q.zeros is not None
    index = q.group_index()
    scale, zero = q.scales.float()[index].t(), q.zeros.float()[index].t()
    assert torch.equal(q.codes.float(), (w / scale + zero + 0.5).floor().clamp(0, 255))


def test_gptq_v1_files_never_hold_a_zero_that_wraps() -> None:
    """They store zero - 1; readers that do not wrap would read 16 for 0."""
    w = weights(4, 64).abs()
    free = rtn(w, Grid(bits=4, group_size=32, sym=False))
    safe = rtn(w, Grid(bits=4, group_size=32, sym=False, lowest_zero=1))
    assert free.zeros is not None and safe.zeros is not None
    assert (free.zeros == 0).any() and (safe.zeros >= 1).all()
    assert (dequantize(safe, torch.float32) - w).abs().max() < 2 * safe.scales.max()


def test_large_groups_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on temporaries must not change the result."""
    from hf_paged.quant import grid as module

    values = weights(8, 256).t().reshape(4, 64, 8).contiguous()
    importance = torch.rand(4, 64)
    grid = Grid(bits=4, group_size=64, sym=False, mse=True)
    whole = fit(values, grid, importance)
    monkeypatch.setattr(module, "_ELEMENTS", 600)
    parts = fit(values, grid, importance)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_weights_are_refused_and_counted(value: float) -> None:
    w = weights(4, 64)
    w[2, :3] = value
    for quantize in (lambda: rtn(w, Grid(bits=4, group_size=32, sym=True)), lambda: rtn_fp8(w)):
        with pytest.raises(ValueError, match="weight holds 3 NaN or infinite values of 256"):
            quantize()


def test_weights_beyond_the_scales_dtype_are_refused() -> None:
    w = weights(4, 64).to(torch.bfloat16)
    w[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"weight reaches 9.99e\+05, expected at most 6.55e\+04 for torch.float16"):
        rtn(w, Grid(bits=4, group_size=32, sym=True))
    rtn(w, Grid(bits=4, group_size=32, sym=True, scales_dtype=torch.bfloat16))


@pytest.mark.parametrize("wrong", [{"bits": 5}, {"group_size": 0}, {"scales_dtype": torch.int8}, {"lowest_zero": 2}])
def test_a_grid_that_no_file_holds_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Grid(**{"bits": 4, "group_size": 32, "sym": True, **wrong})  # type: ignore[arg-type]


def test_fp8_is_within_half_a_step_per_channel() -> None:
    """e4m3 has a step of 2^-3 of a value's binade (2^-9 of the scale below 2^-6), so the error is half of it."""
    w = weights(16, 256)
    w[5] = 0
    codes, scale = rtn_fp8(w)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (16, 1) and scale[5] == 1
    assert codes.float().abs().amax(1)[[0, 1]].tolist() == [448.0, 448.0]
    bound = torch.maximum(w.abs() * 2.0**-4, scale * 2.0**-10) * 1.0001
    assert ((codes.float() * scale - w).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_codes_are_those_of_the_scale_that_the_file_holds(dtype: torch.dtype) -> None:
    """Small weights have subnormal fp16 scales: codes of the exact scale would all be off when read back.

    The smallest scale here is 55 steps of fp16's subnormals: rounded down it clips the largest value by less than half
    a step of its code.
    """
    w = weights(16, 256) * 1e-2
    codes, scale = rtn_fp8(w, dtype)
    assert torch.equal(scale.to(dtype).float(), scale)
    bound = torch.maximum(w.abs() * 2.0**-4, scale * 2.0**-10) * 1.0001
    assert ((codes.float() * scale - w).abs() <= bound).all()


def test_importance_of_a_short_last_group_stays_with_its_columns() -> None:
    w = weights(4, 70)
    importance = torch.linspace(1, 2, 70)
    grid = Grid(bits=4, group_size=32, sym=False, mse=True)
    scales, zeros = fit_columns(w.t().contiguous(), grid, importance)
    last = fit(w.t()[64:].contiguous()[None], grid, importance[None, 64:])
    assert torch.equal(scales[2], last[0][0]) and torch.equal(zeros[2], last[1][0])
