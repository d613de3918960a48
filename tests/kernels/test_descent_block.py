"""The kernel of one block of coordinate descent against its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.descent_block import descent_block_launch
from hf_paged.kernels.descent_reference import descent_block_reference

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # elsewhere in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


EPS = torch.finfo(torch.float32).eps


def block_of(columns: int, n: int, bits: int, coupled: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient, coupling, scales, groups and codes of a block."""
    g = torch.Generator().manual_seed(columns + n)
    half = torch.randn(columns, 2 * columns, generator=g) * coupled
    coupling = (half @ half.t() / columns + 4 * torch.eye(columns)).to(DEVICE)
    gradient = (torch.randint(-160, 161, (columns, n), generator=g) / 16 + 1 / 128).to(DEVICE)
    scales = torch.full((3, n), 0.5, device=DEVICE)
    scales[1] = -1.0
    group = torch.randint(0, 3, (columns,), generator=g).to(DEVICE)
    codes = torch.randint(0, 2**bits, (columns, n), generator=g, dtype=torch.uint8).to(DEVICE)
    return gradient, coupling, scales, group, codes


def run(block: Callable[..., None], inputs: tuple[Tensor, ...], bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, codes and moves after `block`."""
    gradient, coupling, scales, group, codes = inputs
    left, chosen, moved = gradient.clone(), codes.clone(), torch.full_like(gradient, float("nan"))
    block(left, coupling, scales, group, 2**bits - 1, chosen, moved)
    return left, chosen, moved


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "n"), [(128, 40), (128, 16), (100, 5), (1, 1), (17, 33)])
def test_every_code_is_that_of_the_definition_where_fp32_is_exact(columns: int, n: int, bits: int) -> None:
    """Ragged columns and rows, groups in any order, a negative scale: with dyadic values and columns apart no sum
    rounds, so a neighbour's scale or another clamp would show."""
    inputs = block_of(columns, n, bits, 0.0)
    for a, e in zip(run(descent_block_launch, inputs, bits), run(descent_block_reference, inputs, bits)):
        assert torch.equal(a, e)


@pytest.mark.parametrize("block", [descent_block_launch, descent_block_reference])
def test_every_code_is_the_best_after_those_before_it_when_columns_are_coupled(block: Callable[..., None]) -> None:
    """Near a tie the order of sums decides, and then of all codes after: each is held against fp64 that follows the
    same moves. A sum of one term per column, each a product and an addition, errs by 2 EPS a column of all sizes.
    """
    inputs = block_of(128, 256 if DEVICE == "cuda" else 48, 4, 1.0)
    left, codes, moved = run(block, inputs, 4)
    gradient, coupling, old = inputs[0].double(), inputs[1].double(), inputs[4].double()
    scale = inputs[2].double()[inputs[3]]
    assert torch.equal(moved.double(), (codes.double() - old) * scale)
    assert (moved != 0).any(0).all()
    slack = 128 * 2 * EPS * (gradient.abs() + coupling.abs() @ moved.double().abs())
    assert ((gradient + coupling @ moved.double() - left).abs() <= slack).all()
    seen = gradient + coupling.tril(-1) @ moved.double()
    step = coupling.diagonal()[:, None] * scale
    best = old - seen / step + 0.5
    slack = slack / step.abs() + 4 * EPS * (best.abs() + 16)  # of the division, the product and two additions
    assert (codes >= (best - slack).floor().clamp(0, 15)).all()
    assert (codes <= (best + slack).floor().clamp(0, 15)).all()
