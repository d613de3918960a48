"""Which format each layer is stored in: the one asked for, or a finer one where that would err too much.

A calibration (`kv_calibration.py`) says what each format costs a layer's output. A side (K or V) of a layer over the
budget takes the next finer format, int4 -> int8 -> the model's dtype, fp8 -> the model's dtype. All layers go on
sharing one block table, since each has bytes of its own in a block. `skip_layers` and `kv_error_budget="off"` have the
last word.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hf_paged.attention import ATTENTION_NAME
from hf_paged.config import EngineConfig, parse_kv_cache_dtype
from hf_paged.kv_cache import LayerFormat, layer_formats
from hf_paged.kv_calibration import CALIBRATIONS
from hf_paged.kv_scales import KVScales, load_kv_scales, transform_of
from hf_paged.layer_probe import LayerSpec
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel

logger = logging.getLogger(__name__)

_FINER = {"int4": ("int4", "int8", "auto"), "int8": ("int8", "auto"), "fp8": ("fp8", "auto"), "auto": ("auto",)}

# Relative error of a layer's output that "auto" allows a side in a format. Well over what layers of ordinary models
# have (docs/quality.md), well under what layers have that were seen to cost perplexity.
ERROR_BUDGETS = {"int8": 0.03, "fp8": 0.1, "int4": 0.12}


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The formats of one layer's keys and values, and those asked for."""

    layer_idx: int
    k_format: str
    v_format: str
    asked: tuple[str, str]
    error: float | None  # relative, of the layer's output in the formats asked for; None: not measured

    @property
    def is_protected(self) -> bool:
        return (self.k_format, self.v_format) != self.asked


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """The storage of all layers."""

    choices: tuple[LayerChoice, ...]
    formats: Mapping[int, LayerFormat]  # by layer index
    source: str  # what the choice rests on, in words

    @property
    def protected(self) -> tuple[LayerChoice, ...]:
        return tuple(choice for choice in self.choices if choice.is_protected)

    def __str__(self) -> str:
        """In words: what is stored finer than asked, and by which evidence."""
        if not self.protected:
            return f"all layers as asked ({self.source})"
        kinds = Counter((choice.k_format, choice.v_format) for choice in self.protected)
        parts = (
            f"layers {_ranges(c.layer_idx for c in self.protected if (c.k_format, c.v_format) == kind)} in "
            f"{_pair(*kind)}"
            for kind in kinds
        )
        return f"protected: {'; '.join(parts)} ({self.source})"


def plan_storage(model: PreTrainedModel, packed: PackedModel, config: EngineConfig) -> KVPlan:
    """How to store the layers of `model`; logged where it is not as asked.

    Args:
        packed: a view of `model` that is not fused.

    Raises:
        OSError: `config.kv_scales` is a file that is not there.
        ValueError: it belongs to another model, or `layer_formats` refuses the formats.
    """
    layer_formats(packed.specs, config.kv_cache_dtype, config.skip_layers)  # refuses before any work
    scales = scales_of(model, packed, config)
    plan = plan_layers(packed.specs, config, scales)
    if plan.protected:
        logger.warning("%s: KV cache %s", type(model).__name__, plan)
    return plan


def scales_of(model: PreTrainedModel, packed: PackedModel, config: EngineConfig) -> KVScales | None:
    """The scales that `config` asks for; None: no layer is quantized, or `kv_scales` is "off"."""
    if config.kv_scales == "off":
        return None
    if config.kv_scales != "auto":
        return load_kv_scales(config.kv_scales, packed.specs)
    k_formats, v_formats = (
        [name for name in _FINER[side] if name != "auto"] for side in parse_kv_cache_dtype(config.kv_cache_dtype)
    )
    if not k_formats and not v_formats:
        return None
    return CALIBRATIONS.get(model, packed, k_formats, v_formats)


def scales_of_model(model: PreTrainedModel, config: EngineConfig) -> KVScales | None:
    """`scales_of` for a model that nobody has looked at yet, for a cache that any attention may read.

    "auto" does without scales where pages cannot run the model themselves; that is logged.
    """
    if config.kv_scales == "off" or parse_kv_cache_dtype(config.kv_cache_dtype) == ("auto", "auto"):
        return None
    try:
        is_view = model.config._attn_implementation == ATTENTION_NAME
        packed = PackedModel(model if is_view else build_view(model))
    except ValueError as error:
        if config.kv_scales != "auto":
            raise
        logger.info("the KV cache of %s is not smoothed: %s", type(model).__name__, error)
        return None
    return scales_of(model, packed, config)


def plan_layers(specs: Sequence[LayerSpec], config: EngineConfig, scales: KVScales | None) -> KVPlan:
    """The storage of the layers `specs` (all of a model, or some) under `config`."""
    choices = tuple(_choose(spec, config, scales) for spec in specs)
    formats = {}
    for spec, choice in zip(specs, choices, strict=True):
        pair = layer_formats([spec], _pair(choice.k_format, choice.v_format))[spec.layer_idx]
        transform = None
        if scales is not None:
            transform = transform_of(spec, choice.k_format, choice.v_format, scales.layers[spec.layer_idx])
        formats[spec.layer_idx] = replace(pair, transform=transform)
    return KVPlan(choices=choices, formats=formats, source="not smoothed" if scales is None else scales.source)


def _choose(spec: LayerSpec, config: EngineConfig, scales: KVScales | None) -> LayerChoice:
    asked = parse_kv_cache_dtype(config.kv_cache_dtype)
    if spec.layer_idx in config.skip_layers:
        asked = ("auto", "auto")
    k_format, v_format = asked
    error = None
    if scales is not None:
        layer = scales.layers[spec.layer_idx]
        error = layer.error(*asked)
        if config.kv_error_budget != "off":
            k_errors = {name: side.error for name, side in layer.keys.items()}
            v_errors = {name: side.error for name, side in layer.values.items()}
            k_format, v_format = (
                _within_budget(side, errors, config) for side, errors in ((k_format, k_errors), (v_format, v_errors))
            )
    return LayerChoice(layer_idx=spec.layer_idx, k_format=k_format, v_format=v_format, asked=asked, error=error)


def _within_budget(asked: str, errors: Mapping[str, float], config: EngineConfig) -> str:
    """The first of `asked` and the finer formats that errs no more than the budget."""
    for name in _FINER[asked]:
        budget = ERROR_BUDGETS.get(name) if config.kv_error_budget == "auto" else config.kv_error_budget
        if name == "auto" or (name in errors and errors[name] <= float(budget or 0.0)):
            return name
    raise AssertionError(asked)


def _pair(k_format: str, v_format: str) -> str:
    return k_format if k_format == v_format else f"k={k_format},v={v_format}"


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 7] -> "0-2, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
