"""Modules whose tensors have the dtype of their format, whatever dtype the model is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

Self = TypeVar("Self", bound="FixedDtypes")


class FixedDtypes(nn.Module):
    """`.to()` and its like move the tensors and cast the bias only: codes of FP8 in bf16 are none, and scales rounded
    to bf16 are others.
    """

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = getattr(self, "bias", None)

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype or tensor is bias else tensor.to(moved.device)

        return super()._apply(move, recurse)
