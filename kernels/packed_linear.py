"""y = x W^T + b from a packed weight: which path computes it.

On CUDA up to `MAX_FUSED_ROWS` rows read the packed words once (`w4a16`, any GPU and width), on Hopper up to 2,048 or
4,096 rows of 4-bit weights (`w4a16_hopper`); beyond that, and for fp32 activations or groups that no kernel cuts, the
weight is dequantized and cuBLAS multiplies. Off CUDA the definition runs.
`packed_linear` is also a registered operator, so `torch.compile` sees one opaque node and CUDA graphs capture its
launches; no path synchronises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels.on_device import multiprocessors, shared_memory
from hf_paged.kernels.packed_weight import SLICE, PackedWeight, packed_linear_reference, tile_k
from hf_paged.kernels.w4a16_hopper_tiles import choose_hopper_tiles, hopper_rows
from hf_paged.kernels.w4a16_tiles import Tiles, choose_tiles

MAX_FUSED_ROWS = 128  # above, cuBLAS on dequantized weights is faster (`eval/weights_bench.py`)


def fits_kernel(bits: int, group_size: int, in_features: int) -> bool:
    """Whether the fused kernel can cut groups of this size: whole rows, or 32-channel slices that align with its
    tiles.
    """
    step = tile_k(bits)
    return group_size >= in_features or group_size % step == 0 or (step % group_size == 0 and group_size % SLICE == 0)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, locks: Tensor) -> Tensor:
    """`[M, K]` -> `[M, N]` in the dtype of `x`. `locks`: int32 zeros of `lock_count(N)` elements, left zero.

    Products that run at the same time, on several streams, need locks of their own: one module is for one stream.
    """
    if torch.compiler.is_compiling():
        return torch.ops.hf_paged.packed_linear(
            x,
            weight.packed,
            weight.scales,
            weight.zeros,
            weight.perm,
            bias,
            locks,
            weight.field_bits,
            weight.code_bits,
            weight.group_size,
            weight.in_features,
            weight.out_features,
        )
    return _packed_linear(x, weight, bias, locks)


def lock_count(out_features: int) -> int:
    """Of the portable kernel one per output block of a split-K launch, 64 rows of the weight by up to four blocks of
    activations; of the Hopper kernels one per program and warpgroup, fewer than 1,024 together.
    """
    return max(-(-out_features // 64) * 4, 1024)


def _packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, locks: Tensor) -> Tensor:
    if not x.is_cuda:
        return packed_linear_reference(x, weight, bias)
    # imported at first use: a machine without CUDA needs no Triton
    from hf_paged.kernels.w4a16_hopper import fits_hopper, w4a16_hopper

    rows = x.shape[0]
    if 0 < rows <= hopper_rows(weight.in_features) and fits_hopper(x, weight):
        tiles = choose_hopper_tiles(rows, weight.out_features, weight.in_features, multiprocessors(x.device))
        return w4a16_hopper(x.contiguous(), weight, bias, locks, tiles)
    fits = fits_kernel(weight.field_bits, weight.group_size, weight.in_features)
    if rows <= MAX_FUSED_ROWS and x.dtype in (torch.float16, torch.bfloat16) and fits:
        from hf_paged.kernels.w4a16 import w4a16

        return w4a16(x.contiguous(), weight, bias, locks, _tiles(rows, weight))
    from hf_paged.kernels.gather_channels import gather_channels
    from hf_paged.kernels.weight_dequantize import dequantize

    gathered = x if weight.perm is None else gather_channels(x, weight.perm)
    return torch.nn.functional.linear(gathered, dequantize(weight, x.dtype), bias)


def _tiles(rows: int, weight: PackedWeight) -> Tiles:
    """Of the portable kernel's launch."""
    device = weight.packed.device
    return choose_tiles(
        rows,
        weight.out_features,
        weight.packed.shape[-3],
        multiprocessors(device),
        tile_k=tile_k(weight.field_bits),
        shared_memory=shared_memory(device),
    )


def expert_rows_linear(x: Tensor, weight: PackedWeight, expert_ids: Tensor, top_k: int) -> Tensor | None:
    """`[rows / top_k, K]` -> `[rows, N]`, row r through expert `expert_ids[r]` in one launch; None where no kernel
    fits.
    """
    fits = fits_kernel(weight.field_bits, weight.group_size, weight.in_features)
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16) or not fits:
        return None
    from hf_paged.kernels.w4a16 import w4a16_experts

    return w4a16_experts(x.contiguous(), weight, expert_ids, top_k, _tiles(1, weight))


def _packed_linear_op(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    locks: Tensor,
    *sizes: int,
) -> Tensor:
    weight = PackedWeight(
        packed=packed,
        scales=scales,
        zeros=zeros,
        perm=perm,
        **dict(zip(("field_bits", "code_bits", "group_size", "in_features", "out_features"), sizes)),
    )
    return _packed_linear(x, weight, bias, locks)


def _packed_linear_fake(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], others[-1]))


if not hasattr(torch.ops.hf_paged, "packed_linear"):  # else this is a second import of the package
    _library = torch.library.Library("hf_paged", "FRAGMENT")  # not custom_op: that would import the compiler with us
    _library.define(
        "packed_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? perm, Tensor? bias, "
        "Tensor locks, int field_bits, int code_bits, int group_size, int in_features, int out_features) -> Tensor"
    )
    _library.impl("packed_linear", _packed_linear_op, "CompositeExplicitAutograd")
    torch.library.register_fake("hf_paged::packed_linear", _packed_linear_fake, lib=_library)
    vars(torch.ops.hf_paged)["library"] = _library  # an operator goes with its library, and this module may go first
