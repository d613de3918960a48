"""The waste that `bench memory` prints is what whole blocks cost, and nothing that the scheduler adds to it."""

from __future__ import annotations

import pytest

from hf_paged.eval.memory import BLOCK_SIZES, dense_waste, paged_waste

LENGTHS = (5, 17, 32, 100, 255)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("new_tokens", [1, 40])
def test_no_block_is_held_that_no_token_of_its_request_needs(block_size: int, new_tokens: int) -> None:
    """Blocks allocated ahead of their tokens, or kept when a request has ended, would show."""
    steps = [[length + t for length in LENGTHS] for t in range(new_tokens)]  # tokens in the cache; the last is not
    held = [sum(-(-length // block_size) * block_size for length in lengths) for lengths in steps]
    waste = paged_waste(LENGTHS, new_tokens, block_size)
    assert (waste.run_slots, waste.run_unused) == (sum(held), sum(held) - sum(map(sum, steps)))
    assert waste.peak_slots == max(held)
    assert waste.peak_unused < block_size * len(LENGTHS)


def test_a_dense_cache_pads_every_row_to_the_longest() -> None:
    waste = dense_waste((3, 5), 2)
    assert (waste.run_slots, waste.run_unused) == (10 + 12, 2 + 2)
    assert (waste.peak_slots, waste.peak_unused) == (12, 2)
