"""bf16 linears on a CPU, where torch's own leaves something to gain. `torch.nn.functional.linear` defines the result.

Few rows wait for the weight: oneDNN reads one that lies in the order of its kernel 1.2 to 1.6 times as fast (1 to 16
rows), at the price of a copy. Many rows wait for arithmetic: where bf16 instructions have no matrix unit behind them, a
product in fp32 takes 0.6 of the time, and the weight is widened piece by piece on the way. Both sum in fp32 and round
once, as torch's own does, in another order. Neither gains anything in fp16, and fp32 is left alone: there two paths
must give the same tokens.

`torch.ops.mkldnn` is what torch's inductor calls for frozen weights; nothing public reads a reordered weight as fast
(`torch.utils.mkldnn` copies the rows in and out, and is slower than no reordering at all).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

MANY_ROWS = 96  # from here on a widened product is faster than a reordered one, where it is at all
_PIECE = 1 << 20  # elements of the weight that are held in fp32 at once: 4 MB


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, reordered: ReorderedWeight | None = None) -> Tensor:
    """`x` `[..., K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`; `reordered` is that of `weight`."""
    if x.dtype == weight.dtype == torch.bfloat16 and x.numel() >= MANY_ROWS * x.shape[-1] and widening_pays():
        return widened_linear(x, weight, bias)
    if reordered is not None:
        return reordered.linear(x, bias)
    return F.linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in fp32, rounded to the dtype of `x`."""
    wide = x.float()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    step = max(_PIECE // weight.shape[1], 1)
    for at in range(0, weight.shape[0], step):
        piece = slice(at, at + step)
        out[..., piece] = F.linear(wide, weight[piece].float(), None if bias is None else bias[piece].float())
    return out


@functools.cache
def widening_pays() -> bool:
    """Whether this machine multiplies many bf16 rows faster in fp32, measured once: no list of processors knows."""
    x, weight = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bfloat16)
    narrow, wide = (_fastest(f) for f in (lambda: F.linear(x, weight), lambda: widened_linear(x, weight, None)))
    logger.info("products of many bf16 rows run in %s here", "fp32" if wide < narrow else "bf16")
    return wide < narrow


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def can_reorder(weight: Tensor) -> bool:
    """Whether `weight` is one that `ReorderedWeight` takes, and faster for it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[1] % 4 == weight.storage_offset() % 4 == 0  # whole words for the sums
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class ReorderedWeight:
    """A copy of a weight `[N, K]` that a product of few rows reads in one stream, and sums that tell when it is stale.

    Versions of tensors would not do: a write through `.data` leaves them as they are.
    """

    def __init__(self, weight: Tensor) -> None:
        assert can_reorder(weight), (weight.shape, weight.dtype, weight.device)
        self._weight = weight.detach()
        self._reorder()

    def _reorder(self) -> None:
        self._sums = self._row_sums()
        self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def _row_sums(self) -> Tensor:
        """[N] int64, each of a row's bits in words of 64; read at the speed of memory."""
        return self._weight.view(torch.int64).sum(1)

    def refresh(self) -> bool:
        """Follow a weight that was written in place; whether it was."""
        stale = not torch.equal(self._sums, self._row_sums())
        if stale:
            self._reorder()
        return stale

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._copy, bias, "none", [], "")
        return out
