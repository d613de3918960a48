"""Quantized checkpoints through `from_pretrained`, with no quantization package installed.

Transformers asks a quantizer to prepare the empty model, convert tensors while they stream in, and finish. Here the
header of the files is read first: it decides what every module becomes (`plan`), and everything a header can reveal is
an error before any weight is read. What only values reveal (NaN scales, impossible indices) is an error after the last
tensor and before the model is returned.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.quantizers.base import HfQuantizer

from hf_paged.kernels.packed_linear import fits_kernel
from hf_paged.kernels.packed_weight import field_bits
from hf_paged.private_transformers import skip_initialization
from hf_paged.quant.check import check_kernels, check_order, check_values, check_zeros
from hf_paged.quant.config import CheckpointConfig
from hf_paged.quant.convert import Repack, converters
from hf_paged.quant.experts import Fp8Stack, PackedExperts, PackedStack
from hf_paged.quant.fp8 import Fp8Layout, Fp8Linear
from hf_paged.quant.header import Header, read_header, torch_dtype
from hf_paged.quant.kv_scales import read_kv_scales
from hf_paged.quant.layout import Layout
from hf_paged.quant.linear import PackedLinear
from hf_paged.quant.mapped_files import MappedFiles
from hf_paged.quant.plan import Plan, Planner, refuse_problems
from hf_paged.quant.scaled_activation import ScaledActivation
from hf_paged.quant.sidecar import second_label

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class CheckpointLoader(HfQuantizer):
    """The quantizer for `awq`, `gptq`, `auto-round`, `compressed-tensors` and `fp8` checkpoints."""

    requires_calibration = True
    quantization_config: CheckpointConfig

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.problems: list[str] = []
        self.plan = Plan()
        self.device_map: Mapping[str, Any] = {}
        self.files = MappedFiles(())
        self.repack = Repack(self.problems, self.files)
        self.kept: dict[str, Tensor] = {}  # scales of the KV cache and of activations, written back at saving

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called once before the model is made, and again with what became of a `device_map` such as "auto"."""
        if isinstance(device_map, Mapping):
            self.device_map = device_map
        if getattr(self.quantization_config, "dequantize", False):
            raise ValueError(
                "dequantize=True is not supported here: hf_paged runs from packed weights; call "
                "hf_paged.unregister() to load with Transformers' own quantizer"
            )
        self.quantization_config.check()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError(
                "a quantized checkpoint is loaded from its files: a state_dict alone does not say its layout"
            )
        config = self.quantization_config
        beside = second_label(Path(checkpoint_files[0]).parent)
        if beside is not None:
            config.compare(type(config)(**beside))
        header = read_header(checkpoint_files, allow_bin=config.allow_bin)
        self.files = MappedFiles(checkpoint_files)
        self.plan = plan = Planner(model, header, config).make()
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
        with torch.device("meta"):
            for name, linear in plan.linears.items():
                model.set_submodule(name, self._linear(linear.layout, linear.bias, dtype))
            for name, experts in plan.experts.items():
                stacks = {key: _stack(layout, experts.experts) for key, layout in experts.layouts.items()}
                model.set_submodule(name, PackedExperts(model.get_submodule(name), stacks))
            for name, scales in plan.activations.items():
                scaled = ScaledActivation(model.get_submodule(name), scales.shape[0], torch_dtype(scales.dtype))
                model.set_submodule(name, scaled)
        _mark_initialized(model, [*plan.linears, *plan.experts])
        self._untie(model)
        self._keep_scales(model, header)
        _ignore(model, [*plan.unused, *self.kept])

    def _linear(self, layout: Layout | Fp8Layout, bias: bool, dtype: torch.dtype) -> PackedLinear | Fp8Linear:
        if isinstance(layout, Fp8Layout):
            return Fp8Linear(layout, bias=bias, dtype=dtype)
        scales = torch_dtype(layout.tensors[layout.scales_name].dtype)
        linear = PackedLinear(layout, bias=bias, dtype=dtype, scales_dtype=scales)
        linear.cpu_cache = self.quantization_config.cpu_cache
        return linear

    def _untie(self, model: PreTrainedModel) -> None:
        """A head with packed tensors of its own is not tied, whatever the config says."""
        tied = model.all_tied_weights_keys
        for key in [key for key in tied if key.rpartition(".")[0] in self.plan.linears]:
            del tied[key]
            model.config.get_text_config().tie_word_embeddings = False
            logger.info("%s is quantized in the file: it is not tied to %s", key, "the embeddings")

    def _keep_scales(self, model: PreTrainedModel, header: Header) -> None:
        kv_scales = {name: header.load(key) for name, key in self.plan.kv_scales.items()}
        self.kept = kv_scales | {name: header.load(key) for name, key in self.plan.kept.items()}
        if kv_scales:
            # a plain holder: no module, parameter or buffer
            model.__dict__["hf_paged_kv_scales"] = read_kv_scales(kv_scales)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, (PackedLinear, PackedStack, Fp8Linear, Fp8Stack)):
                module.locks = torch.zeros_like(module.locks)  # Transformers leaves buffers outside files uninitialised
                module.requires_grad_(False)
            if isinstance(module, PackedLinear) and _offloaded(module):
                module.cpu_cache = False  # the plain copy of a layer that lies on disk would stay in memory
            if isinstance(module, Fp8Linear):
                try:
                    with align_module_device(module, execution_device=_CPU if _offloaded(module) else None):
                        module.check(name)
                except ValueError as error:
                    self.problems.append(str(error))
                    self.repack.failed.add(name)
        self._cast_renamed(model)
        failed = self.repack.failed
        checks = (check_values, check_order, check_zeros)
        self.problems += self._never_loaded(model) or [text for check in checks for text in check(model, failed)]
        refuse_problems("used", self.problems)
        if self.quantization_config.self_check:
            check_kernels(model)
        if slow := without_kernel(model):
            logger.info(
                "no kernel cuts the groups of %d packed linears (%s, ...): a GPU dequantizes them at each call",
                len(slow),
                slow[0],
            )
        logger.info("%d packed linears, %d expert layers", len(self.plan.linears), len(self.plan.experts))

    def _cast_renamed(self, model: PreTrainedModel) -> None:
        """Transformers before 5.23 leaves plain tensors that have another name in the file in the file's dtype: a
        router in fp16 fails beside bf16 activations.
        """
        kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
        for name, dtype in self.plan.renamed.items():
            value = model.get_parameter_or_buffer(name)
            if value.is_floating_point() and value.device.type != "meta" and not any(part in name for part in kept):
                value.data = value.data.to(dtype)

    def _device_of(self, module: str) -> torch.device:
        """Where `module` is converted: on its device, or for the disk on the CPU."""
        while module and module not in self.device_map:
            module = module.rpartition(".")[0]
        place = self.device_map.get(module, "cpu")
        return torch.device("cpu" if place == "disk" else place)

    def _never_loaded(self, model: PreTrainedModel) -> list[str]:
        """What would have been left random: the plan found it in the file, so its name was lost on the way."""
        fine = [*model.all_tied_weights_keys, *dict(model.named_buffers())]
        ignored = "|".join(model._keys_to_ignore_on_load_missing or ()) or "$^"
        return [
            f"tensor {name} is in the file, but was not loaded: report it with the model's config.json"
            for name in sorted(self.repack.missing.difference(fine))
            if re.search(ignored, name) is None and name.rpartition(".")[0] not in self.repack.failed
        ]

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *args: Any, **kwargs: Any
    ) -> list[WeightTransform]:
        self.repack = Repack(self.problems, self.files, self._device_of)
        return [*converters(self.repack, self.plan), *weight_conversions]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Asked by Transformers >= 5.23 for each tensor; None keeps the file's dtype. What is repacked keeps it: all
        tensors of a module arrive under the name of its packed words, and its scales would be cast to int32."""
        if any(isinstance(operation, Repack) for operation in getattr(converter, "operations", ())):
            return None
        name = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype).removeprefix("torch.")
        return dtype if name.upper().startswith(("F", "B")) and name != "BOOL" else None

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state dict in the layout of the files this model came from, packed tensors on the CPU."""
        state = dict(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                _replace(state, name, module, [(name, _materialised(module))])
            elif isinstance(module, (PackedStack, Fp8Stack)):
                parent, _, projection = name.rpartition(".")
                experts = enumerate(module.file_tensors())
                _replace(state, name, module, [(f"{parent}.{e}.{projection}", tensors) for e, tensors in experts])
        return state | self.kept, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def without_kernel(model: nn.Module) -> list[str]:
    """Names of packed linears whose groups no kernel can cut."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear)
        and not fits_kernel(field_bits(module.layout.bits), module.layout.group_size, module.in_features)
    ]


def _stack(layout: Layout | Fp8Layout, experts: int) -> PackedStack | Fp8Stack:
    if isinstance(layout, Fp8Layout):
        return Fp8Stack(layout, experts)
    return PackedStack(layout, experts, torch_dtype(layout.tensors[layout.scales_name].dtype))


def _ignore(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Tell this model (not its class) that these file tensors are rightly unused."""
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = known | {f"^{name.replace('.', chr(92) + '.')}$" for name in names}


def _mark_initialized(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Keep `_init_weights` off the replaced modules and off parents that only hold them: some (GPT-2's attention)
    initialise `self.c_proj.weight`, which is gone. The plan saw to it that nothing is left to initialise."""
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        own = [*parent.parameters(recurse=False), *parent.buffers(recurse=False)]
        for module in [model.get_submodule(name), *([] if own else [parent])]:
            skip_initialization(module)


def _offloaded(module: nn.Module) -> bool:
    return any(value.device.type == "meta" for value in module.parameters())


def _materialised(module: PackedLinear) -> dict[str, Tensor]:
    if not _offloaded(module):
        return module.file_tensors()
    with align_module_device(module, execution_device=_CPU):
        return module.file_tensors()


def _replace(
    state: dict[str, Tensor], name: str, module: nn.Module, parts: Sequence[tuple[str, dict[str, Tensor]]]
) -> None:
    for suffix in module.state_dict():
        state.pop(f"{name}.{suffix}", None)
    for part, tensors in parts:
        state.update({f"{part}.{suffix}": value.detach().cpu().contiguous() for suffix, value in tensors.items()})
