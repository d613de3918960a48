"""What a calibration found out about a model's keys and values, layer by layer, and the file that keeps it.

For each layer, side (K or V) and format: how values are smoothed before they are quantized (`kernels/kv_transform.py`)
and what is lost then. The file is safetensors: `layers.N.k.int8.offset`, `.factor` and so on, all fp32, absent where
they are 0 and 1, and `probed`, by which it knows its model again; everything else is JSON in its metadata. It holds no
weights and no text.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged.config import KV_FORMATS, EngineConfig
from hf_paged.kernels.kv_transform import KVTransform, hadamard
from hf_paged.layer_probe import LayerSpec
from hf_paged.packed_model import PackedModel

# An error of the output counts twice if it comes from the keys: it moves attention to other tokens, where an error of
# values averages out. Perplexity was seen to rise 2 to 5 times as much for like mean squares (docs/smoothing.md).
KEY_WEIGHT = 2.0
_VERSION = "hf_paged.kv_scales.2"
# Of `KVScales.probed`, relative: bf16 moves it by 0.3%, weights rounded to 4 bits by 8% and to 3 bits by 20%; from one
# model to another it differs by 100% and more.
_SAME_MODEL = 0.5
_PROBED = "probed"
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, eq=False)
class SideScales:
    """The keys or the values of one layer in one format. Tensors are `[kv_heads, head_dim]` fp32 on the CPU."""

    offset: Tensor | None  # None = 0
    factor: Tensor | None  # powers of two; None = 1, as always for values
    error: float  # of the layer's output with this side stored so, relative to the output


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScales:
    """One attention layer; its sides by format, named as in `kv_cache_dtype`."""

    keys: Mapping[str, SideScales]
    values: Mapping[str, SideScales]

    def error(self, k_format: str, v_format: str) -> float:
        """What a budget weighs of a layer in these formats; the two sides err independently."""
        k, v = self.keys.get(k_format), self.values.get(v_format)
        return math.hypot(0.0 if k is None else KEY_WEIGHT * k.error, 0.0 if v is None else v.error)


@dataclass(frozen=True, kw_only=True)
class KVMix:
    """The cheapest formats within a perplexity budget, and what was measured."""

    kv_cache_dtype: str
    error_budget: float | None  # `kv_error_budget` under which layers are stored finer; None = off
    skip_layers: tuple[int, ...]
    perplexity_budget: float  # relative: 0.005 allows 0.5%
    perplexity_change: float  # relative, measured through pages
    bytes_per_token: float

    def __str__(self) -> str:
        budget = "" if self.error_budget is None else f" under an error budget of {self.error_budget:g}"
        return (
            f"{self.kv_cache_dtype}{budget}, {self.bytes_per_token:,.0f} bytes per token; perplexity "
            f"{self.perplexity_change:+.2%} (allowed {self.perplexity_budget:.2%})"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScales:
    """All attention layers of a model, by index."""

    layers: Mapping[int, LayerScales]
    source: str  # the tokens that the model was run on, in words
    probed: Tensor  # [n] fp32 on the CPU: `PackedModel.probed` of the model
    mix: KVMix | None = None  # what `kv_cache_dtype="auto-quality"` means for this model, once it was measured

    @property
    def k_formats(self) -> set[str]:
        """Formats that the keys of some layer were measured in."""
        return {name for layer in self.layers.values() for name in layer.keys}

    @property
    def v_formats(self) -> set[str]:
        """Formats that the values of some layer were measured in."""
        return {name for layer in self.layers.values() for name in layer.values}

    def joined(self, other: KVScales) -> KVScales:
        """These, and the formats of `other`, which is of the same model."""
        layers = {
            index: LayerScales(keys={**a.keys, **b.keys}, values={**a.values, **b.values})
            for index, a in self.layers.items()
            for b in (other.layers[index],)
        }
        return replace(self, layers=layers)


def transform_of(
    spec: LayerSpec, k_format: str, v_format: str, scales: LayerScales | None = None
) -> KVTransform | None:
    """The transform of a layer's pages in these formats, on its device; 4-bit sides are rotated.

    Args:
        scales: how to smooth; None: not at all.
    """
    keys = None if scales is None else scales.keys.get(k_format)
    values = None if scales is None else scales.values.get(v_format)
    rotates_k, rotates_v = k_format == "int4", v_format == "int4"
    offset = None if values is None else values.offset
    if keys is None and offset is None and not (rotates_k or rotates_v):
        return None
    shape = (spec.kv_heads, spec.head_dim)
    k_offset = torch.zeros(shape, dtype=torch.float32) if keys is None or keys.offset is None else keys.offset
    k_factor = torch.ones(shape, dtype=torch.float32) if keys is None or keys.factor is None else keys.factor
    moved = k_offset / k_factor
    return KVTransform(
        sink_offset=(hadamard(moved) if rotates_k else moved).to(spec.device) if k_offset.any() else None,
        k_offset=k_offset.to(spec.device),
        k_factor=k_factor.to(spec.device),
        v_offset=None if offset is None else offset.to(spec.device),
        rotates_k=rotates_k,
        rotates_v=rotates_v,
    )


def save_kv_scales(scales: KVScales, path: str | os.PathLike[str]) -> None:
    """Write `scales` to `path`: whole under that name, or not at all. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    errors: dict[int, dict[str, dict[str, float]]] = {}
    for index, layer in scales.layers.items():
        sides = {"k": layer.keys, "v": layer.values}
        errors[index] = {side: {name: found.error for name, found in sides[side].items()} for side in sides}
        for side, by_format in sides.items():
            for name, found in by_format.items():
                for part, tensor in (("offset", found.offset), ("factor", found.factor)):
                    if tensor is not None:
                        tensors[f"layers.{index}.{side}.{name}.{part}"] = tensor.contiguous()
    tensors[_PROBED] = scales.probed
    metadata = {"format": _VERSION, "source": scales.source, "errors": json.dumps(errors)}
    if scales.mix is not None:
        metadata["mix"] = json.dumps(vars(scales.mix))
    unfinished = f"{os.fspath(path)}.unfinished"
    try:
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            os.unlink(unfinished)
        raise OSError(f"cannot write {path}: {error}") from error


