"""Cosines and sines of a step's positions, which RoPE reads in every layer: a kernel on a GPU, else plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., 2 * half]` of `positions` `[...]` int64 at `frequencies` `[half]` fp32, each twice.

    Angles are fp32 products; what is multiplied by `scale` is rounded once to `dtype`.
    """
    if positions.is_cuda:
        from hf_paged.kernels.rotary_tables import rotary_tables as launch  # Triton exists on Linux only

        return launch(positions, frequencies, scale, dtype)
    return rotary_tables_reference(positions, frequencies, scale, dtype)


def rotary_tables_reference(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The definition."""
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
