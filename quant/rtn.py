"""Rounding to nearest: the baseline, and all that 8 bits need."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.quant.grid import Grid, encode, fit
from hf_paged.quant.weight import QuantizedWeight

FP8_MAX = 448.0  # largest e4m3


def rtn(weight: Tensor, grid: Grid) -> QuantizedWeight:
    """`[N, K]` rounded to the nearest point of each group's grid; the last group may be short.

    Raises ValueError for NaN, infinite or, in the scales' dtype, overflowing weights.
    """
    check_weight(weight, grid.scales_dtype)
    columns = weight.float().t().contiguous()
    scales, zeros = fit_columns(columns, grid)
    group = torch.arange(columns.shape[0], device=columns.device) // grid.group(columns.shape[0])
    codes = encode(columns, scales[group], zeros[group], grid.top)
    return quantized(codes, scales, zeros, None, grid)


def rtn_fp8(weight: Tensor, scales_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes e4m3 `[N, K]` and scales fp32 `[N, 1]` of one output channel each: weight = codes * scale.

    Scales are rounded to `scales_dtype`, the file's, before codes are chosen: an fp16 scale of small weights is a
    subnormal, percents off. An all-zero channel gets the scale 1. Raises ValueError for NaN or infinite weights.
    """
    check_weight(weight, torch.float32)
    values = weight.float()
    scale = (values.abs().amax(1, keepdim=True) / FP8_MAX).to(scales_dtype).float()
    scale = torch.where(scale == 0, 1.0, scale)
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fit_columns(columns: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zeros `[groups, N]` of consecutive groups of `columns [K, N]`.

    `importance [K]` weighs the columns' squared errors in the search of the range (`grid.mse`).
    """
    k, n = columns.shape
    size = grid.group(k)
    whole = k // size * size
    weights = None if importance is None else importance.float()
    parts = [
        fit(columns[at:to].view(-1, width, n), grid, None if weights is None else weights[at:to].view(-1, width))
        for at, to, width in ((0, whole, size), (whole, k, k - whole))
        if to > at
    ]
    return torch.cat([scales for scales, _ in parts]), torch.cat([zeros for _, zeros in parts])


def quantized(codes: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor | None, grid: Grid) -> QuantizedWeight:
    """The weight of `codes [K, N]`, `scales` and `zeros [groups, N]` held as floats."""
    return QuantizedWeight(
        codes=codes.to(torch.uint8).t().contiguous(),
        scales=scales.to(grid.scales_dtype),
        zeros=None if grid.sym else zeros.to(torch.uint8),
        g_idx=g_idx,
        bits=grid.bits,
        group_size=grid.group(codes.shape[0]),
    )


def check_weight(weight: Tensor, scales_dtype: torch.dtype) -> None:
    """Raise ValueError for a weight that no grid can hold."""
    if weight.ndim != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, expected floating [N, K]")
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(f"weight holds {bad} NaN or infinite values of {weight.numel()}, expected finite ones")
    largest, limit = float(weight.abs().max()), torch.finfo(scales_dtype).max
    if largest > limit:
        raise ValueError(f"weight reaches {largest:.3g}, expected at most {limit:.3g} for {scales_dtype} scales")
