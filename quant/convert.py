"""The conversion that Transformers runs on each quantized module while it streams a checkpoint in.

All tensors of one module (or of one projection of all experts) arrive together, already on their device, are turned
into the packed parameters and freed: the peak is the packed model plus one module. Errors are collected rather than
raised, because Transformers would bury them in its report; the loader raises them with the tensor's name.
"""

from __future__ import annotations

import re
from typing import Any

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


class Repack(ConversionOps):
    """File tensors of one module -> its packed parameters."""

    def __init__(self, problems: list[str], files: MappedFiles) -> None:
        self.problems, self.files = problems, files

    def __deepcopy__(self, memo: dict[int, Any]) -> Repack:
        return self  # Transformers copies the converter per module; the list of problems is one

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """`{source pattern: tensors}` -> `{parameter name: tensor}` of the module that owns `full_layer_name`."""
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        name = kwargs["full_layer_name"].rpartition(".")[0]
        module = model.get_submodule(name)
        tensors = {pattern.removesuffix("$").rpartition(".")[2]: values for pattern, values in input_dict.items()}
        parameters = self._parameters(name, module, tensors)
        self.files.were_copied(value for values in tensors.values() for value in values)
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
            return {}

    @property
    def reverse_op(self) -> ConversionOps:
        return Keep()  # `save_pretrained` gets file tensors from the loader: nothing is left to reverse


class Keep(ConversionOps):
    """Leaves tensors as they are."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        return input_dict


def converters(problems: list[str], files: MappedFiles, plan: Plan) -> list[WeightConverter]:
    """One converter for linears and one per expert projection name; experts first, since the first match wins."""
    repack = Repack(problems, files)
    stacks = [layout for experts in plan.experts.values() for layout in experts.layouts.values()]
    fp8_experts = any(isinstance(layout, Fp8Layout) for layout in stacks)
    target = "weight" if fp8_experts else "packed"
    suffixes = [*PACKED_SUFFIXES, *(FP8_SUFFIXES if fp8_experts else ["weight"] if any(map(_is_int8, stacks)) else ())]
    made = []
    for projection in sum(PROJECTIONS, ()):
        sources = [f".experts.*.{projection}.{suffix}$" for suffix in dict.fromkeys(suffixes)]
        made.append(WeightConverter(sources, rf"\.experts\.{projection}\.{target}", operations=[repack]))
    sources = [rf"\.{suffix}$" for suffix in PACKED_SUFFIXES]
    # `weight` is a name of plain tensors, too: it is converted in modules that are called as an int8 one is
    leaves = {".".join(name.split(".")[-2:]) for name, linear in plan.linears.items() if _is_int8(linear.layout)}
    sources += [rf"(?<={re.escape(leaf)})\.weight$" for leaf in sorted(leaves)]
    return [*made, WeightConverter(sources, r"\.packed", operations=[repack])]


def _is_int8(layout: Layout | Fp8Layout) -> bool:
    return isinstance(layout, Layout) and layout.kind == "int8"
