"""Products whose rows do not know of each other: the same number of rows in each, whatever a step holds.

BLAS libraries choose a kernel by the number of rows, and kernels sum in different orders. In fp32 that moves a value in
its last bit, which tips a code over to its neighbour now and then, and the layers above amplify it: the perplexities of
one text in int4 were seen to differ by 1e-3 between chunk sizes. In tiles of one size rows are summed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

# Whole registers of any kernel, also of a thread's part of them: AVX2 takes 6 rows at once, and others apart.
ROWS = 576


class RowTiles(TorchFunctionMode):
    """While it is entered, fp32 `linear` runs in tiles of `ROWS` rows, the last one padded with zeros; no gradients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return (_tiled if func is linear else func)(*args, **(kwargs or {}))


def _tiled(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, with the names of its arguments; `input` `[..., K]` of any number of dimensions."""
    if input.dtype != torch.float32:
        return linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    out = input.new_empty(len(rows), len(weight))
    for tile, into in zip(rows.split(ROWS), out.split(ROWS), strict=True):
        if len(tile) < ROWS:
            tile = torch.cat((tile, tile.new_zeros(ROWS - len(tile), tile.shape[1])))
        into.copy_(linear(tile, weight, bias)[: len(into)])
    return out.view(*input.shape[:-1], len(weight))
