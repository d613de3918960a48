"""act(gate) * up against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import reference_fused
from hf_paged.kernels.gated_activation import gated_activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def joined(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(0)) * 4
    x[0, : min(size, 8)] = torch.tensor([0.0, -0.0, 30.0, -30.0, 88.0, -88.0, 200.0, -200.0])[: min(size, 8)]
    return x.to(DEVICE, dtype)


def order_of(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.int32)


def check(gate: Tensor, up: Tensor, kind: str, order: Tensor | None = None) -> None:
    """fp32: an exponential or erf is off by a few 2^-23 of values up to 1, times gate and up. 16 bits: two roundings,
    each of which that may turn by one step."""
    actual, expected = gated_activation(gate, up, kind, order), reference_fused.gated_activation(gate, up, kind, order)
    if order is not None:
        gate, up = gate.index_select(-1, order), up.index_select(-1, order)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype and actual.is_contiguous()
    bound = (2.0**-20 * gate.double().abs() * up.double().abs()).clamp(min=1e-30)
    if gate.dtype != torch.float32:
        bound += 2 * torch.finfo(gate.dtype).eps * expected.double().abs() + torch.finfo(gate.dtype).tiny
    error = (actual.double() - expected.double()).abs()
    assert (error <= bound).all(), (error - bound).max()


# Triton's interpreter cuts fp32 to bf16 instead of rounding it, so bf16 is for the GPU
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_every_activation_on_the_halves_of_a_joined_projection(kind: str, dtype: torch.dtype) -> None:
    """Large magnitudes too: exp overflows in a careless sigmoid or tanh and gives NaN."""
    gate, up = joined(3, 96, dtype).chunk(2, -1)
    check(gate, up, kind)


def test_two_projections_and_leading_dimensions() -> None:
    x = joined(4, 1100, torch.float32).view(1, 4, 2, 1100)
    check(x[:, :, 1].contiguous(), x[:, :, 0], "silu")


def test_the_two_gelus_are_told_apart() -> None:
    gate = torch.linspace(-3, 3, 64, device=DEVICE)[None]
    one = torch.ones_like(gate)
    difference = gated_activation(gate, one, "gelu", None) - gated_activation(gate, one, "gelu_tanh", None)
    assert 2e-4 < difference.abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8192, 11008, 14336, 28672])
@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_real_sizes_on_the_gpu(rows: int, size: int, dtype: torch.dtype) -> None:
    check(*joined(rows, size, dtype).chunk(2, -1), "silu")
    check(*joined(rows, size, dtype).chunk(2, -1), "silu", order_of(size))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("size", [96, 1100])
def test_channels_in_the_order_of_the_weight_behind(size: int) -> None:
    """What an act-order down projection reads: one channel that changes places wrongly is a wrong model."""
    check(*joined(3, size, torch.float16).chunk(2, -1), "silu", order_of(size))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """A 32-bit row offset would wrap and read somebody else's rows."""
    rows, size = 66_000, 16384
    x = torch.zeros(rows, 2 * size, dtype=torch.bfloat16, device="cuda")
    x[-1] = 2.0
    gate, up = x.chunk(2, -1)
    out = gated_activation(gate, up, "silu", None)
    assert out[0].abs().max() == 0
    check(gate[-1:], up[-1:], "silu")
    torch.testing.assert_close(out[-1:], reference_fused.gated_activation(gate[-1:], up[-1:], "silu"))
