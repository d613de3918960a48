"""Packed linears of few tokens that take in the small kernels around them: norms, residual adds, a gated activation.

A step of one token is a chain of kernels each of which waits for the one before it; most take 2 microseconds or 3,
whatever they do. Here three in ten of a layer become ends of products (`w4a16_hopper_few.cu`). A norm is a factor per
token and a weight per channel: the product that makes hidden states multiplies by the weight and sums squares, the
product that reads them multiplies its outputs by the factor. So what is rounded to 16 bits between the two is the
hidden state times the weight; the norm itself never is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from hf_paged.kernels.interleaved_rows import InterleavedRows
from hf_paged.kernels.on_device import multiprocessors
from hf_paged.kernels.packed_weight import PackedWeight, packed_linear_reference
from hf_paged.kernels.reference_fused import RMSNorm

MAX_FOLDED_ROWS = 16  # a step of 8B gets 0.1, 2.0, 1.8 us a layer shorter at 1, 8, 16 (`docs/performance/steps.md`)
_RUN = 16  # channels whose squares are summed


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenNorm:
    """An RMSNorm whose factor is left to the product that reads it: norm(h) = rows / sqrt(mean(h^2) + eps)."""

    # [M, K] bf16, h times the norm's weight; interleaved, in its order, of a norm that has one
    rows: Tensor | InterleavedRows
    squares: Tensor  # [M, K / 16] fp32, sums of h^2
    eps: float

    @property
    def factors(self) -> Tensor:
        """`[M, 1]` fp32."""
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.rows.shape[1] + self.eps)


def open_norm_reference(hidden: Tensor, norm: RMSNorm) -> OpenNorm:
    """The definition of what a product leaves of `hidden` `[M, N]` for the next one."""
    rows = (hidden.float() * (norm.weight.float() + norm.offset)).to(hidden.dtype)
    ordered = rows if norm.order is None else InterleavedRows.of(rows.index_select(-1, norm.order))
    return OpenNorm(rows=ordered, squares=hidden.float().square().unflatten(1, (-1, _RUN)).sum(-1), eps=norm.eps)


@overload
def folded_linear_reference(
    x: Tensor | OpenNorm, weight: PackedWeight, bias: Tensor | None, *, gated: Literal[False] = False
) -> Tensor: ...
@overload
def folded_linear_reference(
    x: Tensor | OpenNorm, weight: PackedWeight, bias: Tensor | None, *, gated: bool, places: Tensor | None = None
) -> Tensor | InterleavedRows: ...
def folded_linear_reference(
    x: Tensor | OpenNorm,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    gated: bool = False,
    places: Tensor | None = None,
) -> Tensor | InterleavedRows:
    """The definition of `folded_linear`."""
    rows = _plain(x.rows if isinstance(x, OpenNorm) else x)
    out = packed_linear_reference(rows.float(), replace(weight, perm=None), None)
    out = out * x.factors if isinstance(x, OpenNorm) else out
    out = (out if bias is None else out + bias.float()).to(rows.dtype)
    if not gated:
        return out
    gate, up = out.chunk(2, -1)
    out = torch.nn.functional.silu(gate.float()).to(rows.dtype) * up
    return out if places is None else InterleavedRows.of(out, places)


def folded_sum_reference(
    x: Tensor | InterleavedRows, weight: PackedWeight, bias: Tensor | None, residual: Tensor, norm: RMSNorm | None
) -> tuple[Tensor, OpenNorm | None]:
    """The definition of `folded_sum`."""
    weight = replace(weight, perm=None) if isinstance(x, InterleavedRows) else weight
    hidden = residual + packed_linear_reference(_plain(x), weight, bias)
    return hidden, None if norm is None else open_norm_reference(hidden, norm)


def _plain(x: Tensor | InterleavedRows) -> Tensor:
    return x.rows if isinstance(x, InterleavedRows) else x


def can_fold(x: Tensor, weight: PackedWeight) -> bool:
    """Whether a product of rows like `x` `[M, hidden]` can take in what is around it."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MAX_FOLDED_ROWS):
        return False
    from hf_paged.kernels.w4a16_hopper import fits_hopper  # Triton exists on Linux only

    return weight.in_features % 64 == 0 and fits_hopper(x, weight)


