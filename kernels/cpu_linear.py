"""bf16 linears on a CPU, where torch's own leaves something to gain. `torch.nn.functional.linear` defines the result.

Few rows wait for the weight: one that lies in the order of a kernel is read 1.2 to 1.6 times as fast (1 to 16 rows), at
the price of a copy. The kernel is ours (`cpu_few_rows.py`) or, without Numba, oneDNN's, which is as fast for one row
and takes 1.4 times as long for 16. Many rows wait for arithmetic: where bf16 instructions have no matrix unit behind
them, a product in fp32 takes 0.6 to 0.7 of the time, the weight widened piece by piece on the way. All sum in fp32 and
round once, as torch's own does, in another order. None gains anything in fp16, and fp32 is left alone: there two paths
must give the same tokens.

`torch.ops.mkldnn` is what torch's inductor calls for frozen weights; nothing public reads a reordered weight as fast
(`torch.utils.mkldnn` copies the rows in and out, and is slower than no reordering at all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels.cpu_launch import has_kernels

MANY_ROWS = 96  # from here on a widened product is faster than a reordered one, where it is at all
_PIECE = 1 << 21  # elements of the weight that are held in fp32 at once: 8 MB
_ROWS = 512  # of the input; a prompt in one piece takes memory that is handed back and asked for in every product
_LANES = 127  # prime: what changes places in a weight moves by a multiple of 2 or 3, hardly ever of this
_SUMMANDS = 64  # words to one sum


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, reordered: ReorderedWeight | None = None) -> Tensor:
    """`x` `[..., K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`; `reordered` is that of `weight`."""
    if not x.dtype == weight.dtype == torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return F.linear(x, weight, bias)
    many = x.numel() >= MANY_ROWS * x.shape[-1]
    if many and widening_pays():
        return widened_linear(x, weight, bias)
    if reordered is not None and not (many and reordered.for_few_rows):
        return reordered.linear(x, bias)
    return F.linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in fp32, rounded to the dtype of `x`."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    rows, results = x.flatten(0, -2).split(_ROWS), out.flatten(0, -2).split(_ROWS)
    step = max(_PIECE // weight.shape[1], 1)
    for at in range(0, weight.shape[0], step):
        piece = slice(at, at + step)
        wide, wide_bias = weight[piece].float(), None if bias is None else bias[piece].float()
        for some, result in zip(rows, results, strict=True):
            result[:, piece] = F.linear(some.float(), wide, wide_bias)
    return out


def widening_pays() -> bool:
    """Whether this CPU multiplies many bf16 rows faster in fp32, by its instructions: a choice by time would differ
    from run to run beside other work, and with it the tokens where two of them tie.

    A product in fp32 takes 0.7 of the time of one with Intel's vector instructions for bf16, 0.3 of one without. AMX is
    faster than both, and AMD's instructions do twice the work of those for fp32.
    """
    found = _instructions()
    half_rate = "Intel" in str(found.get("cpu_name"))
    return bool(found.get("avx2")) and not found.get("amx_bf16") and (half_rate or not found.get("avx512_bf16"))


def _instructions() -> Mapping[str, Any]:
    """What `torch.cpu` knows of the CPU; nothing where it is too old to tell."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def can_reorder(weight: Tensor) -> bool:
    """Whether `weight` is one that `ReorderedWeight` takes, and faster for it."""
    return (
        weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[1] % 4 == weight.storage_offset() % 4 == 0  # whole words for the sums
        and reorders(weight.dtype)
    )


def reorders(dtype: torch.dtype) -> bool:
    """Whether this CPU has a kernel for reordered weights of `dtype`."""
    return dtype == torch.bfloat16 and (_own_kernel() or _onednn_kernel())


def _own_kernel() -> bool:
    """Whether `cpu_few_rows` is there, and the fastest: AMX takes no longer than reading the weight."""
    found = _instructions()
    return has_kernels(torch.bfloat16) and bool(found.get("avx512_f")) and not found.get("amx_bf16")


def _onednn_kernel() -> bool:
    found = _instructions()
    fast = bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    operators = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return fast and operators and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # a user may have told oneDNN otherwise


class ReorderedWeight:
    """A copy of a weight `[N, K]` that a product of few rows reads in one stream, and sums that tell when it is stale.

    Versions of tensors would not do: a write through `.data` leaves them as they are.
    """

    def __init__(self, weight: Tensor) -> None:
        assert can_reorder(weight), (weight.shape, weight.dtype, weight.device)
        self._weight = weight.detach()
        self.for_few_rows = _own_kernel()  # oneDNN's order serves any number
        self._reorder()

    def _reorder(self) -> None:
        self._sums = self._all_sums()
        if self.for_few_rows:
            from hf_paged.kernels.cpu_few_rows import in_columns  # Numba is not there for everybody

            self._copy = in_columns(self._weight)
        else:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def _all_sums(self) -> Tensor:
        """int64, of the weight's bits in words of 64, each sum over one lane of a stretch; read at the speed of memory.

        Sums of rows would not show columns that changed places, nor sums of columns rows that did.
        """
        words = self._weight.view(torch.int64).flatten()
        whole = len(words) // (_LANES * _SUMMANDS) * (_LANES * _SUMMANDS)
        return torch.cat((words[:whole].view(-1, _SUMMANDS, _LANES).sum(1).flatten(), words[whole:]))

    def refresh(self) -> bool:
        """Follow a weight that was written in place; whether it was."""
        stale = not torch.equal(self._sums, self._all_sums())
        if stale:
            self._reorder()
        return stale

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.for_few_rows:
            from hf_paged.kernels.cpu_few_rows import few_rows_linear

            return few_rows_linear(x, self._copy, len(self._weight), bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._copy, bias, "none", [], "")
        return out