def load_kv_scales(path: str | os.PathLike[str], model: PackedModel) -> KVScales:
    """Read what `save_kv_scales` wrote for `model`; one on the meta device is known by its shapes alone.

    Any other is known by one token's keys and values in its first layer: rounding to 4 bits moves deeper ones by 70%.

    Raises:
        OSError: there is no such file.
        ValueError: it is no such file, or belongs to another model.
    """
    specs = model.specs
    if not os.path.isfile(path):
        raise OSError(f"there is no file {path}; `hf-paged calibrate MODEL -o FILE` writes one")
    try:
        opened = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of hf-paged calibrate: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _VERSION:
            found = metadata.get("format")
            raise ValueError(f"{path} has format {found!r}; allowed: {_VERSION!r}, as hf-paged calibrate writes")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    try:
        errors = {int(index): entry for index, entry in json.loads(metadata["errors"]).items()}
        mix = _mix(json.loads(metadata["mix"])) if "mix" in metadata else None
        source = metadata["source"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its metadata is damaged, calibrate again: {error!r}") from error
    if set(errors) != {spec.layer_idx for spec in specs}:
        raise ValueError(f"{path} is of a model with {len(errors)} attention layers; this one has {len(specs)}")
    probed = tensors.pop(_PROBED, None)
    layers = {
        spec.layer_idx: LayerScales(
            keys=_sides(path, tensors, f"layers.{spec.layer_idx}.k", entry["k"], (spec.kv_heads, spec.head_dim)),
            values=_sides(path, tensors, f"layers.{spec.layer_idx}.v", entry["v"], (spec.kv_heads, spec.v_head_dim)),
        )
        for spec in specs
        for entry in (errors[spec.layer_idx],)
    }
    used = sum(
        scale is not None
        for layer in layers.values()
        for side in (layer.keys, layer.values)
        for found in side.values()
        for scale in (found.offset, found.factor)
    )
    if used != len(tensors):
        raise ValueError(f"{path} holds {len(tensors)} tensors, and its metadata speaks of {used}; calibrate again")
    return KVScales(layers=layers, source=source, probed=_checked_probe(path, probed, model.probed), mix=mix)


def _checked_probe(path: str | os.PathLike[str], probed: Tensor | None, expected: Tensor) -> Tensor:
    """Raise ValueError for scales of another model of the same shape: smoothing by them is exact, and useless."""
    if probed is None:
        raise ValueError(f"{path} does not say which model it is of; calibrate again")
    _check_scale(path, _PROBED, probed, tuple(expected.shape))
    if not expected.is_meta:
        found = expected.float().cpu()
        difference = float((probed - found).norm() / found.norm().clamp(min=_TINY))
        if difference > _SAME_MODEL:
            raise ValueError(
                f"{path} is of another model of this shape: keys and values of one token differ by {difference:.0%}, "
                f"allowed: {_SAME_MODEL:.0%}; calibrate again"
            )
    return probed


def _mix(fields: Mapping[str, Any]) -> KVMix:
    """Of JSON. Raises ValueError, TypeError or KeyError for what no calibration writes."""
    mix = KVMix(**{**fields, "skip_layers": tuple(fields["skip_layers"])})
    budget: float | Literal["off"] = "off" if mix.error_budget is None else mix.error_budget
    EngineConfig(
        kv_cache_dtype=mix.kv_cache_dtype, kv_error_budget=budget, skip_layers=mix.skip_layers,
        kv_perplexity_budget=mix.perplexity_budget,
    )  # fmt: skip
    if not (math.isfinite(mix.perplexity_change) and math.isfinite(mix.bytes_per_token)):
        raise ValueError(f"mix {dict(fields)}")
    return mix


def _sides(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    prefix: str,
    errors: object,
    shape: tuple[int, int],
) -> dict[str, SideScales]:
    if not isinstance(errors, Mapping) or not all(
        name in KV_FORMATS and isinstance(error, float | int) and 0 <= error < math.inf
        for name, error in errors.items()
    ):
        raise ValueError(f"{path}: errors of {prefix} are {errors!r}; expected finite numbers >= 0 by format")
    for name, tensor in tensors.items():
        if name.startswith(f"{prefix}."):
            _check_scale(path, name, tensor, shape)
    return {
        name: SideScales(
            offset=tensors.get(f"{prefix}.{name}.offset"), factor=tensors.get(f"{prefix}.{name}.factor"), error=error
        )
        for name, error in errors.items()
    }


def _check_scale(path: str | os.PathLike[str], name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError for what would turn a cache into noise: it would fail nowhere."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        found = f"{tuple(tensor.shape)} and dtype {tensor.dtype}"
        raise ValueError(f"{path}: {name} has shape {found}; this model needs {shape} and torch.float32")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{path}: {name} holds NaN or infinite values, expected finite ones")
    if name.endswith(".factor") and not (torch.frexp(tensor).mantissa == 0.5).all():
        raise ValueError(f"{path}: {name} holds other values than powers of two, which factors are")
