"""Tokens that go into a step and that come out of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.step_tokens import input_tokens, likeliest_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_token_that_only_the_device_knows_is_taken_from_its_row() -> None:
    ids = torch.arange(300, device=DEVICE)
    ids[::3] = -1
    rows = torch.arange(300, device=DEVICE).flip(0)
    last = torch.arange(1000, 1300, device=DEVICE)
    assert torch.equal(input_tokens(ids, rows, last), torch.where(ids >= 0, ids, last[rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 8192, 20000])
def test_the_likeliest_token_is_the_lowest_of_equal_ones_and_its_row_keeps_it(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """Greedy tokens must not depend on whether a captured step or the sampler finds them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-9, 9, (5, vocab_size + 3), generator=generator).to(DEVICE, dtype)[:, :vocab_size]
    logits[1] = float("-inf")
    rows, last = torch.tensor([4, 0, 7, 5, 2], device=DEVICE), torch.full((9,), -1, device=DEVICE)
    tokens = likeliest_tokens(logits, rows, last)
    lowest = [row.index(max(row)) for row in logits.tolist()]
    assert tokens.tolist() == lowest
    assert [last[row].item() for row in rows] == lowest and (last == -1).sum() == 4


def test_a_logit_that_is_no_number_is_not_the_likeliest() -> None:
    """As in the sampler's kernel."""
    logits = torch.tensor([[0.0, float("nan"), 1.0]], device=DEVICE)
    row = torch.zeros(1, dtype=torch.long, device=DEVICE)
    assert likeliest_tokens(logits, row, row.clone()).tolist() == [2]
