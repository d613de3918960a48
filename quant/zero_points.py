"""GPTQ zero points: what was subtracted from them before they were stored, 1 (`gptq`, v1) or 0 (`gptq_v2`).

Labels lie about it, and a whole step too much or too little is noise at 2 to 4 bits. Symmetric files store one
constant, the midpoint or the midpoint minus one. Otherwise the weights of a group average to nearly zero, so code -
zero does too, and over some hundred groups the two readings differ by that step. The layers of a file are looked at
together before they are read: one alone may be too small, or have weights of another mean, and with 8 bits a step is
as small as that mean. Where the evidence is weak the label decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_paged.quant import packing
from hf_paged.quant.header import Header
from hf_paged.quant.layout import Layout

logger = logging.getLogger(__name__)

_LAYERS = 12  # looked at together
_CHANNELS = 256  # output channels looked at of each, a multiple of 32


class Evidence:
    """Mean of code - zero over the channels of each group, for either reading."""

    def __init__(self) -> None:
        self._residuals: list[Tensor] = []  # code - stored, of each layer

    def add(self, stored: Tensor, codes: Tensor, group: Tensor, bits: int) -> None:
        """stored `[groups, N]` as in the file, codes `[N, K]`, group `[K]` int64 (group of each channel)."""
        groups = stored.shape[0]
        total = torch.zeros((groups, codes.shape[0]), dtype=torch.float32, device=codes.device)  # default: the model's
        mean = total.index_add_(0, group, codes.float().t()) / torch.bincount(group, minlength=groups)[:, None]
        both = [mean - ((stored.int() + offset) % 2**bits).float() for offset in (0, 1)]
        self._residuals.append(torch.stack(both).flatten(1))

    @property
    def offset(self) -> tuple[int, bool, bool]:
        """The reading that is nearer to zero, whether only the other one is far from it, and whether that is sure."""
        residuals = torch.cat(self._residuals, 1)
        away = residuals.mean(1).abs().tolist()
        near = int(away[1] < away[0])
        likely = away[near] < 0.25 and away[1 - near] > 0.6
        uncertain = float(residuals.std(1).max()) / residuals.shape[1] ** 0.5
        return near, likely, likely and uncertain < 0.1  # five standard errors to the middle between the two


def stored_zero_offset(stored: Tensor, codes: Tensor, group: Tensor, layout: Layout) -> int:
    """What to add to the stored zero points of one layer (`Evidence.add` says how the arguments look)."""
    constant = _constant_offset(stored, layout.bits)
    if constant is not None:
        offset = constant
    elif layout.stored_offset is not None:
        offset = layout.stored_offset
    elif layout.bits == 8:
        offset = layout.zero_offset
    else:
        evidence = Evidence()
        evidence.add(stored[:, :_CHANNELS], codes[:_CHANNELS], group, layout.bits)
        near, _, decisive = evidence.offset
        offset = near if decisive else layout.zero_offset
    return offset


def common_offset(header: Header, layouts: Mapping[str, Layout]) -> int | None:
    """What the layers of a file say together; `layouts` by the name of their module in the file. None: nothing clear,
    which is a warning where the label is the less likely reading. So is a label that is not followed.
    """
    stored = {name: layout for name, layout in layouts.items() if "qzeros" in layout.tensors}
    bits = min((layout.bits for layout in stored.values()), default=0)  # the largest steps are the clearest
    asked = [name for name, layout in stored.items() if layout.bits == bits]
    evidence, labels = Evidence(), []
    lies: list[tuple[int, int]] = []  # labels, and constants that say otherwise
    with torch.device("cpu"):  # models are planned on the meta device
        for name in asked[:: -(-len(asked) // _LAYERS) or 1]:
            layout = layouts[name]
            n = min(layout.out_features, _CHANNELS)
            words = header.load(f"{name}.qzeros", columns=packing.words_for(n, bits))
            zeros = packing.unpack_words(words, bits, n)
            constant = _constant_offset(zeros, bits)
            if constant is None:
                evidence.add(zeros, *_codes_and_groups(header, name, layout, n), bits)
                labels.append(layout.zero_offset)
            elif constant != layout.zero_offset:
                lies.append((layout.zero_offset, constant))
    near, likely, decisive = evidence.offset if labels else (0, False, False)
    label = labels[0] if labels else 0
    if decisive and near != label:
        lies.append((label, near))
    if lies:
        logger.warning(
            "the label says GPTQ %s zero points, the data holds %s; the data is followed", *map(_version, lies[-1])
        )
    if likely and not decisive and near != label:
        logger.warning(
            "the label says GPTQ %s zero points, which is followed, but the data looks more like %s: if answers are "
            "nonsense, correct `checkpoint_format`",
            _version(label),
            _version(near),
        )
    return near if decisive else None


def _codes_and_groups(header: Header, name: str, layout: Layout, n: int) -> tuple[Tensor, Tensor]:
    """Of the first `n` output channels; what is wrong with a `g_idx` is told when it is read."""
    words = header.load(f"{name}.qweight", columns=n)
    group = torch.arange(layout.in_features) // layout.group_size
    if "g_idx" in layout.tensors:
        g_idx = header.load(f"{name}.g_idx").long()
        if int(g_idx.min()) >= 0 and 0 < int(g_idx.max()) < layout.groups:
            group = g_idx
    return packing.unpack_words(words.t().contiguous(), layout.bits, layout.in_features), group


def _constant_offset(stored: Tensor, bits: int) -> int | None:
    middle = 2 ** (bits - 1)
    low, high = int(stored.min()), int(stored.max())
    return middle - low if low == high and low in (middle - 1, middle) else None


def _version(offset: int) -> str:
    return "v1 (zero - 1)" if offset else "v2 (zero)"
