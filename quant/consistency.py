"""What the tensors of a file say about each other: one that differs from all its kind is damaged.

Labels lie, and then most modules of a file contradict theirs alike. Where most keep what the label promises and one
does not, that one was cut or lost a tensor. And a file's scales share a dtype: bytes of bfloat16 that are read as
float16, or the other way round, are numbers of another size.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from hf_paged.quant.fp8 import Fp8Layout
from hf_paged.quant.header import Header
from hf_paged.quant.layout import Layout

_HALVES = ("F16", "BF16")
_OTHERS = 12  # tensors looked at to know what is usual
_FAR = 16.0  # times larger or smaller than usual
_COLUMNS = 64


class Promises:
    """What the label promises of each module's tensors, and who keeps it."""

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._broken: list[tuple[str, str, str]] = []

    def note(self, tensor: str, promised: str | None, found: str) -> None:
        """Of `tensor`, in words that are equal where the promise is kept. None: the label does not say."""
        if promised == found:
            self._kept[promised] += 1
        elif promised is not None:
            self._broken.append((tensor, promised, found))

    def problems(self) -> dict[str, str]:
        """One for each module, by its name."""
        alike = Counter((promised, found) for _, promised, found in self._broken)
        return {
            tensor.rpartition(".")[
                0
            ]: f"tensor {tensor}: expected {promised}, which {self._kept[promised]} others have, found {found}: "
            "the file is damaged, or its config lacks a rule for this module"
            for tensor, promised, found in reversed(self._broken)  # the first that was noted stays
            if self._kept[promised] > alike[promised, found]  # else it is the label that is wrong
        }


def promised_grain(group_size: int | None, in_features: int) -> str | None:
    """What the label says one scale covers; None also where a layer is too small to tell."""
    if group_size is None or 0 < in_features <= group_size:
        return None
    return "one scale for each output channel" if group_size in (-1, 0) else f"one scale for {group_size} weights"


def grain(layout: Layout | Fp8Layout, group_size: int | None = None) -> str:
    """What one scale covers; `group_size` is the label's."""
    n, k = layout.out_features, layout.in_features
    if isinstance(layout, Fp8Layout):
        known = {(n, k): "one scale", (1, k): "one scale for each output channel"}
        return known.get(layout.block, "one scale for {} x {} weights".format(*layout.block))
    if n > 1 and layout.tensors[layout.scales_name].shape in ((), (1,), (1, 1)):
        return "one scale"
    if layout.groups == 1:
        return "one scale for each output channel"
    ragged = group_size is not None and group_size > 0 and -(-k // group_size) == layout.groups
    return f"one scale for {group_size if ragged else layout.group_size} weights"


def misread(header: Header, scales: Iterable[Sequence[str]], plain: Iterable[str]) -> list[str]:
    """Tensors (by their keys in the file) that have the rarer of two dtypes, and values as if they were the other.
    `scales` come by what they scale.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for key in plain:
        kinds[re.sub(r"\d+", "#", key)].append(key)
    with torch.device("cpu"):  # models are planned on the meta device
        found = [_outliers(header, keys) for keys in (*scales, *kinds.values())]
        alone = {keys[0] for keys in kinds.values() if len(keys) == 1 and len(header.specs[keys[0]].shape) == 2}
        rare, _ = _by_dtype(header, chain.from_iterable(kinds.values()))
        found.append([_absurd(header, key) for key in rare if key in alone])
    return [problem for problems in found for problem in problems if problem]


def _outliers(header: Header, keys: Sequence[str]) -> list[str]:
    rare, common = _by_dtype(header, keys)
    if not rare:
        return []
    usual = float(_medians(header, common[:: -(-len(common) // _OTHERS)]).median())
    return [
        f"tensor {key}: expected {header.specs[common[0]].dtype} as {len(common)} others of its kind, whose values are "
        f"about {usual:.1e}; found {header.specs[key]} and {size:.1e}: the file is damaged"
        for key, size in zip(rare, _medians(header, rare).tolist())
        if not usual / _FAR < size < usual * _FAR
    ]


def _absurd(header: Header, key: str) -> str:
    """A matrix without its like, embeddings or a head. A misread exponent is 8 times as wide, or an eighth: of a weight
    the ninth decile is some 13 times the first.
    """
    size = _sizes(header, key)
    low, high = (float(size.kthvalue(1 + int(share * (size.numel() - 1))).values) for share in (0.1, 0.9))
    if 2 * low <= high <= 2**16 * low:
        return ""
    return (
        f"tensor {key}: expected the dtype of the others, found {header.specs[key]}, and values that are none of a "
        "weight: the file is damaged"
    )


def _by_dtype(header: Header, keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Of the keys of 16-bit tensors those of the rarer dtype, and the others."""
    found: dict[str, list[str]] = {dtype: [] for dtype in _HALVES}
    for key in keys:
        if header.specs[key].dtype in found:
            found[header.specs[key].dtype].append(key)
    rare, common = sorted(found.values(), key=len)
    return rare, common


def _medians(header: Header, keys: Iterable[str]) -> Tensor:
    return torch.stack([_sizes(header, key).median() for key in keys])


def _sizes(header: Header, key: str) -> Tensor:
    """Magnitudes of what is not 0 in (the first columns of) a tensor."""
    values = header.load(key, columns=_COLUMNS if len(header.specs[key].shape) == 2 else None).float().abs().flatten()
    values = values[values > 0]
    return values if values.numel() else torch.zeros(1)
