"""The checkpoints written by the real tools load, dequantize to the published hashes and answer as their reference."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_paged.kernels.fp8_linear import dequantize_fp8
from hf_paged.quant import formats
from hf_paged.quant.fp8 import Fp8Linear
from hf_paged.quant.linear import PackedLinear
from hf_paged.quant.pack import unpack
from hf_paged.quant.weight import dequantize

FOLDERS = (
    "autoawq-gemm-g128",
    "autoawq-gemv-g128",
    "autogptq-2bit-g64-asym",
    "autogptq-3bit-g128-sym",
    "autogptq-4bit-g128-actorder-static",
    "autogptq-4bit-g128-asym",
    "autogptq-4bit-g128-sym",
    "autogptq-4bit-g32-actorder",
    "autogptq-8bit-g128-sym",
    "gptqmodel-awq-gemm-g128",
    "gptqmodel-gptq-4bit-g128-sym",
    "gptqmodel-gptq-4bit-g32-actorder",
    "gptqmodel-gptq_v2-4bit-g128-asym",
    "llmcompressor-fp8-dynamic",
    "llmcompressor-fp8-static",
    "llmcompressor-gptq-w4a16-g128",
    "llmcompressor-w4a16-fp8kv",
)
WRAPPED = "autogptq-2bit-g64-asym"  # the one folder whose stored zeros wrapped: read masked, better than its own tool


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def _logits(model: PreTrainedModel, reference: dict[str, np.ndarray], prompt: int) -> Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(reference[f"input_ids.{prompt}"]).reshape(1, -1)).logits[0].float()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_real_checkpoint_loads_with_its_published_weights_and_logits(folder: str, shared: Path) -> None:
    """28 hashes of dequantized weights, bit for bit, from the model as it was loaded; then the logits."""
    path = shared / "checkpoints" / folder
    model = _load(path)
    hashes = json.loads((path / "reference.json").read_text())["dequant_sha256"]
    modules = dict(model.named_modules())
    for name, expected in hashes.items():
        if folder != WRAPPED:
            weight = _dequantized(modules[name.removesuffix(".weight")])
            assert hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest() == expected, name
    with np.load(path / "reference.npz") as stored:
        reference = dict(stored)
    for prompt in range(3):
        truth = torch.from_numpy(reference[f"logits.{prompt}"])
        error = (_logits(model, reference, prompt) - truth).abs()
        if "fp8-" in folder:  # activations are quantized: as far from the reference as the tool's own forward is
            tool = (torch.from_numpy(reference[f"tool_logits_fp16.{prompt}"]) - truth).abs()
            assert float(error.mean()) < 1.25 * float(tool.mean()) and float(error.max()) < 1.5 * float(tool.max())
        elif folder != WRAPPED:
            # the reference multiplied fp16-rounded weights (2 ** -12 each, 28 layers, logits up to 20): 1 / 256
            assert float(error.max()) < 4e-3, prompt


def _dequantized(module: torch.nn.Module) -> Tensor:
    if isinstance(module, Fp8Linear):
        return dequantize_fp8(module.fp8_weight, torch.float16)
    assert isinstance(module, PackedLinear)
    return dequantize(unpack(module.packed_weight), torch.float16)


def test_zeros_that_wrapped_at_two_bits_are_read_as_the_writer_meant(shared: Path) -> None:
    """Read as AutoGPTQ's code reads them they give its hashes and a worse model than read masked, on every prompt."""
    path = shared / "checkpoints" / WRAPPED
    hashes = json.loads((path / "reference.json").read_text())["dequant_sha256"]
    model = _load(path)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        for name, expected in hashes.items():
            name = name.removesuffix(".weight")
            module = model.get_submodule(name)
            tensors = {suffix: file.get_tensor(f"{name}.{suffix}") for suffix in module.layout.tensors}
            weight = dequantize(formats.read(name, module.layout, tensors, mask_zeros=False), torch.float16)
            assert hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest() == expected
    with np.load(path / "reference.npz") as stored, np.load(path.parent / "base-fp16" / "reference.npz") as base:
        for prompt in range(3):
            truth = torch.from_numpy(base[f"logits.{prompt}"]).log_softmax(-1)
            unmasked = torch.from_numpy(stored[f"logits.{prompt}"]).log_softmax(-1)
            masked = _logits(model, dict(stored), prompt).log_softmax(-1)
            kl = [float((truth.exp() * (truth - other)).sum(-1).mean()) for other in (masked, unmasked)]
            assert kl[0] < kl[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folder", ["autoawq-gemm-g128", "autogptq-4bit-g32-actorder"])
def test_sixteen_bit_activations_stay_near_the_reference(folder: str, dtype: torch.dtype, shared: Path) -> None:
    """AWQ in a bf16 model (vllm 1114, GPTQModel 2546): rounding grows with the dtype's step and with nothing else."""
    path = shared / "checkpoints" / folder
    model = _load(path, dtype)
    with np.load(path / "reference.npz") as stored:
        error = (_logits(model, dict(stored), 2) - torch.from_numpy(stored["logits.2"])).abs()
        size = float(torch.from_numpy(stored["logits.2"]).abs().max())
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert float(error.mean()) < 2 * step * size, "mean error beyond two steps of the largest logit"


@pytest.mark.parametrize(
    "folder",
    ["autoawq-gemv-g128", "autogptq-4bit-g32-actorder", "llmcompressor-w4a16-fp8kv", "llmcompressor-fp8-static"],
)
def test_saving_writes_the_file_that_was_read(folder: str, shared: Path, tmp_path: Path) -> None:
    """gptqmodel and vLLM read the saved folder only if the words are theirs; AutoGPTQ's zero biases alone are left
    out.
    """
    path = shared / "checkpoints" / folder
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model.save_pretrained(tmp_path)
    with safe_open(path / "model.safetensors", "pt") as old, safe_open(tmp_path / "model.safetensors", "pt") as new:
        names = {name for name in old.keys() if not name.endswith(".bias")}  # noqa: SIM118 (not a dict)
        assert names == set(new.keys())
        for name in names:
            before, after = old.get_tensor(name), new.get_tensor(name)
            assert before.dtype == after.dtype and torch.equal(before.view(torch.uint8), after.view(torch.uint8)), name
    configs = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (path, tmp_path)]
    if configs[0].pop("is_marlin_format", None) is False:  # GPTQModel ends at this key: the layout is named instead
        configs[0]["checkpoint_format"] = "gptq"
    assert configs[0] == configs[1]


def test_kv_cache_scales_are_read_and_kept_on_the_model(shared: Path) -> None:
    model = _load(shared / "checkpoints" / "llmcompressor-w4a16-fp8kv")
    scales = model.hf_paged_kv_scales
    assert len(scales) == 4
    assert all(0 < scales[f"model.layers.{layer}.self_attn"].k_scale[0] < 1 for layer in range(4))
