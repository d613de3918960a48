"""Values that no tool writes: what a download that broke off, a wrong dtype or a lost sign leaves in a tensor.

The shapes of such a tensor are right, so it would load, and the model would answer nonsense. Each check raises
ValueError naming the tensor. What might be meant passes: a weight of zeros (an expert that nothing was routed to), or
the negative scales that AutoRound gives to some groups of symmetric weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.quant.weight import QuantizedWeight

MANY = 32  # values that agree by chance once in 2 ** 32
_SAMPLE = 4096
_REMEDY = "the file is damaged: fetch it again"


def check_weight(weight: QuantizedWeight, *, codes: str, zeros: str, scales: str) -> None:
    """The integers and scales of one linear; the names are those of the tensors that hold them in the file."""
    check_finite(scales, weight.scales)
    _check_signs(scales, weight)
    middle = 2 ** (weight.bits - 1)
    if is_constant(weight.codes):
        code, count = int(weight.codes.reshape(-1)[0]), weight.codes.numel()
        zero = middle if weight.zeros is None else int(weight.zeros.reshape(-1)[0])
        if code != zero or not is_constant(weight.scales):  # else a weight of zeros: writers give it constant scales
            raise ValueError(f"tensor {codes}: expected the codes of a weight, found {code} for all {count}; {_REMEDY}")
        return
    if not bool(weight.scales.any()):
        raise ValueError(f"tensor {scales}: expected a scale other than 0; {_REMEDY}")
    if weight.zeros is not None and weight.zeros.numel() >= MANY and is_constant(weight.zeros):
        raise ValueError(
            f"tensor {zeros}: expected zero points that differ or are the midpoint {middle}, "
            f"found {int(weight.zeros.reshape(-1)[0])} for all; {_REMEDY}"
        )


def check_finite(name: str, scales: Tensor) -> None:
    bad = int((~torch.isfinite(scales)).sum())
    if bad:
        raise ValueError(
            f"tensor {name}: expected finite scales, found {bad} NaN or infinite of {scales.numel()}; the file "
            "is damaged or was quantized with overflowing weights"
        )


def is_constant(values: Tensor) -> bool:
    """Whether all of `values` are the same. A look at the first of them answers for nearly all tensors."""
    flat = values.reshape(-1)
    first = flat[:1]
    return bool((flat[:_SAMPLE] == first).all()) and bool((flat == first).all())


def _check_signs(name: str, weight: QuantizedWeight) -> None:
    scales = weight.scales
    negative = int((scales < 0).sum())
    if negative and weight.zeros is not None:
        raise ValueError(
            f"tensor {name}: expected scales >= 0 beside zero points, found {negative} negative of {scales.numel()}; "
            f"{_REMEDY}"
        )
    if negative == scales.numel() >= MANY:
        raise ValueError(f"tensor {name}: expected scales of either sign, found {negative} negative ones; {_REMEDY}")
