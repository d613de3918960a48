"""Between the meaning of a weight and the tiles the kernels read, both ways and exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.kernels.packed_weight import TILE_N, PackedWeight, field_bits, pack_codes, packed_shape, unpack_codes
from hf_paged.quant.packing import row_pieces
from hf_paged.quant.weight import QuantizedWeight

_BANKS = 32  # of shared memory, two 16-bit channels in a word of each


def channel_order(g_idx: Tensor) -> Tensor:
    """`[K]` int64: the input channels by group, those of a group by their bank.

    Within a group the order is free. `layer_chain.cu` reads channels i, 8 + i, 16 + i, ... of a group at once: so up to
    eight of one bank do not meet. Two groups share a read, which takes 2.0 turns, by number of channel 3.4.
    """
    bank = torch.arange(len(g_idx), device=g_idx.device) // 2 % _BANKS
    return torch.argsort(g_idx.long() * _BANKS + bank, stable=True)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Sort the input channels by group (act-order) and cut the codes into tiles."""
    n, k = weight.codes.shape
    bits = field_bits(weight.bits)
    order = None if weight.g_idx is None else channel_order(weight.g_idx)
    packed = torch.empty(packed_shape(k, n, bits), dtype=torch.int32, device=weight.codes.device)
    step = row_pieces(n, k, TILE_N)
    for begin in range(0, n, step):
        codes = weight.codes[begin : begin + step]
        rows = slice(begin // TILE_N, (begin + step) // TILE_N)
        packed[rows] = pack_codes(codes if order is None else codes[:, order], bits)
    return PackedWeight(
        packed=packed,
        scales=weight.scales.contiguous(),
        zeros=weight.zeros,
        perm=None if order is None else order.to(torch.int32),
        field_bits=bits,
        code_bits=weight.bits,
        group_size=weight.group_size,
        in_features=k,
        out_features=n,
    )


def unpack(weight: PackedWeight) -> QuantizedWeight:
    """The inverse of `pack`: original channel order, with the `g_idx` that the order came from."""
    codes = unpack_codes(weight.packed, weight.field_bits, weight.in_features, weight.out_features)
    g_idx = None
    if weight.perm is not None:
        order = weight.perm.long()
        codes = torch.empty_like(codes).index_copy_(1, order, codes)
        sorted_groups = torch.arange(weight.in_features, device=order.device, dtype=torch.int32) // weight.group_size
        g_idx = torch.empty_like(sorted_groups).index_copy_(0, order, sorted_groups)
    return QuantizedWeight(
        codes=codes.contiguous(),
        scales=weight.scales,
        zeros=weight.zeros,
        g_idx=g_idx,
        bits=weight.code_bits,
        group_size=weight.group_size,
    )
