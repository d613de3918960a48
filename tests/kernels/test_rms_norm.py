"""RMSNorm with residual and post-norm against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import reference_fused, rms_norm
from hf_paged.kernels.reference_fused import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts fp32 to bf16 instead of rounding it, so bf16 is for the GPU
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
FORMS = [(0.0, True), (0.0, False), (1.0, False)]  # Llama, GPT-OSS, Gemma


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(size: int, dtype: torch.dtype, form: tuple[float, bool], seed: int = 1) -> RMSNorm:
    return RMSNorm(weight=random(size, dtype=dtype, seed=seed), eps=1e-5, offset=form[0], cast_first=form[1])


def assert_close(actual: Tensor | None, expected: Tensor | None, roundings: int) -> None:
    """The sum of squares runs in another order: 2^-20 in fp32. That may turn each rounding to 16 bits by one step."""
    assert actual is not None and expected is not None
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    step = torch.finfo(expected.dtype).eps
    tolerance = 2.0**-20 if expected.dtype == torch.float32 else roundings * step
    error = (actual.double() - expected.double()).abs()
    assert (error <= tolerance * expected.double().abs() + 1e-7).all(), error.max()
    assert error.square().mean().sqrt() <= max(step / 8, 2.0**-22) * expected.double().square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_rounds_where_the_model_does(form: tuple[float, bool], dtype: torch.dtype) -> None:
    """Llama rounds before its weight multiplies, Gemma after: mixing them up costs a step in every element."""
    x = random(5, 96, dtype=dtype) * 30
    norm = norm_of(96, dtype, form)
    assert_close(rms_norm.rms_norm(x, norm), reference_fused.rms_norm(x, norm), 2)


@pytest.mark.parametrize("size", [8, 80, 2050])
def test_channels_in_the_order_of_the_weight_behind(size: int) -> None:
    """Act-order weights read the norm's channels in an order of theirs; the sum beside it keeps its own."""
    x, delta = (random(3, size, dtype=torch.float16, seed=seed) for seed in (0, 3))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.int32)
    norm = replace(norm_of(size, torch.float16, FORMS[0]), order=order)
    assert_close(rms_norm.rms_norm(x, norm), reference_fused.rms_norm(x, norm), 2)
    total, normed = rms_norm.add_rms_norm(delta, x, norm, None)
    assert torch.equal(total, x + delta)
    assert_close(normed, reference_fused.rms_norm(total, replace(norm, order=None)).index_select(-1, order), 2)


@pytest.mark.parametrize("size", [8, 80, 1000, 2050])
def test_any_row_length_and_leading_dimensions(size: int) -> None:
    x = random(2, 3, size, dtype=torch.float32)
    norm = norm_of(size, torch.float32, FORMS[0])
    assert_close(rms_norm.rms_norm(x, norm), reference_fused.rms_norm(x, norm), 1)


def test_rows_of_a_joined_projection_are_read_in_place_and_transposed_heads_are_right() -> None:
    joined = random(7, 3 * 64, dtype=torch.float32)
    norm = norm_of(64, torch.float32, FORMS[0])
    for x in (joined[:, 64:128], joined.view(1, 7, 3, 64).transpose(1, 2)):
        assert_close(rms_norm.rms_norm(x, norm), reference_fused.rms_norm(x, norm), 1)


def test_a_row_of_zeros_and_a_tiny_row_are_governed_by_eps() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-6)]).to(DEVICE)
    norm = norm_of(64, torch.float32, FORMS[0])
    assert_close(rms_norm.rms_norm(x, norm), reference_fused.rms_norm(x, norm), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("post", [None, FORMS[2]], ids=["plain", "post-norm"])
@pytest.mark.parametrize("norm", [None, FORMS[0]], ids=["sum-only", "norm"])
def test_the_residual_stream_is_the_rounded_sum_and_the_norm_reads_that(
    norm: tuple[float, bool] | None, post: tuple[float, bool] | None, dtype: torch.dtype
) -> None:
    delta, residual = random(5, 96, dtype=dtype, seed=2), random(5, 96, dtype=dtype, seed=3)
    after = None if norm is None else norm_of(96, dtype, norm)
    before = None if post is None else norm_of(96, dtype, post, seed=4)
    total, out = rms_norm.add_rms_norm(delta, residual, after, before)
    expected = reference_fused.add_rms_norm(delta, residual, after, before)[0]
    if before is None:
        assert torch.equal(total, expected)
    else:  # the post-norm is off by a rounding of its own size, about 3, and the sum may cancel
        step = max(torch.finfo(dtype).eps, 2.0**-21)
        torch.testing.assert_close(total, expected, rtol=step, atol=4 * step)
    assert (out is None) == (after is None)
    if after is not None:
        assert_close(out, reference_fused.rms_norm(total, after), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128, 2304, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 128, 2048])
def test_real_sizes_on_the_gpu(rows: int, size: int, dtype: torch.dtype) -> None:
    delta, residual = random(rows, size, dtype=dtype, seed=2), random(rows, size, dtype=dtype, seed=3)
    norm = norm_of(size, dtype, FORMS[0])
    total, out = rms_norm.add_rms_norm(delta, residual, norm, None)
    assert torch.equal(total, residual + delta)
    assert_close(out, reference_fused.rms_norm(total, norm), 2)
