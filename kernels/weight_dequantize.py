"""Packed weight -> plain 16- or 32-bit matrix, for the many-row products that cuBLAS serves best.

Bound by the write: one program per tile, whose rows are stored in one piece. The product is taken in fp32 and rounded
once. Meaning: `packed_weight.dequantize_reference` (channels in packed order; the caller gathers activations).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.packed_weight import PackedWeight, dequantize_reference, tile_k
from hf_paged.kernels.w4a16 import in_channel_order


@triton.jit(do_not_specialize=["num_tiles", "group_size"])
def dequantize_kernel(
    packed,  # [N / 64, K / TILE_K, 64, 16] int32
    scales,  # [groups, N]
    zeros,  # [groups, N] uint8, with HAS_ZEROS
    out,  # [N, K]
    N,
    K,
    num_tiles,
    group_size,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    RUN: tl.constexpr,  # channels that share a scale: a power of two that divides group and tile
):
    SLICES: tl.constexpr = 16 // BITS
    TILE_K: tl.constexpr = SLICES * 32
    tile, row = tl.program_id(0), tl.program_id(1)
    n, k = row * 64 + tl.arange(0, 64), tile * TILE_K + tl.arange(0, TILE_K)
    in_n = (n < N)[:, None]
    at = (row.to(tl.int64) * num_tiles + tile) * 1024
    words = in_channel_order(tl.load(packed + at + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]), 64)
    shifts = BITS * tl.arange(0, SLICES)[None, :, None, None] + 16 * tl.arange(0, 2)[None, None, None, :]
    codes = (words[:, None, :, None] >> shifts) & ((1 << BITS) - 1)  # [row, slice, pair, half]
    run = tile * TILE_K + RUN * tl.arange(0, TILE_K // RUN)
    offset, keep = (run // group_size)[None, :] * N + n[:, None], in_n & (run < K)[None, :]
    value = codes.reshape(64, TILE_K // RUN, RUN).to(tl.float32)
    if HAS_ZEROS:
        value -= tl.load(zeros + offset, mask=keep, other=0).to(tl.float32)[:, :, None]
    else:
        value -= MIDDLE
    value *= tl.load(scales + offset, mask=keep, other=0.0).to(tl.float32)[:, :, None]
    at_out = out + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(at_out, value.to(out.dtype.element_ty).reshape(64, TILE_K), mask=in_n & (k < K)[None, :])


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """`[N, K]` in `dtype`, channels in packed order."""
    if not weight.packed.is_cuda:
        return dequantize_reference(weight, dtype)
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.packed.device)
    dequantize_launch(weight, out)
    return out


@on_device
def dequantize_launch(weight: PackedWeight, out: Tensor) -> None:
    """Run the kernel into `out` `[N, K]` (any float dtype)."""
    rows, tiles = weight.packed.shape[:2]
    tile = tile_k(weight.field_bits)
    run = math.gcd(weight.group_size, tile)
    dequantize_kernel[(tiles, rows)](
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        weight.out_features,
        weight.in_features,
        tiles,
        weight.group_size,
        BITS=weight.field_bits,
        MIDDLE=weight.middle,
        HAS_ZEROS=weight.zeros is not None,
        RUN=run,
        num_warps=8 if run == tile else 4,
    )
