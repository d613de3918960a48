"""The meaning of a quantized weight, whatever file it came from.

    value[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n],   g = g_idx[k], or k // group_size when there is no g_idx

The product is rounded once, to the dtype of the scales: that is what AutoAWQ, AutoGPTQ, GPTQModel and llm-compressor
do, and what their published dequantized weights hold bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """Unpacked integers and their group parameters. A `zeros` of None is the midpoint `2 ** (bits - 1)` everywhere."""

    codes: Tensor  # [out_features, in_features] uint8
    scales: Tensor  # [groups, out_features] floating
    zeros: Tensor | None  # [groups, out_features] uint8
    g_idx: Tensor | None  # [in_features] int32, group of each input channel
    bits: int
    group_size: int  # input channels per group; the last group may be short

    def group_index(self) -> Tensor:
        """`[in_features]` int64: the group of each input channel."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.group_size


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """`[out_features, in_features]` weights in `dtype` (default: the dtype of the scales)."""
    index = weight.group_index()
    codes = weight.codes.to(weight.scales.dtype)
    if weight.zeros is None:
        centred = codes - 2 ** (weight.bits - 1)
    else:
        centred = codes - weight.zeros.to(codes.dtype)[index].t()
    values = centred * weight.scales[index].t()
    return values if dtype is None else values.to(dtype)