@overload
def folded_linear(
    x: Tensor | OpenNorm, weight: PackedWeight, bias: Tensor | None, locks: Tensor, *, gated: Literal[False] = False
) -> Tensor: ...
@overload
def folded_linear(
    x: Tensor | OpenNorm,
    weight: PackedWeight,
    bias: Tensor | None,
    locks: Tensor,
    *,
    gated: Literal[True],
    places: Tensor | None = None,
) -> Tensor | InterleavedRows: ...
def folded_linear(
    x: Tensor | OpenNorm,
    weight: PackedWeight,
    bias: Tensor | None,
    locks: Tensor,
    *,
    gated: bool = False,
    places: Tensor | None = None,
) -> Tensor | InterleavedRows:
    """`[M, K]` -> `[M, N]`, or with `gated` (no bias, halves of whole 64s) silu of the first half times the second.

    Channels of `x` lie in the weight's order. With `places` the gated result is interleaved, channel i at `places[i]`.
    `locks` as for `packed_linear`.
    """
    from hf_paged.kernels.w4a16_hopper import Beside, Ends, w4a16_hopper
    from hf_paged.kernels.w4a16_hopper_tiles import choose_hopper_tiles

    assert not gated or (bias is None and weight.out_features % 128 == 0), weight.out_features
    assert gated or places is None
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, OpenNorm) else (x, None, 0.0)
    ends = Ends(normed=squares is not None, eps=eps, gated=gated, ordered=places is not None)
    weight = replace(weight, perm=None)
    shape = (rows.shape[0], weight.out_features, weight.in_features, multiprocessors(locks.device))
    tiles = choose_hopper_tiles(*shape, gated=gated)
    beside = Beside(squares=squares, places=places)
    out = w4a16_hopper(_contiguous(rows), weight, bias, locks, tiles, ends, beside)
    return out if places is None else InterleavedRows(data=out, tokens=rows.shape[0])


def folded_sum(
    x: Tensor | InterleavedRows,
    weight: PackedWeight,
    bias: Tensor | None,
    locks: Tensor,
    residual: Tensor,
    norm: RMSNorm | None,
) -> tuple[Tensor, OpenNorm | None]:
    """(s, norm(s)) with s = residual + linear(x): `[M, K]` and `[M, N]` -> `[M, N]` and its norm, if there is one.

    Channels of interleaved rows lie in the weight's order, of others as they come.
    """
    from hf_paged.kernels.w4a16_hopper import Beside, Ends, w4a16_hopper
    from hf_paged.kernels.w4a16_hopper_tiles import choose_hopper_tiles

    m, n = residual.shape
    x, residual = _contiguous(x), residual.contiguous()
    tiles = choose_hopper_tiles(m, n, weight.in_features, multiprocessors(residual.device))
    if norm is None:
        return w4a16_hopper(x, weight, bias, locks, tiles, Ends(adds=1), Beside(residual=residual)), None
    rows = torch.empty_like(residual) if norm.places is None else InterleavedRows.empty(m, n, like=residual)
    squares = torch.empty((m, n // _RUN), dtype=torch.float32, device=residual.device)
    beside = Beside(
        residual=residual,
        norm=norm.weight,
        rows=rows.data if isinstance(rows, InterleavedRows) else rows,
        new_squares=squares,
        places=norm.places,
    )
    ends = Ends(adds=2, offset=norm.offset, ordered=norm.places is not None)
    total = w4a16_hopper(x, weight, bias, locks, tiles, ends, beside)
    return total, OpenNorm(rows=rows, squares=squares, eps=norm.eps)


def _contiguous(x: Tensor | InterleavedRows) -> Tensor | InterleavedRows:
    return x.contiguous() if isinstance(x, Tensor) else x
