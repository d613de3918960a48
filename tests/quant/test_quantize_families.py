"""Every family quantizes from its files, loads back, and holds what was measured while it was quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import FAMILIES, VOCAB, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_paged.quant import quantize as quantize_file
from hf_paged.quant.experts import PackedExperts
from hf_paged.quant.linear import PackedLinear
from hf_paged.quant.quantize import quantize
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import QuantizeReport

_SIZES = {"gpt2": {"n_inner": 128}, "gemma2": {"head_dim": 32}, "gemma3_text": {"head_dim": 32}}
_PLAIN_EXPERTS = ("gpt_oss",)  # fused in the file, with biases


def calibration(samples: int = 6, seqlen: int = 32, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, (samples, seqlen), generator=torch.Generator().manual_seed(7))


def saved(family: str, folder: Path) -> PreTrainedModel:
    model = tiny_model(family, intermediate_size=128, **_SIZES.get(family, {}))
    model.save_pretrained(folder)
    return model


def run(folder: Path, out: Path, **settings: object) -> QuantizeReport:
    group_size = -1 if settings["method"] == "fp8" else 32
    config = QuantizeConfig(**{"group_size": group_size, **settings})  # type: ignore[arg-type]
    return quantize(folder, config, calibration() if config.calibrated else None, output=out, device="cpu")


def load(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=like.config._attn_implementation
    ).eval()


@torch.no_grad()
def kl_divergence(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Mean over positions of KL(model || other), in nats."""
    ids = calibration(4, 24)
    p, q = (m(ids, use_cache=False).logits.double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


# Nats that 8 bits may cost. These random models are chaotic: 4 bits cost 0.1 to 0.6, each bit fewer 4 times that. Where
# a token meets another expert is a jump that the last bit of a sum decides, so what experts cost changes with the CPU.
# One matrix with its columns moved by one costs 0.04 (Gemma) to 0.9 (GPT-OSS).
_ALLOWED = {"gptq": 0.01, "awq": 0.01, "fp8": 0.1}
_ALLOWED_WITH_EXPERTS = {"gptq": 0.1, "awq": 0.1, "fp8": 0.4}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("method", sorted(_ALLOWED))
def test_a_family_loads_back_with_every_linear_quantized_and_its_function_kept(
    family: str, method: str, tmp_path: Path
) -> None:
    model = saved(family, tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "out", method=method, bits=8)
    loaded = load(tmp_path / "out", model)
    plain = [
        name
        for name, module in loaded.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not loaded.get_output_embeddings()
    ]
    assert not plain
    experts = "num_local_experts" in FAMILIES[family]
    if experts:
        packed = any(isinstance(module, PackedExperts) for module in loaded.modules())
        assert packed is (family not in _PLAIN_EXPERTS)
        assert any("experts" in name for name in report.plain) is (family in _PLAIN_EXPERTS)
    change = kl_divergence(model, loaded)
    assert change < (_ALLOWED_WITH_EXPERTS if experts else _ALLOWED)[method], change
    assert all(linear.error < 0.002 for layer in report.layers for linear in layer.linears)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "cohere", "gemma2", "olmo2", "mixtral"])
def test_awq_scales_go_where_the_family_can_absorb_them_and_nowhere_else(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "out", method="awq")
    kept_out = {
        linear.name for layer in report.layers for linear in layer.linears if linear.note and "kept out" in linear.note
    }
    expected = {
        "llama": set(),
        "gpt2": {"mlp.c_proj"},  # after a GELU, which no scale passes
        "phi3": set(),
        "gpt_neox": {"mlp.dense_4h_to_h"},
        "cohere": set(),
        "gemma2": set(),
        "olmo2": {
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        },  # no norm before
        "mixtral": set(),  # the norm feeds the router and all experts, which are scaled together
    }
    assert kept_out == expected[family]


def test_rtn_and_int8_need_no_calibration_and_keep_the_function(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "model")
    for method in ("rtn", "int8"):
        report = run(tmp_path / "model", tmp_path / method, method=method, bits=8)
        loaded = load(tmp_path / method, model)
        assert kl_divergence(model, loaded) < 0.02
        assert sum(isinstance(module, PackedLinear) for module in loaded.modules()) == 21
        assert report.calibration is None and all(layer.error is None for layer in report.layers)
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_scales_are_absorbed_in_16_bits_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU layers run in the model's dtype: rounding must not hide that a candidate holds."""
    model = tiny_model(family, intermediate_size=128, num_hidden_layers=2, **_SIZES.get(family, {}))
    model.bfloat16().save_pretrained(tmp_path / "model")
    begin = quantize_file._Run.__init__

    def in_stored_dtype(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.dtype = self.stored

    monkeypatch.setattr(quantize_file._Run, "__init__", in_stored_dtype)
    report = run(tmp_path / "model", tmp_path / "out", method="awq")
    assert not any("kept out" in note for note in report.notes())
