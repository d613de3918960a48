"""The conversion that Transformers runs on each quantized module while it streams a checkpoint in.

All tensors of one module (or of one projection of all experts) arrive together, as views of mapped files that nobody
has read (`force_cpu`: else threads copy them to their devices as fast as they can, far ahead of what is converted).
They are copied to their device, turned into the packed parameters there and freed: the peak is the packed model plus
one module on the device, and one module on the CPU. Errors are collected rather than raised, because Transformers would
bury them in its report; the loader raises them with the tensor's name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_paged.quant import formats
from hf_paged.quant.experts import PROJECTIONS, Fp8Stack, PackedStack
from hf_paged.quant.fp8 import FP8_SUFFIXES, Fp8Layout
from hf_paged.quant.header import torch_dtype
from hf_paged.quant.layout import PACKED_SUFFIXES, Layout
from hf_paged.quant.linear import PackedLinear, packed_parameters
from hf_paged.quant.mapped_files import MappedFiles
from hf_paged.quant.plan import Plan


def _on_cpu(name: str) -> torch.device:
    return torch.device("cpu")


class Repack(ConversionOps):
    """File tensors of one module -> its packed parameters."""

    def __init__(
        self, problems: list[str], files: MappedFiles, device_of: Callable[[str], torch.device] = _on_cpu
    ) -> None:
        """`device_of`: where a module, by its name, is to be."""
        self.problems, self.files, self.device_of = problems, files, device_of
        self.missing: set[str] = set()  # what has not been loaded yet, by Transformers' account
        self.failed: set[str] = set()  # modules of which a problem was told

    def __deepcopy__(self, memo: dict[int, Any]) -> Repack:
        return self  # Transformers copies the converter per module; the list of problems is one

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """`{source pattern: tensors}` -> `{parameter name: tensor}` of the module that owns `full_layer_name`."""
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        self.missing = missing_keys
        name = kwargs["full_layer_name"].rpartition(".")[0]
        module = model.get_submodule(name)
        tensors = {pattern.removesuffix("$").rpartition(".")[2]: values for pattern, values in input_dict.items()}
        device, every = self.device_of(name), [value for values in tensors.values() for value in values]
        self.files.will_be_read(every)
        moved = {suffix: [value.to(device) for value in values] for suffix, values in tensors.items()}
        parameters = self._parameters(name, module, moved)
        self.files.were_copied(every, device)
        out: dict[str, Tensor] = {}
        for suffix, value in parameters.items():
            if value is None:
                setattr(module, suffix, None)
                missing_keys.discard(f"{name}.{suffix}")
            else:
                out[f"{name}.{suffix}"] = nn.Parameter(value, requires_grad=False)
        return out

    def _parameters(self, name: str, module: nn.Module, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor | None]:
        assert isinstance(module, (PackedLinear, PackedStack, Fp8Stack)), type(module)
        for suffix, values in tensors.items():
            dtype = torch_dtype(module.layout.tensors[suffix].dtype)
            # Transformers casts what it streams; which dtype it asks for has changed between its releases
            assert all(value.dtype == dtype for value in values), f"{name}.{suffix} arrived as {values[0].dtype}"
        try:
            if isinstance(module, (PackedStack, Fp8Stack)):
                return module.read(name, tensors)
            one = {suffix: values[0] for suffix, values in tensors.items()}
            return packed_parameters(formats.read(name, module.layout, one))
        except ValueError as error:
            self.problems.append(str(error))
            self.failed.add(name)
            return {}


class Bring(Repack):
    """The weight of one FP8 linear, as it is in the file."""

    def _parameters(self, name: str, module: nn.Module, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor | None]:
        return {suffix: values[0] for suffix, values in tensors.items()}


class Keep(ConversionOps):
    """Leaves tensors as they are."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        return input_dict


class OneWay(WeightConverter):
    """`save_pretrained` gets the files' tensors from the loader: nothing is left to reverse."""

    __slots__ = ()

    def reverse_transform(self) -> WeightConverter:
        return WeightConverter(["(?!)"], ["none"], operations=[Keep()])


def converters(repack: Repack, plan: Plan) -> list[WeightConverter]:
    """One converter for linears and one per expert projection name; experts first, since the first match wins."""
    stacks = [layout for experts in plan.experts.values() for layout in experts.layouts.values()]
    fp8_experts = any(isinstance(layout, Fp8Layout) for layout in stacks)
    suffixes = dict.fromkeys([*PACKED_SUFFIXES, *(FP8_SUFFIXES if fp8_experts else ())])
    owners = [name.removesuffix(".experts") for name in plan.experts] if stacks and _has_weight(stacks[0]) else []
    made = []
    for projection in sum(PROJECTIONS, ()):
        sources = [f".experts.*.{projection}.{suffix}$" for suffix in suffixes if suffix != "weight"]
        sources += [f"{behind}.experts.*.{projection}.weight$" for behind in _behind(owners)]
        target = "weight" if fp8_experts else "packed"
        made.append(_lazy(sources, rf"\.experts\.{projection}\.{target}", repack))
    sources = [rf"\.{suffix}$" for suffix in PACKED_SUFFIXES]
    own = {name: linear.layout for name, linear in plan.linears.items() if _has_weight(linear.layout)}
    fp8 = [name for name, layout in own.items() if isinstance(layout, Fp8Layout)]
    sources += _weights_of([name for name in own if name not in set(fp8)])
    made.append(_lazy(sources, r"\.packed", repack))
    if fp8:
        bring = Bring(repack.problems, repack.files, repack.device_of)
        made.append(_lazy(_weights_of(fp8), r"\.weight", bring))
    return made


def _lazy(sources: list[str], target: str, operation: ConversionOps) -> WeightConverter:
    return OneWay(sources, target, operations=[operation], force_cpu=True)


def _weights_of(modules: list[str]) -> list[str]:
    return [rf"(?=\.weight$){behind}\.weight$" for behind in _behind(modules)]


def _has_weight(layout: Layout | Fp8Layout) -> bool:
    """Whether a tensor that is converted is called `weight`, as those of plain modules are."""
    return "weight" in layout.tensors


def _behind(modules: list[str]) -> list[str]:
    """Patterns of what follows one of these modules and no other. One for each length of a name, which is what Python
    can look back at; without the base model's prefix, which files may lack.
    """
    by_length: dict[int, list[str]] = defaultdict(list)
    for module in modules:
        prefix, _, name = module.partition(".")
        by_length[len(name or prefix)].append(re.escape(name or prefix))
    return [f"(?<={'|'.join(names)})" for names in by_length.values()]
