"""Which format each layer is stored in: the one asked for, or a finer one where that would err too much.

A calibration (`kv_calibration.py`) says what each format costs a layer's output. Errors of layers add up in squares, so
the budget is for the root mean square over all layers. While they are over it, the side (K or V) of the layer that
gains most per byte takes a finer format: int8 or the model's dtype, and for fp8 too int8 first, which errs a quarter as
much in as many bytes. All layers go on sharing one block table, since each has bytes of its own in a block.
`skip_layers` and `kv_error_budget="off"` have the last word.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hf_paged.config import EngineConfig, parse_kv_cache_dtype
from hf_paged.kv_cache import LayerFormat, layer_formats
from hf_paged.kv_calibration import CALIBRATIONS
from hf_paged.kv_scales import KEY_WEIGHT, KVScales, load_kv_scales, transform_of
from hf_paged.layer_probe import LayerSpec
from hf_paged.packed_model import PackedModel

logger = logging.getLogger(__name__)

# Formats by what a channel costs, in bits; a 16-bit scale (and zero) is shared by about 64 channels.
_BITS = {"int4": 4.5, "fp8": 8.25, "int8": 8.25, "auto": 16.0}
_FINER = {"int4": ("int8", "auto"), "fp8": ("int8", "auto"), "int8": ("auto",), "auto": ()}
_LEAST = 1.0  # bits that a change counts as at least: one that costs none is still not what was asked

# What "auto" allows each side, in shares of the output as `LayerScales.error` weighs them; both sides together their
# root sum of squares. See docs/quality.md for what that costs: int8 under 0.1% of perplexity, fp8 0.2 to 0.5%, int4 1%.
ERROR_BUDGETS = {"int8": 0.02, "fp8": 0.04, "int4": 0.06, "auto": 0.0}

_OUTLIER = 50.0  # K channels of so many medians, mostly from a bias of k_proj, leave the others of a token few codes


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The formats of one layer's keys and values, and those asked for."""

    layer_idx: int
    k_format: str
    v_format: str
    asked: tuple[str, str]

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

    @property
    def protection(self) -> str:
        """In words: which layers are stored finer than asked, and how."""
        kinds = Counter((choice.k_format, choice.v_format) for choice in self.protected)
        parts = (
            f"layers {_ranges(c.layer_idx for c in self.protected if (c.k_format, c.v_format) == kind)} in "
            f"{_pair(*kind)}"
            for kind in kinds
        )
        return "; ".join(parts) or "none"

    def __str__(self) -> str:
        return f"protected: {self.protection} ({self.source})"


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
        logger.info("%s: KV cache %s", type(model).__name__, plan)
    return plan


def scales_of(model: PreTrainedModel, packed: PackedModel, config: EngineConfig) -> KVScales | None:
    """The scales that `config` asks for; None: no layer is quantized, or `kv_scales` is "off"."""
    if config.kv_scales == "off":
        _warn_of_outliers(model, packed, config)
        return None
    if config.kv_scales != "auto":
        return _from_file(packed, config)
    k_formats, v_formats = (_measured(side) for side in parse_kv_cache_dtype(config.kv_cache_dtype))
    if not k_formats and not v_formats:
        return None
    recent = config.block_size if config.kv_recent_block else 0
    return CALIBRATIONS.get(model, packed, k_formats, v_formats, recent)


def _warn_of_outliers(model: PreTrainedModel, packed: PackedModel, config: EngineConfig) -> None:
    """Name the layers whose largest K channel, of the probe's token, is over `_OUTLIER` medians; none is smoothed."""
    k_format, _ = parse_kv_cache_dtype(config.kv_cache_dtype)
    keys = {layer: key.abs().float() for layer, key in packed.probed_keys.items() if layer not in config.skip_layers}
    layers = [layer for layer, key in keys.items() if key.max().item() > _OUTLIER * key.median().item()]
    if layers and k_format != "auto":
        logger.warning(
            "%s: layers %s have K channels over %.0f times the median, beside which %s codes lose the others; leave "
            'kv_scales at "auto" to smooth them, or keep these layers with skip_layers',
            *(type(model).__name__, _ranges(layers), _OUTLIER, k_format),
        )


