"""Packed weight -> plain 16- or 32-bit matrix, for the many-row products that cuBLAS serves best.

Bound by the write: one program per tile, every row of a slice is one contiguous store. The product is taken in fp32 and
rounded once. Meaning: `packed_weight.dequantize_reference` (channels in packed order; the caller gathers activations).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.packed_weight import PackedWeight, dequantize_reference
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
):
    tile, row = tl.program_id(0), tl.program_id(1)
    n = row * 64 + tl.arange(0, 64)
    in_n = n < N
    at = (row.to(tl.int64) * num_tiles + tile) * 1024
    words = in_channel_order(tl.load(packed + at + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]), 64)
    for j in tl.static_range(16 // BITS):
        k = tile * (512 // BITS) + j * 32 + tl.arange(0, 32)
        low = (words >> (BITS * j)) & ((1 << BITS) - 1)
        high = (words >> (BITS * j + 16)) & ((1 << BITS) - 1)
        value = tl.join(low, high).reshape(64, 32).to(tl.float32)
        keep = in_n[:, None] & (k[None, :] < K)
        offset = (k // group_size)[None, :] * N + n[:, None]
        zero = tl.load(zeros + offset, mask=keep, other=0).to(tl.float32) if HAS_ZEROS else MIDDLE
        scale = tl.load(scales + offset, mask=keep, other=0.0).to(tl.float32)
        at_out = out + n[:, None].to(tl.int64) * K + k[None, :]
        tl.store(at_out, ((value - zero) * scale).to(out.dtype.element_ty), mask=keep)


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
        num_warps=4,
    )
