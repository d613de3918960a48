"""The `quantization_config` of a checkpoint, read tolerantly and kept verbatim.

Real files carry keys of many tools and years (`version: "GEMM"`, `do_fuse`, `exllama_config`,
`modules_in_block_to_quantize`, `dynamic`, `extra_config`). Nothing here needs a quantization package, nothing unknown
is an error but the name of a layout, and what is saved is what was read. The classes carry Transformers' names because
`from_pretrained(quantization_config=...)` compares them by name; only the options below mean something when passed
there:

    allow_bin    read .bin (pickle) weight files
    self_check   compare the kernels with their definition on one layer per shape, at load
    cpu_cache    on CPU keep a plain copy of each weight beside the packed one (faster, 4 to 8 times the memory)
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import transformers
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from hf_paged.quant.layout import Label

logger = logging.getLogger(__name__)

_OPTIONS = {"allow_bin": False, "self_check": True, "cpu_cache": True}


class CheckpointConfig(QuantizationConfigMixin):
    """Behaviour shared by the classes below: fields verbatim, options as attributes."""

    quant_method: QuantizationMethod
    fields: dict[str, Any]
    allow_bin: bool
    self_check: bool
    cpu_cache: bool
    dequantize: bool
    _method: QuantizationMethod
    _layouts: tuple[str, ...] = ()  # names of layouts that are read; none: the tensors' names tell them

    def __init__(self, **fields: Any) -> None:
        for name, default in _OPTIONS.items():
            setattr(self, name, bool(fields.pop(name, default)))
        name = fields.pop("quant_method", None) or self._method
        self._name = str(getattr(name, "value", name))  # as the file has it; Transformers' own classes hold an enum
        self.quant_method = self._method
        self.dequantize = False
        self.fields = fields
        self._disputed: set[str] = set()  # names of a label's values that another label contradicts

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained(quantization_config=this)` changes in the checkpoint's own config."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def to_dict(self) -> dict[str, Any]:
        return {**copy.deepcopy(self.fields), "quant_method": self._name}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    def label(self, module: str) -> Label:
        """What this config promises for the linear `module` (its name in the file)."""
        fields = {**self.fields, **_override(self.fields, module)}
        layout = self._format(fields)
        label = Label(
            bits=_integer(fields, "bits", "w_bit"),
            group_size=_integer(fields, "group_size", "q_group_size"),
            method=self.quant_method.value,
            zero_offset=0 if layout in ("gptq_v2", "gptq_p") else 1,
            planar=layout == "gptq_p",
            symmetric=_switch(fields, "sym"),
            act_order=_switch(fields, "desc_act"),
        )
        unsaid: dict[str, Any] = dict.fromkeys(self._disputed)
        return replace(label, **unsaid)

    def compare(self, other: CheckpointConfig) -> None:
        """Another label of the same weights, from beside config.json: where the two differ, the tensors decide alone,
        and where they cannot, this one.
        """
        ours, theirs = asdict(self.label("")), asdict(other.label(""))
        silent = set() if self._format(self.fields) and other._format(other.fields) else {"zero_offset", "planar"}
        differ = {
            name: f"{name} {value} and {theirs[name]}"
            for name, value in ours.items()
            if name not in silent and None not in (value, theirs[name]) and value != theirs[name]
        }
        if differ:
            logger.warning(
                "config.json and the label beside it contradict each other (%s): the tensors decide, "
                "where they cannot config.json",
                ", ".join(differ.values()),
            )
        self._disputed = differ.keys() & {"bits", "symmetric", "act_order"}  # what the tensors are held to

    def check(self) -> None:
        """Raise ValueError for a layout that is not read: an unknown one may have the shapes of a known one."""
        name = self._format(self.fields)
        if self._layouts and name and name not in self._layouts:
            raise ValueError(
                f"quantization_config: layout {name!r} is not read; allowed: {', '.join(self._layouts)}. Save the "
                "model as one of these with the tool that wrote it"
            )

    def fp8_block(self, module: str) -> tuple[int, int]:
        """Rows and columns that one scale of the block-scaled FP8 weight of `module` covers."""
        return _block("weight_block_size", self.fields.get("weight_block_size"))

    def fp8_grain(self, module: str) -> str | None:
        """What one scale of an FP8 weight covers, in the words of `consistency.grain`; None: it does not say."""
        if "weight_block_size" not in self.fields:
            return None
        return "one scale for {} x {} weights".format(*self.fp8_block(module))

    def static_activations(self, module: str) -> bool:
        """Whether the file is to hold a scale for the activations of an FP8 linear."""
        return self.fields.get("activation_scheme") == "static"

    def quantizes_activations(self, module: str) -> bool:
        """Whether an FP8 linear quantizes its activations too (with `input_scale` in the file it always does)."""
        return True

    @staticmethod
    def _format(fields: Mapping[str, Any]) -> str:
        """The layout's name in lower case, empty if there is none."""
        return str(fields.get("checkpoint_format") or fields.get("format") or "").lower()


