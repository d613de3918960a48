"""From a checkpoint's header and an empty model: what becomes of every module, or the list of everything that is wrong.

What the file holds decides: a linear whose packed tensors are there becomes a packed linear, one whose plain weight is
there stays as it is, one with neither is an error, whatever skip lists, `dynamic` rules or tied-weight flags say.
Nothing is left for Transformers to initialise at random. All problems are collected, so one load shows them all.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_paged.quant.config import CheckpointConfig
from hf_paged.quant.consistency import Promises, grain, misread, promised_grain
from hf_paged.quant.experts import PROJECTIONS, is_fused_experts
from hf_paged.quant.fp8 import FP8_SUFFIXES, Fp8Layout, identify_fp8
from hf_paged.quant.header import Header
from hf_paged.quant.kv_scales import is_kv_scale
from hf_paged.quant.layer_linears import linear_shape
from hf_paged.quant.layout import FLOATS, PACKED_SUFFIXES, REMEDY, Layout, TensorSpec, identify
from hf_paged.quant.zero_points import common_offset

logger = logging.getLogger(__name__)

_SHOWN = 8  # problems listed in one error
_ACTIVATIONS = ("input_scale", "input_zero_point")  # beside integer weights: activations stay in 16 bits
_QUANTIZED_SUFFIXES = {*PACKED_SUFFIXES, *FP8_SUFFIXES[1:], *_ACTIVATIONS}


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """One linear to replace. `bias`: the file has a bias that matters."""

    layout: Layout | Fp8Layout
    bias: bool


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan:
    """One experts module to replace: a layout per projection (gate, up, down), shared by its experts."""

    layouts: Mapping[str, Layout | Fp8Layout]
    experts: int


@dataclass(kw_only=True)
class Plan:
    linears: dict[str, LinearPlan] = field(default_factory=dict)
    experts: dict[str, ExpertsPlan] = field(default_factory=dict)
    activations: dict[str, TensorSpec] = field(default_factory=dict)  # those that AWQ scales, with their scales
    renamed: dict[str, torch.dtype] = field(default_factory=dict)  # plain, of another name in the file -> the model's
    kv_scales: dict[str, str] = field(default_factory=dict)  # model name -> tensor in the file
    kept: dict[str, str] = field(default_factory=dict)  # likewise, what integer weights do not need: written back
    unused: list[str] = field(default_factory=list)  # model names of file tensors that are rightly left out


class Planner:
    """Makes the plan of one model; `problems` are sentences."""

    def __init__(self, model: PreTrainedModel, header: Header, config: CheckpointConfig) -> None:
        self.model, self.header, self.config = model, header, config
        self.modules = dict(model.named_modules())
        self.state = model.state_dict()
        self.plan = Plan()
        self.problems: list[str] = []
        self.failed: dict[str, int] = {}  # module -> which problem is its
        conversions = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self.has_order = any(key.endswith(".weight_g_idx") for key in header.specs)
        self.scales: dict[str, list[str]] = defaultdict(list)  # their names in the file, by what they scale
        self.lost_order = False
        self.promises = Promises()
        self.gptq: dict[str, Layout] = {}  # by the module's name in the file
        self.file_name: dict[str, str] = {}  # model name -> name in the file, for the tensors of quantized modules

    def make(self) -> Plan:
        """The plan. Raises ValueError listing every problem found (the first few in full)."""
        quantized, plain = self._sort_tensors()
        experts: dict[str, dict[str, dict[int, Mapping[str, TensorSpec]]]] = defaultdict(lambda: defaultdict(dict))
        for name, found in quantized.items():
            match = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", name)
            if match and is_fused_experts(self.modules.get(match[1])) and match[3] in sum(PROJECTIONS, ()):
                experts[match[1]][match[3]][int(match[2])] = found
            else:
                self._attempt(name, self._plan_linear, found)
        for name, projections in experts.items():
            self._attempt(name, self._plan_experts, projections)
        self._check_plain(plain, planned={*quantized, *experts})
        self._check_others(plain)
        refuse_problems("loaded", self.problems)
        if self.lost_order:
            logger.warning(
                "quantization_config says act-order, and the file has no weight_g_idx at all: channels are taken in "
                "their natural order, which is wrong if the tool did reorder them"
            )
        self._settle_zero_points()
        return self.plan

    def _settle_zero_points(self) -> None:
        """Tell every GPTQ layer what all of them together say about their zero points."""
        offset = common_offset(self.header, self.gptq)

        def settled(layout: Layout | Fp8Layout) -> Layout | Fp8Layout:
            return replace(layout, stored_offset=offset) if isinstance(layout, Layout) else layout

        for name, linear in self.plan.linears.items():
            self.plan.linears[name] = replace(linear, layout=settled(linear.layout))
        for name, experts in self.plan.experts.items():
            layouts = {projection: settled(layout) for projection, layout in experts.layouts.items()}
            self.plan.experts[name] = replace(experts, layouts=layouts)

    def _attempt(self, name: str, step: Callable[[str, Any], None], found: Any) -> None:
        try:
            step(name, found)
        except ValueError as error:
            self.failed[name] = len(self.problems)
            self.problems.append(str(error))

    def _failed(self, module: str) -> str | None:
        """Of the modules that have a problem already the one that is or holds `module`."""
        return next((name for name in self.failed if f"{module}.".startswith(f"{name}.")), None)

    def _sort_tensors(self) -> tuple[dict[str, dict[str, TensorSpec]], dict[str, TensorSpec]]:
        """File tensors by model name: those of quantized modules as {module: {suffix: spec}}, and the plain ones."""
        quantized: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
        plain: dict[str, TensorSpec] = {}
        biases: dict[str, tuple[str, TensorSpec]] = {}
        for key, spec in self.header.specs.items():
            renamed = self._rename(key)
            module, _, suffix = renamed.rpartition(".")
            if is_kv_scale(renamed):
                self.plan.kv_scales[renamed] = key
            elif (
                suffix in _QUANTIZED_SUFFIXES or spec.dtype.startswith("F8") or (suffix, spec.dtype) == ("weight", "I8")
            ):
                quantized[module][suffix] = spec
                self.file_name[renamed] = key
            elif suffix == "bias":
                biases[module] = (key, spec)
            else:
                plain[key] = spec
        for module, (key, spec) in biases.items():
            if module in quantized:
                quantized[module]["bias"] = spec
                self.file_name[f"{module}.bias"] = key
            else:
                plain[key] = spec
        return quantized, plain

    def _rename(self, key: str) -> str:
        """The model's name of a file tensor that needs no conversion (`model.` prefix added or removed)."""
        renamed, _ = rename_source_key(key, self.renamings, [])
        prefix = self.model.base_model_prefix
        module = renamed.rpartition(".")[0]
        owner = re.sub(r"\.\d+\.\w+$", "", module)
        if module in self.modules or owner in self.modules or not prefix:
            return str(renamed)
        for other in (f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")):
            owner = other.rpartition(".")[0]
            if owner in self.modules or re.sub(r"\.\d+\.\w+$", "", owner) in self.modules:
                return str(other)
        return str(renamed)

    def _plan_linear(self, name: str, found: dict[str, TensorSpec]) -> None:
        module = self.modules.get(name)
        if module is None:
            if self._ignored(f"{name}.weight") or self._belongs_to_a_head(name, found):
                self.plan.unused += [f"{name}.{suffix}" for suffix in found]
                return
            suffix, spec = next(iter(found.items()))
            raise ValueError(f"tensor {name}.{suffix} ({spec}) belongs to no module of {type(self.model).__name__}")
        if found.keys() == {"scales"} and not list(module.parameters()):
            self._plan_activation(name, found["scales"])
            return
        shape = _linear_shape(module)
        if shape is None:
            suffix, spec = next(iter(found.items()))
            raise ValueError(
                f"tensor {name}.{suffix} ({spec}): expected a linear layer, found {type(module).__name__}; "
                "quantized embeddings and convolutions are not read"
            )
        n, k = shape
        bias = found.pop("bias", None)
        layout = self._layout(name, found, k, n)
        keep = bias is not None and self._keeps_bias(name, bias, module, n)
        if bias is None and getattr(module, "bias", None) is not None:
            raise ValueError(f"tensor {name}.bias is missing: expected [{n}]")
        self.plan.linears[name] = LinearPlan(layout=layout, bias=keep)

    def _belongs_to_a_head(self, name: str, found: Mapping[str, TensorSpec]) -> bool:
        """Whether the model is the base of the one in the file (`AutoModel`), and the module is what lies on it."""
        prefix = f"{self.model.base_model_prefix}."
        based = any(key.startswith(prefix) for key in self.header.specs)
        return self.model.base_model is self.model and based and not self._label_name(name, found).startswith(prefix)

    def _plan_activation(self, name: str, spec: TensorSpec) -> None:
        siblings = self.modules[name.rpartition(".")[0]].children()
        widths = {shape[1] for shape in map(_linear_shape, siblings) if shape is not None}
        if spec.dtype not in FLOATS or spec.shape not in {(width,) for width in widths}:
            raise ValueError(
                f"tensor {name}.scales: expected {' or '.join(FLOATS)}, one for each input of the linear behind the "
                f"activation ({sorted(widths)}), found {spec}"
            )
        self.plan.activations[name] = spec

    def _layout(self, name: str, found: Mapping[str, TensorSpec], k: int, n: int) -> Layout | Fp8Layout:
        config, label_name = self.config, self._label_name(name, found)
        label = config.label(label_name)
        if found.get("weight", TensorSpec(dtype="", shape=())).dtype.startswith("F8"):
            return self._fp8_layout(name, label_name, found, k, n)
        for suffix in _ACTIVATIONS:
            if found.get(suffix) is not None:
                self.plan.kept[f"{name}.{suffix}"] = self.file_name[f"{name}.{suffix}"]
        weights = {suffix: spec for suffix, spec in found.items() if suffix not in _ACTIVATIONS}
        if label.act_order and not self.has_order and label.method == "compressed-tensors":
            self.lost_order = True  # asked for and never filled in, it is left out everywhere
            label = replace(label, act_order=False)
        layout = identify(name, weights, k, n, label)
        self.promises.note(f"{name}.{layout.codes_name}", f"a layout of {label.method}", f"a layout of {layout.method}")
        scales = f"{name}.{layout.scales_name}"
        self.scales[f"{layout.kind} {layout.bits}"].append(self.file_name[scales])
        self.promises.note(scales, promised_grain(label.group_size, k), grain(layout, label.group_size))
        if layout.kind == "gptq":
            self.gptq[label_name] = layout
        return layout

    def _fp8_layout(self, name: str, label_name: str, found: Mapping[str, TensorSpec], k: int, n: int) -> Fp8Layout:
        config = self.config
        if config.label(label_name).method == "compressed-tensors" and config.label(label_name).bits is not None:
            raise ValueError(f"tensor {name}.weight: quantization_config says integers, found {found['weight']}")
        block, activations = config.fp8_block(label_name), config.quantizes_activations(label_name)
        layout = identify_fp8(name, found, k, n, block=block, quantize_activations=activations)
        promised = config.fp8_grain(label_name)
        if promised == "one scale for {} x {} weights".format(*block) and n <= block[0] and k <= block[1]:
            promised = None  # one block is one scale
        self.scales["fp8"].append(self.file_name[f"{name}.{layout.scale_name}"])
        self.promises.note(f"{name}.{layout.scale_name}", promised, grain(layout))
        static = "a scale of the activations" if config.static_activations(label_name) else None
        self.promises.note(
            f"{name}.input_scale", static, "a scale of the activations" if layout.static_name else "none"
        )
        return layout

    def _label_name(self, name: str, found: Mapping[str, TensorSpec]) -> str:
        """The module's name in the file, which is what the config's rules speak of."""
        suffix = next(iter(found))
        return self.file_name.get(f"{name}.{suffix}", f"{name}.{suffix}").removesuffix(f".{suffix}")

    def _keeps_bias(self, name: str, spec: TensorSpec, module: nn.Module, out_features: int) -> bool:
        if spec.dtype not in FLOATS or spec.shape != (out_features,):
            raise ValueError(f"tensor {name}.bias: expected {' or '.join(FLOATS)} [{out_features}], found {spec}")
        if getattr(module, "bias", None) is not None:
            return True
        value: Tensor = self.header.load(self.file_name[f"{name}.bias"])
        if bool((value == 0).all()):  # AutoGPTQ writes a zero bias for every linear
            self.plan.unused.append(f"{name}.bias")
            return False
        return True

    def _plan_experts(self, name: str, projections: Mapping[str, Mapping[int, Mapping[str, TensorSpec]]]) -> None:
        module = self.modules[name]
        count = int(module.num_experts)
        names = next((names for names in PROJECTIONS if set(names) == set(projections)), None)
        if names is None:
            raise ValueError(
                f"experts {name}: expected projections {' or '.join(map(str, PROJECTIONS))}, found {tuple(projections)}"
            )
        if getattr(module, "is_transposed", False) or getattr(module, "has_bias", False):
            raise ValueError(
                f"experts {name}: {type(module).__name__} with transposed or biased projections is not read"
            )
        _, two_inner, hidden = module.gate_up_proj.shape
        shapes = dict(zip(names, [(hidden, two_inner // 2), (hidden, two_inner // 2), (two_inner // 2, hidden)]))
        layouts: dict[str, Layout | Fp8Layout] = {}
        for projection in names:
            made = []
            for expert in range(count):
                found = projections[projection].get(expert)
                if found is None:
                    raise ValueError(f"tensors of {name}.{expert}.{projection} are missing: expected {count} experts")
                made.append(self._layout(f"{name}.{expert}.{projection}", found, *shapes[projection]))
            alike = all(layout == made[0] for layout in made)
            layouts[projection] = common = made[0] if alike else max(made, key=made.count)  # the first may be damaged
            for expert, layout in enumerate(made):
                if layout != common:
                    raise ValueError(
                        f"tensors of {name}.{expert}.{projection}: expected the layout of the other experts "
                        f"({_tensors(common)}), found {_tensors(layout)}; experts of one layer must share it"
                    )
        self.plan.experts[name] = ExpertsPlan(layouts=layouts, experts=count)

    def _check_others(self, plain: Mapping[str, TensorSpec]) -> None:
        """What is wrong only in comparison with the other tensors of the file."""
        told = self.promises.problems()
        self.problems += [text for module, text in told.items() if self._failed(module) is None]
        if not self.problems:  # it reads tensors: not before they are known to be readable
            self.problems += misread(self.header, self.scales.values(), plain)

    def _check_plain(self, plain: Mapping[str, TensorSpec], planned: set[str]) -> None:
        """Every plain tensor fits its parameter, and every parameter left to the file is in it. `planned`: modules with
        packed tensors; what is wrong with them was said."""
        present: set[str] = set()
        beside: dict[str, list[str]] = defaultdict(list)  # module -> tensors that are no parameters of it
        prefix = self.model.base_model_prefix
        for key, spec in plain.items():
            renamed, pattern = rename_source_key(key, self.renamings, self.converters, prefix, self.state)
            present.add(renamed)
            expected = self.state.get(renamed)
            if expected is not None and pattern is None and renamed != key:
                self.plan.renamed[renamed] = expected.dtype
            owner = self._rename(key).rpartition(".")[0]
            failed = self._failed(owner)
            if failed is not None:  # one problem for each module
                self.problems[self.failed[failed]] += f"; beside it {key} ({spec})"
                continue
            if owner in planned or re.sub(r"\.\d+\.\w+$", "", owner) in planned:
                self.problems.append(
                    f"tensor {key} ({spec}) belongs to no layout that is read, beside the packed tensors of its module"
                )
                continue
            if expected is None:
                beside[owner].append(key)
            if expected is None or pattern is not None:
                continue  # not ours: Transformers reports unexpected tensors, and checks what it converts
            if tuple(expected.shape) != spec.shape or (spec.dtype[0] in "FB") != expected.is_floating_point():
                self.problems.append(
                    f"tensor {key}: expected {str(expected.dtype).removeprefix('torch.')} "
                    f"{list(expected.shape)}, found {spec}"
                )
        tied = set(getattr(self.model, "all_tied_weights_keys", {}))
        for name, value in self.state.items():
            module = name.rpartition(".")[0]
            if module in planned or name in present or name in tied or self._ignored(name, missing=True):
                continue
            found = f"; found {', '.join(sorted(beside[module]))}: {REMEDY}" if module in beside else ""
            self.problems.append(f"tensor {name} is missing: expected {list(value.shape)}{found}")

    def _ignored(self, name: str, *, missing: bool = False) -> bool:
        kind = "_keys_to_ignore_on_load_missing" if missing else "_keys_to_ignore_on_load_unexpected"
        return any(re.search(pattern, name) for pattern in getattr(self.model, kind, None) or ())


def refuse_problems(verb: str, problems: Sequence[str]) -> None:
    """Raise one ValueError that lists the problems, the first few in full, unless there are none."""
    problems = list(dict.fromkeys(problems))
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"this checkpoint cannot be {verb} ({count}):\n  {shown}{more}")


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """`linear_shape` of the modules that a packed linear can replace; a router may only look like one."""
    own_forward = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    return None if own_forward else linear_shape(module)


def _tensors(layout: Layout | Fp8Layout) -> str:
    return ", ".join(f"{suffix} {spec}" for suffix, spec in layout.tensors.items())
