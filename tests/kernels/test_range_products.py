"""The kernel of AWQ's search of ranges against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.range_products import range_products_launch
from hf_paged.kernels.rounding_ops import range_products

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # elsewhere in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps


def group(columns: int, n: int, bits: int, tried: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values, Hessian, wanted changes, scales and zero points of one group; input channels of very unlike sizes."""
    g = torch.Generator().manual_seed(columns + n)
    x = torch.randn(300, columns, generator=g) * torch.exp(2 * torch.randn(columns, generator=g))
    values, wanted = torch.randn(2, columns, n, generator=g)
    scales = (torch.rand(tried, n, generator=g) + 0.5) * 4 / 2**bits
    zeros = torch.randint(0, 2**bits, (tried, n), generator=g).float()
    block = x.t() @ x
    return values.to(DEVICE), block.to(DEVICE), wanted.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE)


def assert_sums(sums: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], inverse: Tensor | float, bits: int) -> None:
    """Within the rounding of fp32: 2 EPS per term of all sizes, there being two products of halves. The halves together
    err by 2 ** -22 of an entry, and by 2 ** -39 of the largest where the lower one is subnormal."""
    values, block, wanted, scales, zeros = inputs
    columns = len(values)
    code = torch.floor(values / scales[:, None] + zeros[:, None] + 0.5).clamp(0, 2**bits - 1)
    level = (code - zeros[:, None]).double()
    slack = 2 * EPS * columns * (level.abs() * wanted.abs()).sum(1)
    assert ((sums[0] - (level * wanted.double()).sum(1)).abs() <= slack).all()
    pushed = level * inverse
    size = pushed.abs()
    slack = (2**-22 + 8 * EPS * columns) * (size * (block.abs().double() @ size)).sum(1)
    slack += 2**-39 * block.abs().max() * size.sum(1).square()
    assert ((sums[1] - (pushed * (block.double() @ pushed)).sum(1)).abs() <= slack).all()


@pytest.mark.parametrize(
    ("columns", "n", "bits", "tried"), [(128, 40, 4, 5), (96, 33, 3, 1), (32, 7, 8, 13), (8, 3, 2, 2), (128, 1, 8, 3)]
)
def test_both_sums_are_those_of_the_definition(columns: int, n: int, bits: int, tried: int) -> None:
    """Codes at another place, a row of the Hessian that is another's, or one half of it left out would show."""
    inputs = group(columns, n, bits, tried)
    assert_sums(range_products_launch(*inputs, 2**bits - 1), inputs, 1.0, bits)


def test_a_group_that_no_input_reaches_has_no_error_and_a_tiny_one_keeps_its_own() -> None:
    """The power of two that raises the Hessian is taken from its largest entry, which may be 0 or far from 1."""
    values, block, wanted, scales, zeros = group(32, 9, 4, 3)

    def square(factor: float) -> Tensor:
        return range_products_launch(values, block * factor, wanted, scales, zeros, 15)[1]

    assert (square(0) == 0).all()
    assert torch.allclose(square(2.0**-60) * 2.0**60, square(1), rtol=8 * EPS, atol=0)  # powers are not exact on GPUs
    assert torch.allclose(square(2.0**40) / 2.0**40, square(1), rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("each", [False, True], ids=["columns", "columns and output channels"])
def test_factors_of_the_inputs_go_into_the_hessian_of_either_form(each: bool) -> None:
    """A kernel whose levels are whole numbers cannot multiply them: its Hessian is, where that is the same."""
    values, block, wanted, scales, zeros = group(64, 5, 4, 4)
    inverse = torch.logspace(-1, 1, 64, device=DEVICE)[:, None]
    if each:
        inverse = inverse * torch.linspace(0.5, 2, 5, device=DEVICE)
    sums = range_products(values, inverse, block, wanted, scales, zeros, 15)
    assert_sums(sums, (values, block, wanted, scales, zeros), inverse.double(), 4)
