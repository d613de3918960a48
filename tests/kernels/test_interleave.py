"""Rows with their channels in another order, the tokens of a channel side by side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.interleave import interleave
from hf_paged.kernels.interleaved_rows import InterleavedRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1100), (8, 96), (11, 256), (16, 64)])
def test_every_channel_goes_to_its_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sizes that fill no block, and eights of tokens that are not full."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    places = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    interleaved = interleave(x, places)
    assert interleaved.shape == x.shape and torch.equal(interleaved.rows[:, places.long()], x)
    assert torch.equal(interleaved.rows, InterleavedRows.of(x, places).rows)
