"""The GPTQ block kernel against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.gptq_block import gptq_block_launch
from hf_paged.kernels.gptq_reference import GptqBlock, gptq_block_reference

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # elsewhere in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(columns: int, n: int, bits: int, coupling: float, step: float) -> tuple[list[Tensor], list[Tensor]]:
    """Kernel and definition on the same block; every value is a multiple of `step`."""
    g = torch.Generator().manual_seed(columns + n)

    def values(*shape: int, limit: int) -> Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=g).to(DEVICE, torch.float32) * step

    top = 2**bits - 1
    target = values(columns, n, limit=40)
    shifted = target + values(columns, n, limit=4)
    unit = (values(200, 200, limit=1) / step * coupling).triu(1) + torch.eye(200, device=DEVICE)
    unit = unit[:columns, :columns]  # a part of a larger matrix, as it is used
    scales = torch.full((3, n), 4 * step, device=DEVICE)
    scales[1] = -8 * step
    zeros = torch.randint(0, top + 1, (3, n), generator=g).to(DEVICE, torch.float32)
    group = torch.randint(0, 3, (columns,), generator=g).to(DEVICE)
    results = []
    for choose in (gptq_block_launch, gptq_block_reference):
        block = GptqBlock(
            target=target,
            shifted=shifted.clone(),
            unit=unit,
            scales=scales,
            zeros=zeros,
            group=group,
            top=top,
        )
        codes = torch.full((columns, n), 255, dtype=torch.uint8, device=DEVICE)
        residual = torch.full((columns, n), float("nan"), device=DEVICE)
        choose(block, codes, residual)
        results.append([block.shifted, codes, residual])
    return results[0], results[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "n"), [(128, 40), (128, 16), (100, 5), (1, 1), (17, 33)])
def test_every_code_is_that_of_the_definition_where_fp32_is_exact(columns: int, n: int, bits: int) -> None:
    """Ragged columns and rows, groups in any order, a negative scale. With dyadic values and no coupling of columns
    no sum rounds, so a tie broken differently or a neighbour's scale would show."""
    actual, expected = run(columns, n, bits, 0.0, 2.0**-6)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


def test_codes_follow_the_definition_when_columns_are_coupled() -> None:
    """Rounding of the sums may turn a code near a tie, and then all after it in that row: few rows may, and the sum of
    the errors must not change."""
    actual, expected = run(128, 256 if DEVICE == "cuda" else 48, 4, 0.0625, 2.0**-6 + 2.0**-13)
    turned = (actual[1] != expected[1]).any(0).float().mean()
    assert turned < 0.1, turned
    ours, theirs = actual[0].square().sum(), expected[0].square().sum()
    assert abs(ours / theirs - 1) < 0.02, (ours, theirs)
