"""The forward of an `nn.Linear`, and on a CPU a second copy of its weight in the order in which products read it.

A step of few rows spends its time on reading weights, and reordered ones are read 1.2 to 1.6 times as fast
(`kernels/cpu_linear.py`). The copies take no more than a share of the free memory, or there are none; they follow
weights that are written in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from hf_paged.kernels.cpu_linear import ReorderedWeight, can_reorder, widening_pays
from hf_paged.kernels.fused_ops import linear

logger = logging.getLogger(__name__)

REORDER_SHARE = 0.25  # of the free CPU memory


@dataclass(kw_only=True, eq=False)
class FusedLinear:
    """The forward of an `nn.Linear`; it holds the parameters, not the module, which would keep itself alive."""

    weight: Tensor
    bias: Tensor | None
    reordered: ReorderedWeight | None = None

    def __call__(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.reordered)


class ReorderedWeights:
    """The reordered copies of a fused view's weights: of all that a step uses and that can be reordered, or of none."""

    def __init__(self, view: nn.Module) -> None:
        chosen = [fused for fused in _linears_of_steps(view) if can_reorder(fused.weight)]
        num_bytes = sum(fused.weight.nbytes for fused in chosen)
        free = psutil.virtual_memory().available
        self._weights: list[ReorderedWeight] = []
        if num_bytes > free * REORDER_SHARE:
            logger.info(
                "weights are not reordered for the CPU: a copy takes %.2f GiB, more than %.0f%% of the free %.2f GiB",
                num_bytes / 2**30, 100 * REORDER_SHARE, free / 2**30,
            )  # fmt: skip
            return
        with torch.inference_mode(False), torch.no_grad():
            for fused in chosen:
                fused.reordered = ReorderedWeight(fused.weight)
                self._weights.append(fused.reordered)
        if chosen:
            logger.info(
                "%d weights are reordered for the CPU, %.2f GiB more; products of many rows run in %s",
                len(chosen), num_bytes / 2**30, "fp32" if widening_pays() else "bf16",
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._weights)

    @torch.no_grad()
    def refresh(self) -> bool:
        """Follow weights that were written in place since; whether there were any. Reads all of them once."""
        renewed = [weight.refresh() for weight in self._weights]
        return any(renewed)


def _linears_of_steps(view: nn.Module) -> Iterator[FusedLinear]:
    """The linears of an engine step: joined ones, and those that are no part of one."""
    forwards = [vars(module).get("forward") for module in view.modules()]
    joined = [found for forward in forwards if (found := _joined(forward)) is not None]
    yield from joined
    spans = [(fused.weight.data_ptr(), fused.weight.data_ptr() + fused.weight.nbytes) for fused in joined]
    for forward in forwards:
        if isinstance(forward, FusedLinear):
            at = forward.weight.data_ptr()
            if not any(start <= at < end for start, end in spans):
                yield forward


def _joined(forward: Any) -> FusedLinear | None:
    product = getattr(getattr(forward, "projections", None), "product", None)
    return product if isinstance(product, FusedLinear) else None
