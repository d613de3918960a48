"""The kernel of one block of coordinate descent against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.descent_block import descent_block_launch
from hf_paged.kernels.descent_reference import descent_block_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(columns: int, n: int, bits: int, coupled: float) -> tuple[list[Tensor], list[Tensor]]:
    """Kernel and definition on the same block: gradient, codes and moves after it."""
    g = torch.Generator().manual_seed(columns + n)
    half = torch.randn(columns, 2 * columns, generator=g) * coupled
    coupling = (half @ half.t() / columns + 4 * torch.eye(columns)).to(DEVICE)
    gradient = (torch.randint(-160, 161, (columns, n), generator=g) / 16 + 1 / 128).to(DEVICE)
    scales = torch.full((3, n), 0.5, device=DEVICE)
    scales[1] = -1.0
    group = torch.randint(0, 3, (columns,), generator=g).to(DEVICE)
    codes = torch.randint(0, 2**bits, (columns, n), generator=g, dtype=torch.uint8).to(DEVICE)
    results = []
    for block in (descent_block_launch, descent_block_reference):
        left, chosen = gradient.clone(), codes.clone()
        moved = torch.full((columns, n), float("nan"), device=DEVICE)
        block(left, coupling, scales, group, 2**bits - 1, chosen, moved)
        results.append([left, chosen, moved])
    return results[0], results[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "n"), [(128, 40), (128, 16), (100, 5), (1, 1), (17, 33)])
def test_every_code_is_that_of_the_definition_where_fp32_is_exact(columns: int, n: int, bits: int) -> None:
    """Ragged columns and rows, groups in any order, a negative scale: with dyadic values and columns apart no sum
    rounds, so a neighbour's scale or another clamp would show."""
    actual, expected = run(columns, n, bits, 0.0)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


def test_codes_follow_the_definition_when_columns_are_coupled() -> None:
    """Rounding of the sums may turn a code near a tie, and then others after it in that row: few rows may."""
    actual, expected = run(128, 256 if DEVICE == "cuda" else 48, 4, 1.0)
    same = (actual[1] == expected[1]).all(0)
    assert (~same).float().mean() < 0.1
    assert (actual[2] != 0).float().mean() > 0.3
    assert torch.allclose(actual[0][:, same], expected[0][:, same], rtol=1e-4, atol=1e-3)
