"""From a quantized weight to what a file of a known tool holds: its tensors, and the `quantization_config` beside them.

| format | tensors of a linear | read by |
| --- | --- | --- |
| awq | qweight qzeros scales (AutoAWQ `gemm`) | Transformers, vLLM, AutoAWQ, GPTQModel |
| gptq, gptq_v2 | qweight qzeros scales g_idx (zero - 1, or the zero) | Transformers, vLLM, GPTQModel |
| compressed-tensors | weight_packed weight_scale weight_shape, or weight (e4m3) weight_scale | Transformers, vLLM |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_paged.quant import formats
from hf_paged.quant.layout import Layout, TensorSpec
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import package_version
from hf_paged.quant.weight import QuantizedWeight, dequantize

_SUFFIXES = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq_v2": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
}
_KINDS = {"awq": "awq_gemm", "gptq": "gptq", "gptq_v2": "gptq", "compressed-tensors": "compressed"}


def file_tensors(base: str, form: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of the linear `base` by suffix, on the CPU. Raises ValueError for those that no reader would take."""
    layout = _layout(form, weight.codes.shape, weight.bits, weight.group_size)
    tensors = formats.write(layout, weight)
    try:
        formats.read(base, layout, tensors)
    except ValueError as error:
        raise ValueError(f"no file that holds {base} could be loaded, leave it plain with --skip: {error}") from error
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in tensors.items()}


def read_tensors(config: QuantizeConfig, base: str, tensors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """`[N, K]` dequantized: the linear `base` among tensors that `file_tensors` or `fp8_tensors` made."""
    own = {name.removeprefix(f"{base}."): value for name, value in tensors.items() if name.startswith(f"{base}.")}
    if config.method == "fp8":
        return own["weight"].float() * own["weight_scale"].float()
    assert config.bits is not None and config.group_size is not None
    group_size = shape[1] if config.group_size == -1 else min(config.group_size, shape[1])
    own = {suffix: own[suffix] for suffix in _SUFFIXES[config.format]}
    return dequantize(formats.read(base, _layout(config.format, shape, config.bits, group_size), own))


def _layout(form: str, shape: Sequence[int], bits: int, group_size: int) -> Layout:
    n, k = shape
    spec = TensorSpec(dtype="", shape=(n, -(-k // group_size)))  # the shape is that of a compressed-tensors scale
    return Layout(
        kind=_KINDS[form],
        in_features=k,
        out_features=n,
        bits=bits,
        group_size=group_size,
        zero_offset=1 if form == "gptq" else 0,
        tensors=dict.fromkeys(_SUFFIXES[form], spec),
    )


def fp8_tensors(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one FP8 linear: codes e4m3 `[N, K]`, scales `[N, 1]` in the model's dtype."""
    return {"weight": codes.cpu().contiguous(), "weight_scale": scales.to(dtype).cpu().contiguous()}


def quantization_config(
    config: QuantizeConfig, plain: Sequence[str], head: str | None, first: Sequence[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` of config.json. `plain`: weights inside decoder layers that are not quantized, `head`:
    the output embeddings, `first`: decoder layers whose inputs fp8 leaves in 16 bits, by their names in the files."""
    # the rule that GPTQModel reads for both methods, and vLLM for GPTQ
    dynamic: dict[str, Any] = {"dynamic": {f"-:^{re.escape(name)}$": {} for name in plain}} if plain else {}
    if config.format == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": config.bits,
            "group_size": config.group_size,
            "zero_point": True,  # a symmetric file holds the middle as its zero points: every reader takes those
            "modules_to_not_convert": list(plain) or None,
            **dynamic,
        }
    if config.format == "compressed-tensors":
        return _compressed_tensors(config, [*([head] if head else []), *plain], first)
    return {
        "quant_method": "gptq",
        "bits": config.bits,
        "group_size": config.group_size,
        "sym": config.sym,
        "desc_act": bool(config.act_order) and not config.static_groups,  # static groups lie in the natural order
        "lm_head": False,
        "checkpoint_format": config.format,
        "pack_dtype": "int32",
        "meta": {
            "quantizer": [f"hf_paged:{package_version()}"],
            "method": config.method,
            "damp_percent": config.damping,
            "static_groups": config.static_groups,
            "true_sequential": config.true_sequential,
            "mse": config.mse,
            "asymmetry": config.asymmetry,
            "descent": config.descent,
        },
        **dynamic,
    }


def _compressed_tensors(config: QuantizeConfig, ignore: Sequence[str], first: Sequence[str]) -> dict[str, Any]:
    fp8 = config.method == "fp8"
    form = "float-quantized" if fp8 else "pack-quantized"
    common = {"num_bits": 8, "symmetric": True, "type": "float" if fp8 else "int"}
    whole = config.group_size == -1
    weights = {
        **common,
        "dynamic": False,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else config.group_size,
    }
    group = {
        "targets": ["Linear"],
        "format": form,
        "weights": weights,
        "input_activations": {**common, "dynamic": True, "strategy": "token"} if fp8 else None,
        "output_activations": None,
    }
    groups = {"group_0": group}
    if fp8 and first:  # a pattern goes before a class, and holds for linears that a reader fuses, too
        targets = [f"re:^{re.escape(name)}\\." for name in first]
        groups["group_1"] = {**group, "targets": targets, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