class AwqConfig(CheckpointConfig, transformers.AwqConfig):
    """`quant_method: awq`. (`exllama` and `ipex` named a way to run `gemm` files.)"""

    _method = QuantizationMethod.AWQ
    _layouts = ("gemm", "gemv", "gemv_fast", "llm-awq", "exllama", "ipex")

    def label(self, module: str) -> Label:
        zero_point, label = _switch(self.fields, "zero_point"), super().label(module)
        return label if zero_point is None else replace(label, symmetric=not zero_point)

    @staticmethod
    def _format(fields: Mapping[str, Any]) -> str:
        return str(fields.get("version") or fields.get("format") or "").lower()


class GPTQConfig(CheckpointConfig, transformers.GPTQConfig):
    """`quant_method: gptq`."""

    _method = QuantizationMethod.GPTQ
    _layouts = ("gptq", "gptq_v2", "gptq_p")

    @staticmethod
    def _format(fields: Mapping[str, Any]) -> str:
        return "marlin" if fields.get("is_marlin_format") else CheckpointConfig._format(fields)

    def to_dict(self) -> dict[str, Any]:
        """As read, but with the layout by its name: GPTQModel refuses AutoGPTQ's `is_marlin_format`."""
        fields = super().to_dict()
        if "is_marlin_format" in fields:
            del fields["is_marlin_format"]
            fields.setdefault("checkpoint_format", "gptq")
        return fields


class AutoRoundConfig(CheckpointConfig, transformers.AutoRoundConfig):
    """`quant_method: auto-round`, GPTQ or AWQ tensors by `packing_format`."""

    _method = QuantizationMethod.AUTOROUND
    _layouts = ("auto_round", "auto_round:gptqmodel", "auto_round:auto_gptq", "auto_round:auto_awq")

    def label(self, module: str) -> Label:
        packing = self._format(self.fields)
        return replace(
            super().label(module),
            method="awq" if packing.endswith("awq") else "gptq",
            zero_offset=1 if packing.endswith("auto_gptq") else 0,
        )

    @staticmethod
    def _format(fields: Mapping[str, Any]) -> str:
        return str(fields.get("packing_format") or "").lower()


class FineGrainedFP8Config(CheckpointConfig, transformers.FineGrainedFP8Config):
    """`quant_method: fp8`."""

    _method = QuantizationMethod.FP8

    def label(self, module: str) -> Label:
        return replace(super().label(module), floating=True)