def _from_file(packed: PackedModel, config: EngineConfig) -> KVScales:
    """The scales of a file, which must hold those that the config asks for: it would serve without, and not say so."""
    scales = load_kv_scales(config.kv_scales, packed)
    asked = zip("KV", parse_kv_cache_dtype(config.kv_cache_dtype), (scales.k_formats, scales.v_formats), strict=True)
    for side, name, held in asked:
        if name != "auto" and name not in held:
            raise ValueError(
                f"{config.kv_scales} holds no {side} in {name}; it has {', '.join(sorted(held)) or 'none'}"
            )
    return scales


def _measured(asked: str) -> list[str]:
    """A format and the finer ones that a layer may take instead, less the model's dtype."""
    return [name for name in (asked, *_FINER[asked]) if name != "auto"]


def plan_layers(specs: Sequence[LayerSpec], config: EngineConfig, scales: KVScales | None) -> KVPlan:
    """The storage of the layers `specs` (all of a model, or some) under `config`."""
    asked = {
        spec.layer_idx: ("auto", "auto")
        if spec.layer_idx in config.skip_layers
        else parse_kv_cache_dtype(config.kv_cache_dtype)
        for spec in specs
    }
    chosen = dict(asked)
    if scales is not None and config.kv_error_budget != "off":
        chosen = _within_budget(config, scales)
    formats = {}
    for spec in specs:
        k_format, v_format = chosen[spec.layer_idx]
        pair = layer_formats([spec], _pair(k_format, v_format))[spec.layer_idx]
        transform = None
        if scales is not None:
            transform = transform_of(spec, k_format, v_format, scales.layers[spec.layer_idx])
        formats[spec.layer_idx] = replace(pair, transform=transform)
    choices = (
        LayerChoice(layer_idx=i, k_format=chosen[i][0], v_format=chosen[i][1], asked=pair) for i, pair in asked.items()
    )
    return KVPlan(choices=tuple(choices), formats=formats, source="not smoothed" if scales is None else scales.source)


def _within_budget(config: EngineConfig, scales: KVScales) -> dict[int, tuple[str, str]]:
    """The formats of K and V by layer: one side of one layer is refined after the other until the budget holds."""
    asked = parse_kv_cache_dtype(config.kv_cache_dtype)
    budget = config.kv_error_budget
    allowed = math.hypot(*(ERROR_BUDGETS[name] for name in asked)) if isinstance(budget, str) else budget
    sides = {
        (index, side): found
        for index, layer in scales.layers.items()
        if index not in config.skip_layers
        for side, found in enumerate((layer.keys, layer.values))
    }
    chosen = {at: asked[at[1]] for at in sides}

    def square(at: tuple[int, int], name: str) -> float:
        """Of the error of a side in a format; a format that was not measured there is none to choose."""
        if name == "auto":
            return 0.0
        weight = 1.0 if at[1] else KEY_WEIGHT
        return (weight * sides[at][name].error) ** 2 if name in sides[at] else math.inf

    def gain(step: tuple[tuple[int, int], str]) -> float:
        at, finer = step
        return (square(at, chosen[at]) - square(at, finer)) / max(_BITS[finer] - _BITS[chosen[at]], _LEAST)

    while sum(square(at, name) for at, name in chosen.items()) > allowed**2 * len(scales.layers):
        steps = [(at, finer) for at, name in chosen.items() for finer in _FINER[name] if square(at, finer) < math.inf]
        if not steps:
            break
        at, finer = max(steps, key=gain)
        chosen[at] = finer
    pairs = dict.fromkeys(scales.layers, ("auto", "auto"))
    return {**pairs, **{index: (chosen[index, 0], chosen[index, 1]) for index, side in chosen if side == 0}}


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
