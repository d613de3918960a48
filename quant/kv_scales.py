"""Static KV-cache scales that a checkpoint brings along (`kv_cache_scheme`, AutoFP8): read, judged, kept on the model.

They are exposed as `model.hf_paged_kv_scales`, layer name -> `FileKVScales`. A scale that is NaN, infinite, zero or
negative is an error naming the tensor. Scales that are all exactly 1.0 were never calibrated: that is logged, and they
are kept.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

logger = logging.getLogger(__name__)

_NAMES = re.compile(r"(.+)\.(?:(k|v)_scale|(k|v)_proj\.output_scale|(kv)_scale|attn\.(k|v)_scale)$")


@dataclass(frozen=True, kw_only=True)
class FileKVScales:
    """value = code * scale for the K and V of one attention layer; one scale per tensor, or one per KV head."""

    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]


def is_kv_scale(name: str) -> bool:
    """Whether a file tensor is a KV-cache scale."""
    return _NAMES.fullmatch(name) is not None


def read_kv_scales(tensors: Mapping[str, Tensor]) -> dict[str, FileKVScales]:
    """The scales by attention layer, from their tensors by name. Raises ValueError for a scale nobody can mean."""
    found: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _NAMES.fullmatch(name)
        assert match is not None
        values = tuple(float(value) for value in tensor.float().flatten())
        for value in values:
            if not math.isfinite(value) or value <= 0:
                raise ValueError(
                    f"tensor {name}: expected a KV-cache scale > 0, found {value}; quantize the cache with "
                    "scales of its own instead (remove the tensor)"
                )
        side = next(group for group in match.groups()[1:] if group)
        for one in "kv" if side == "kv" else side:
            found[match[1]][one] = values
    scales: dict[str, FileKVScales] = {}
    for layer, sides in found.items():
        if set(sides) != {"k", "v"}:
            raise ValueError(f"layer {layer}: expected a K and a V scale, found only {sorted(sides)}")
        scales[layer] = FileKVScales(k_scale=sides["k"], v_scale=sides["v"])
    every = [value for one in scales.values() for value in (*one.k_scale, *one.v_scale)]
    if every and all(value == 1.0 for value in every):
        logger.warning(
            "all %d KV-cache scales of this checkpoint are exactly 1.0: they were not calibrated", len(every)
        )
    return scales
