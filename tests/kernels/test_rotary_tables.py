"""Cosines and sines of positions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.rotary import rotary_tables_reference
from hf_paged.kernels.rotary_tables import rotary_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [64, 40])
def test_tables_equal_their_definition_up_to_the_last_positions_of_a_long_context(
    half: int, dtype: torch.dtype
) -> None:
    """A cosine of few bits is right near 0 and wrong at angles of 131,071."""
    frequencies = (1e4 ** (-torch.arange(half) / half)).to(DEVICE)
    positions = torch.tensor([[0, 1, 17, 4095, 131071]], device=DEVICE)
    expected = rotary_tables_reference(positions, frequencies, 1.2, dtype)
    step = 2.0**-20 if dtype == torch.float32 else torch.finfo(dtype).eps
    for actual, wanted in zip(rotary_tables(positions, frequencies, 1.2, dtype), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=step, atol=step)
