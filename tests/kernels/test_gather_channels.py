"""The channels of a row in another order."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.gather_channels import MAX_SIZE, gather_channels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1100), (2, 3, 96), (0, 64), (2, MAX_SIZE + 8)])
def test_every_channel_goes_to_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sizes that fill no block, no rows at all, and rows that no program holds."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    assert torch.equal(gather_channels(x, order), x[..., order.long()])
    if x.dim() == 2 and x.numel():
        assert torch.equal(gather_channels(x.t().contiguous().t(), order), x[..., order.long()])