class CompressedTensorsConfig(CheckpointConfig, transformers.CompressedTensorsConfig):
    """`quant_method: compressed-tensors`; its `config_groups` say bits and group size per target."""

    _method = QuantizationMethod.COMPRESSED_TENSORS

    def label(self, module: str) -> Label:
        weights = _mapping("config_groups weights", self._group(module).get("weights"))
        if weights.get("type") != "int":
            return Label(method=self.quant_method.value, floating=weights.get("type") == "float")
        return Label(
            bits=_integer(weights, "num_bits"),
            group_size=_integer(weights, "group_size") or -1,
            method=self.quant_method.value,
            symmetric=_switch(weights, "symmetric"),
            act_order=weights.get("actorder") in ("group", "dynamic", True),  # others: the natural order
        )

    def check(self) -> None:
        """Raise ValueError for weights that only mean something beside rotations of the activations."""
        for group in _mappings(self.fields, "config_groups"):
            weights = _mapping("config_groups weights", group.get("weights"))
            if weights.get("type") == "int" and group.get("input_activations"):
                logger.warning(
                    "the checkpoint asks for quantized activations beside integer weights: they stay as they are"
                )
        for scheme in _mappings(_mapping("transform_config", self.fields.get("transform_config")), "config_groups"):
            places = [_mapping("transform_config apply", place).get("location") for place in scheme.get("apply") or ()]
            online = [place for place in places if not str(place).startswith("weight_")]
            if online:
                raise ValueError(
                    f"quantization_config.transform_config: transforms of {', '.join(map(str, online))} at run time "
                    "are not read; quantize the model without them, or with transforms of weights only"
                )

    def quantizes_activations(self, module: str) -> bool:
        group = self._group(module)
        return not group or group.get("input_activations") is not None

    def fp8_block(self, module: str) -> tuple[int, int]:
        weights = _mapping("config_groups weights", self._group(module).get("weights"))
        return _block("config_groups weights.block_structure", weights.get("block_structure"))

    def fp8_grain(self, module: str) -> str | None:
        strategy = _mapping("config_groups weights", self._group(module).get("weights")).get("strategy")
        if strategy == "block":
            return "one scale for {} x {} weights".format(*self.fp8_block(module))
        return {"tensor": "one scale", "channel": "one scale for each output channel"}.get(str(strategy))

    def static_activations(self, module: str) -> bool:
        activations = self._group(module).get("input_activations")
        return isinstance(activations, Mapping) and activations.get("dynamic") is False

    def _group(self, module: str) -> Mapping[str, Any]:
        """The group of `config_groups` that names `module` most closely: by its name, a pattern, its class, in this
        order (`match_targets` of compressed-tensors); empty if none does.
        """
        groups = _mappings(self.fields, "config_groups")
        ranks = [_closeness(group.get("targets") or ["Linear"], module) for group in groups]
        return groups[ranks.index(min(ranks))] if groups and min(ranks) < _UNNAMED else {}

    @property
    def kv_cache_scheme(self) -> Mapping[str, Any] | None:
        return self.fields.get("kv_cache_scheme")


_UNNAMED = 3  # ranks of `_closeness` are below


def _closeness(targets: list[str], module: str) -> int:
    """How a compressed-tensors target list names `module`: 0 by its name or the end of it, 1 by `re:` and a pattern, 2
    by the class of linears.
    """
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"quantization_config.targets: expected a list of names, found {targets!r}")
    if any(target == module or module.endswith("." + target) for target in targets):
        return 0
    if any(target.startswith("re:") and _matches(target[3:], module) for target in targets):
        return 1
    return 2 if "Linear" in targets else _UNNAMED


def _override(fields: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Per-module settings: GPTQModel `dynamic` (regex, `+:` or `-:` prefixed), AutoRound `extra_config` (names, or
    regular expressions found anywhere)."""
    for pattern, values in _mapping("dynamic", fields.get("dynamic")).items():
        if not pattern.startswith("-:") and _matches(pattern.removeprefix("+:"), module):
            return values if isinstance(values, Mapping) else {}
    rules = _mapping("extra_config", fields.get("extra_config"))
    patterns = (rule for rule in rules if re.search(r"[^\w.\-]", rule) and _matches(f".*(?:{rule})", module))
    extra = rules.get(module if module in rules else next(patterns, ""))
    return extra if isinstance(extra, Mapping) else {}


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"quantization_config: {pattern!r} is no regular expression: {error}") from error


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    """`value`, empty when there is none."""
    if value and not isinstance(value, Mapping):
        raise ValueError(f"quantization_config.{name}: expected an object, found {value!r}")
    return value or {}


def _mappings(fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [_mapping(f"{name}.{key}", value) for key, value in _mapping(name, fields.get(name)).items()]


def _switch(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    return value if isinstance(value, bool) else None


def _block(name: str, value: Any) -> tuple[int, int]:
    sizes = value if isinstance(value, (list, tuple)) else str("128x128" if value is None else value).split("x")
    try:
        rows, columns = (size if type(size) is int else int(str(size)) for size in sizes)
    except ValueError:
        rows = columns = 0
    if rows <= 0 or columns <= 0:
        raise ValueError(f"quantization_config.{name}: expected two positive integers, found {value!r}")
    return rows, columns


def _integer(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"quantization_config.{name}: expected an integer, found {value!r}")
            return value
    return None
