"""The few-row product against `torch.nn.functional.linear`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.few_rows_linear import MAX_ROWS, FewRowsConfig, few_rows_linear
from hf_paged.kernels.fused_ops import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bf16, so bf16 is for the GPU
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
LAUNCHES = [
    None,
    FewRowsConfig(block_n=16, block_k=128, num_warps=4, num_stages=1),
    FewRowsConfig(block_n=32, block_k=64, num_warps=2, num_stages=4),
]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 96, 512), (1, 50, 300), (2, 50, 300), (7, 96, 512), (MAX_ROWS, 33, 260)]
)
def test_any_shape_is_the_linear_rounded_once(
    rows: int, n: int, k: int, bias: bool, dtype: torch.dtype, launch: FewRowsConfig | None
) -> None:
    """Products of 16-bit numbers are exact in fp32; k sums of them stray by k rounding steps at most, then one of 16
    bits. NaN beside the operands shows a row or column that was wrongly read."""
    generator = torch.Generator().manual_seed(rows * n)
    room = torch.full((rows + 1, k + 8), float("nan"), dtype=dtype, device=DEVICE)
    x, weights = room[:rows, :k], torch.full((n + 1, k + 8), float("nan"), dtype=dtype, device=DEVICE)
    x.copy_(torch.randn(rows, k, generator=generator))
    weight = weights[:n, :k].copy_(torch.randn(n, k, generator=generator))
    added = torch.randn(n, generator=generator).to(DEVICE, dtype) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    magnitude = torch.nn.functional.linear(x.double().abs(), weight.double().abs()) + 1
    actual = few_rows_linear(x, weight, added, launch)
    assert actual.shape == (rows, n) and actual.dtype == dtype
    step = torch.finfo(dtype).eps
    tolerance = step / 2 * expected.abs() * (1 + step) + k * 2.0**-24 * magnitude
    assert ((actual.double() - expected).abs() <= tolerance).all()


@pytest.mark.gpu
def test_operands_that_lie_transposed_go_to_torch() -> None:
    """The kernel reads neighbouring channels; what the definition takes must not end in an assertion."""
    x, weight = torch.randn(64, 4, device="cuda").half().t(), torch.randn(64, 32, device="cuda").half().t()
    for a, b in ((x, weight.contiguous()), (x.contiguous(), weight)):
        assert torch.equal(linear(a, b, None), torch.nn.functional.linear(a, b))


@pytest.mark.gpu
def test_rows_far_beyond_the_reach_of_32_bits_are_found() -> None:
    weight = torch.zeros(2**19 + 64, 4352, dtype=torch.float16, device="cuda")
    weight[-3] = 1.0
    x = torch.ones(1, 4352, dtype=torch.float16, device="cuda")
    out = few_rows_linear(x, weight, None)
    assert out[0, -3] == 4352 and out.count_nonzero() == 1
