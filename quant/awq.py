"""AWQ: scale up the input channels that matter before rounding, and clip what stretches a group's range.

Lin et al. 2023 (arXiv 2306.00978). Channel k of all linears that read one input is multiplied by s_k, and what produces
the input divided by it: the function stays, the relative rounding error of channel k shrinks. The candidates are
s = mean|x|^r / mean|w|^(1 - r) and s = mean|x|^r for r in (0, 1]; the one of least output error wins, s = 1 among them.

The output error over all calibration tokens is exact, tr(E H E^T) with the Hessian H of the inputs: no activation is
kept and no token sampled, where the published search runs the block on a few samples. `loss` measures something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_paged.quant.grid import Grid, encode, fit
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.rtn import check_weight, rtn
from hf_paged.quant.weight import dequantize

_RATIOS = 20  # exponents tried
_CLIPS = 10  # values tried for each end of a group's range, down to _SMALLEST of the whole
_SMALLEST = 0.55
_ELEMENTS = 2**24  # weights searched at a time: bounds the temporaries to a few times 64 MB

Loss = Callable[[list[Tensor]], float]


def awq_scales(
    weights: Sequence[Tensor],
    hessian: Hessian,
    grid: Grid,
    *,
    share: Tensor | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """`[K]` fp32: what to multiply the columns of `weights` (each `[N_i, K]`, all reading one input) by.

    `share [K]` int64: channels of the same number get the same scale (attention with fewer KV heads: several input
    channels of o_proj come from one row of v_proj). `loss` takes the weights as they would act after rounding, in place
    of `weights`, and returns the error, e.g. of the block's output. Raises ValueError for NaN weights, NaN activations
    and group sizes that do not divide K.
    """
    for weight in weights:
        check_weight(weight, grid.scales_dtype)
        check_divides(weight, grid)
    x = hessian.mean_abs
    if not torch.isfinite(x).all():
        raise ValueError("activations hold NaN or infinite values, expected finite ones")
    measure = loss or _output_error(weights, hessian)
    best = torch.ones_like(x)
    least = measure(_rounded(weights, best, grid))
    for scales in _candidates(x, _mean_weight(weights, grid), share):
        error = measure(_rounded(weights, scales, grid))
        if error < least:
            best, least = scales, error
    return best


def awq_clip(weight: Tensor, hessian: Hessian, grid: Grid) -> Tensor:
    """`[N, K]` clamped, each group to the range that makes the error of its own part of the output least.

    The two ends of an asymmetric grid's range are searched apart. `weight` and `hessian` are already scaled. Published
    AWQ leaves q_proj and k_proj alone: their product, not each output, is what counts. Raises as `awq_scales`.
    """
    check_weight(weight, grid.scales_dtype)
    check_divides(weight, grid)
    n, k = weight.shape
    size = grid.group(k)
    columns = weight.float().t().reshape(-1, size, n)
    blocks = hessian.matrix.view(k // size, size, k // size, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    step = max(1, _ELEMENTS // (size * n))
    parts = [
        _clipped(columns[at : at + step].contiguous(), blocks[at : at + step], grid)
        for at in range(0, columns.shape[0], step)
    ]
    return torch.cat(parts).view(k, n).t().to(weight.dtype)


def _clipped(groups: Tensor, blocks: Tensor, grid: Grid) -> Tensor:
    """`groups [groups, columns, N]` clamped; `blocks [groups, columns, columns]` are the Hessian's of each group."""
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    if grid.sym:
        high = torch.maximum(-low, high)
        low = -high
    shrinks = torch.linspace(1, _SMALLEST, _CLIPS).tolist()
    pairs = [(s, s) for s in shrinks] if grid.sym else [(s, t) for s in shrinks for t in shrinks]
    best_low, best_high, least = low, high, None
    for down, up in pairs:
        wrong = _round_groups(groups.clamp(low * down, high * up), grid) - groups
        error = (torch.bmm(blocks, wrong) * wrong).sum(1, keepdim=True)
        if least is None:
            least = error
        better = error < least
        least = torch.where(better, error, least)
        best_low = torch.where(better, low * down, best_low)
        best_high = torch.where(better, high * up, best_high)
    return groups.clamp(best_low, best_high)


def check_divides(weight: Tensor, grid: Grid) -> None:
    """Raise ValueError where the last group would be short, which AWQ files cannot hold."""
    k = weight.shape[1]
    if k % grid.group(k):
        raise ValueError(
            f"in_features {k} is no multiple of group_size {grid.group_size}, which AWQ cannot store: "
            "skip the layer or choose a smaller group size"
        )


def _candidates(x: Tensor, w: Tensor, share: Tensor | None) -> list[Tensor]:
    """Scales to try: `x`, `w` `[K]` are the mean magnitudes of activations and weights."""
    x, w = _alive(x), _alive(w)
    if share is not None:
        x, w = _shared(x, share), _shared(w, share)
    ratios = [step / _RATIOS for step in range(1, _RATIOS + 1)]
    raw = [x**ratio for ratio in ratios] + [x**ratio / w ** (1 - ratio) for ratio in ratios]
    return [scales / (scales.max() * scales.min()).sqrt() for scales in raw]


def _alive(mean: Tensor) -> Tensor:
    """Channels that were never excited count as average ones: their scale stays near 1."""
    alive = mean > 0
    if not bool(alive.any()):
        return torch.ones_like(mean)
    return torch.where(alive, mean, mean[alive].log().mean().exp())


def _shared(mean: Tensor, share: Tensor) -> Tensor:
    total = torch.zeros(int(share.max()) + 1, device=mean.device).index_add_(0, share, mean)
    return (total / torch.bincount(share).clamp(min=1))[share]


def _mean_weight(weights: Sequence[Tensor], grid: Grid) -> Tensor:
    """`[K]`: mean over the output channels of |w| relative to its group's largest."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for weight in weights:
        n, k = weight.shape
        groups = weight.float().abs().view(n, -1, grid.group(k))
        total += (groups / groups.amax(2, keepdim=True).clamp(min=1e-12)).sum(0).view(k)
        rows += n
    return total / rows


def _rounded(weights: Sequence[Tensor], scales: Tensor, grid: Grid) -> list[Tensor]:
    """The weights as they act after scaling, rounding and dividing what comes in."""
    return [dequantize(rtn(weight.float() * scales, grid), torch.float32) / scales for weight in weights]


def _output_error(weights: Sequence[Tensor], hessian: Hessian) -> Loss:
    def error(rounded: list[Tensor]) -> float:
        total = 0.0
        for actual, weight in zip(rounded, weights, strict=True):
            wrong = actual - weight.float()
            total += float(((wrong @ hessian.matrix) * wrong).sum())
        return total

    return error


def _round_groups(groups: Tensor, grid: Grid) -> Tensor:
    """`[groups, columns, N]` rounded to the nearest."""
    scales, zeros = (part[:, None] for part in fit(groups, grid))
    return (encode(groups, scales, zeros, grid.top) - zeros) * scales
