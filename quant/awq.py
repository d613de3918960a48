"""AWQ: scale up the input channels that matter before rounding, and round over ranges searched by output error.

Lin et al. 2023 (arXiv 2306.00978). Channel k of all linears that read one input is multiplied by s_k, and what produces
the input divided by it: the function stays, the relative rounding error of channel k shrinks. The candidates are
s = mean|x|^r / mean|w|^(1 - r) and s = mean|x|^r for r in (0, 1]; the one of least output error wins, s = 1 among them.

The output error over all calibration tokens is exact, tr(E H E^T) with the Hessian H of the inputs: no activation is
kept and no token sampled, where the published search runs the block on a few samples. Output channels have errors of
their own, so scales are compared on some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_paged.kernels.rounding_ops import range_products
from hf_paged.quant.grid import Grid, encode, parameters, stored
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.rtn import check_weight, quantized
from hf_paged.quant.weight import QuantizedWeight

_RATIOS = 20  # exponents tried
_ENDS = 10  # values tried for each end of a group's range
_ROWS = 512  # output channels, of all linears together, that scales are compared on
_BATCH = 4096  # output channels times scales at a time: no more memory than rounding a weight takes
_ENDS_QUICKLY = 6  # values tried for both ends together, while scales are compared
_SMALLEST = 0.55  # of them, as a share of the whole
_SWEEPS = 2  # times that every group's range is chosen


def awq_scales(
    weights: Sequence[Tensor],
    hessian: Hessian,
    grid: Grid,
    *,
    share: Tensor | None = None,
) -> Tensor:
    """`[K]` fp32: what to multiply the columns of `weights` (each `[N_i, K]`, all reading one input) by.

    `share [K]` int64: channels of the same number get the same scale (attention with fewer KV heads: several input
    channels of o_proj come from one row of v_proj). Raises ValueError for NaN weights, NaN activations and group sizes
    that do not divide K.
    """
    for weight in weights:
        check_weight(weight, grid.scales_dtype)
        check_divides(weight, grid)
    x = hessian.mean_abs
    if not torch.isfinite(x).all():
        raise ValueError("activations hold NaN or infinite values, expected finite ones")
    candidates = torch.stack([torch.ones_like(x), *_candidates(x, _mean_weight(weights, grid), share)])
    most = max(1, _ROWS // len(weights))
    rows = [weight[:: -(-len(weight) // most)].float() for weight in weights]
    stand_for = torch.cat([x.new_full((len(some),), len(w) / len(some)) for some, w in zip(rows, weights, strict=True)])
    columns = torch.cat(rows).t().contiguous()
    parts = candidates.split(max(1, _BATCH // len(stand_for)))
    errors = torch.cat([_output_errors(columns, scales, hessian.matrix, grid) @ stand_for for scales in parts])
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    errors[(candidates * largest).amax(1) > torch.finfo(grid.scales_dtype).max] = torch.inf  # no scale holds them
    return candidates[errors.nan_to_num(nan=torch.inf).argmin()]


def awq_round(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantizedWeight:
    """`[N, K]` rounded, each group over the range that makes the error of the whole output least.

    Ranges are tried down to _SMALLEST of the whole one, at each end (at both alike where the grid is symmetric): the
    codes that are nearest in a range, with the scale that suits these codes best. Taken is what leaves, together with
    the errors of all other groups, the least tr E H E^T; so groups make up for each other, and no step adds error.

    `hessian [K, K]` fp32 is of the inputs divided by the scales. Raises as `awq_scales`.
    """
    check_weight(weight, grid.scales_dtype)
    check_divides(weight, grid)
    columns = weight.float().t().contiguous()
    codes, scales, zeros, _ = _round(columns, columns.new_ones(len(columns), 1), hessian, grid, quick=False)
    return quantized(codes, scales, zeros, None, grid)


def _round(
    columns: Tensor, inverse: Tensor, hessian: Tensor, grid: Grid, *, quick: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes `[K, N]`, scales and zeros `[groups, N]` of `columns [K, N]`, and their error `[K, N]` times `inverse`.

    `inverse [K, N or 1]`: 1 / s where the columns were multiplied by s; `hessian` is of the inputs not yet divided.
    `quick` tries fewer ranges, once.
    """
    k, n = columns.shape
    size = grid.group(k)
    groups = columns.view(-1, size, n)
    low, high = groups.amin(1).clamp_(max=0), groups.amax(1).clamp_(min=0)
    scales, zeros = parameters(low, high, grid)
    codes = encode(groups, scales[:, None], zeros[:, None], grid.top)
    wrong = ((codes - zeros[:, None]) * scales[:, None] - groups).view(k, n) * inverse
    for group in list(range(k // size)) * (1 if quick else _SWEEPS):
        part = slice(group * size, (group + 1) * size)
        block = hessian[part, part]
        wanted = (block @ (columns[part] * inverse[part] + wrong[part]) - hessian[part] @ wrong) * inverse[part]
        ranges = _ranges(low[group], high[group], grid, quick)
        best = _best(groups[group], inverse[part], block, wanted, *ranges, grid)
        scales[group], zeros[group], codes[group] = best
        wrong[part] = ((codes[group] - zeros[group]) * scales[group] - columns[part]) * inverse[part]
    return codes.view(k, n), scales, zeros, wrong


def _ranges(low: Tensor, high: Tensor, grid: Grid, quick: bool) -> tuple[Tensor, Tensor]:
    """Scales and zeros `[tried, N]` of the ranges inside `[low, high]`."""
    shrinks = torch.linspace(1, _SMALLEST, _ENDS_QUICKLY if quick else _ENDS, device=low.device)
    ends = torch.stack((shrinks, shrinks), 1) if grid.sym or quick else torch.cartesian_prod(shrinks, shrinks)
    return parameters(low * ends[:, :1], high * ends[:, 1:], grid)


def _best(
    values: Tensor, inverse: Tensor, block: Tensor, wanted: Tensor, scales: Tensor, zeros: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, zeros `[N]` and codes `[columns, N]` of one group of `values [columns, N]` over the best of the ranges.

    The error of rounded values q is p^T block p - 2 q^T wanted with p = q * inverse, and what does not depend on them.
    """
    along, square = range_products(values, inverse, block, wanted, scales, zeros, grid.top)
    fitted = torch.where((along > 0) & (square > 0), stored(along / square, grid), scales)
    best = (fitted * (2 * along - fitted * square)).argmax(0, keepdim=True)
    zero = zeros.gather(0, best)[0]
    return fitted.gather(0, best)[0], zero, encode(values, scales.gather(0, best)[0], zero, grid.top)


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


def _output_errors(columns: Tensor, scales: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """`[tried, N]`: of the output channels `columns [K, N]` after scaling by each of `scales [tried, K]`, rounding and
    dividing what comes in. All are rounded together, as if they were channels of one weight."""
    spread = scales.t()[:, :, None].expand(-1, -1, columns.shape[1])
    scaled = (columns[:, None] * spread).flatten(1)
    wrong = _round(scaled, spread.flatten(1).reciprocal(), hessian, grid, quick=True)[3]
    return ((hessian @ wrong) * wrong).sum(0).view(len(scales), -1)
