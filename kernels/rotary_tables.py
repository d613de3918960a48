"""Triton kernel for the cosines and sines of a step's positions, which every layer's RoPE reads: one launch for ten.

The angle is a product in fp32, its cosine and sine are those of the GPU's library, and the result is rounded once to
16 bits: what a Transformers model computes, up to the last bit of a cosine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap


@triton.jit
def _rotary_tables(
    cos_ptr,  # [T, 2 * HALF]
    sin_ptr,  # [T, 2 * HALF]
    positions_ptr,  # [T] int64
    frequencies_ptr,  # [HALF] fp32
    scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + d, mask=mask, other=0.0)
    cos = (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty)
    at = token * (2 * HALF) + d
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(cos_ptr + at + HALF, cos, mask=mask)
    tl.store(sin_ptr + at, sin, mask=mask)
    tl.store(sin_ptr + at + HALF, sin, mask=mask)


@on_device
def rotary_tables(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rotary.rotary_tables` on a GPU."""
    half = len(frequencies)
    cos = torch.empty((*positions.shape, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _rotary_tables[(positions.numel(),)](
        cos,
        sin,
        positions.contiguous(),
        frequencies,
        scale,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
        **overlap(cos),
    )
    return cos, sin
