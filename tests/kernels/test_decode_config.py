"""How decode attention is launched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import decode_config
from hf_paged.kernels.decode_config import choose_config
from hf_paged.kernels.layout import LayerKV, PlainPages, ScaledPages


@pytest.mark.parametrize(
    ("dtype", "group", "programs"), [(torch.int8, 1, 12), (torch.int8, 4, 8), (torch.bfloat16, 1, 8)]
)
def test_8_bit_heads_that_one_query_reads_are_shared_by_all_programs(
    dtype: torch.dtype, group: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen heads and twelve programs: eight of these could take two whole heads each."""
    monkeypatch.setattr(decode_config.decode_registers, "fits", lambda query, layer: True)
    monkeypatch.setattr(decode_config.decode_registers, "launch", lambda layer: (32, 168, 12))
    data = torch.zeros((1, 16, 32, 128), dtype=dtype)
    pages = PlainPages(data=data) if dtype == torch.bfloat16 else ScaledPages(codes=data, scale=data[..., 0].half())
    query = torch.zeros(1, 16 * group, 128, dtype=torch.bfloat16)
    assert choose_config(query, LayerKV(k=pages, v=pages), 1, 4096).programs == programs
