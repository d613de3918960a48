"""Act-order in fused layers: norms and activations write channels as the weights behind them read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import PAD, tiny_model
from quant_files import Cell, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_paged
from hf_paged.fused_layer import FusedLayer
from hf_paged.fused_modules import FusedAttention, FusedMLP
from hf_paged.fusion import fuse
from hf_paged.model_view import build_view

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def forwards(view: PreTrainedModel, kind: type) -> list[object]:
    found = [vars(module).get("forward") for module in view.modules()]
    return [forward for forward in found if isinstance(forward, kind)]


def fused_view(folder: Path) -> PreTrainedModel:
    view = build_view(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=DEVICE).eval())
    report = fuse(view)
    assert report.component("decoder layer").fused == len(view.model.layers), str(report)
    return view


def generated(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    return model.generate(
        prompts.to(model.device),
        max_new_tokens=10,
        do_sample=False,
        pad_token_id=PAD,
        cache_implementation="paged",
        cache_config={"num_blocks": 64, "kv_cache_dtype": "int8"},
    ).cpu()


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2", "mixtral"])
@pytest.mark.parametrize("bits", [4, 8])
def test_fused_layers_with_act_order_give_the_tokens_of_the_dequantized_model(
    family: str, bits: int, tmp_path: Path
) -> None:
    """Joined projections, a fused QKV, norms after sub-layers, experts: an order that one side knows alone scrambles
    every channel."""
    hf_paged.register()
    truth = write_model(tiny_model(family), tmp_path, Cell(bits=bits, act_order=True)).to(DEVICE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=DEVICE)
    for rows in (1, 3):
        prompts = torch.arange(3, 3 + 9 * rows).reshape(rows, 9)
        assert torch.equal(generated(loaded, prompts), generated(truth, prompts))


def test_no_gather_is_left_but_that_of_attention_s_output(tmp_path: Path) -> None:
    """One more kernel before every product costs a decode step 8 to 15%."""
    write_model(tiny_model("llama"), tmp_path, Cell(act_order=True))
    view = fused_view(tmp_path)
    for layer in forwards(view, FusedLayer):
        assert isinstance(layer, FusedLayer)
        assert layer.input_norm is not None and layer.input_norm.order is not None
        assert layer.mlp_norm is not None and layer.mlp_norm.order is not None
    assert all(isinstance(mlp, FusedMLP) and mlp.down_order is not None for mlp in forwards(view, FusedMLP))


def test_weights_in_the_natural_order_and_hooked_ones_are_called_as_ever(tmp_path: Path) -> None:
    write_model(tiny_model("llama"), tmp_path / "natural", Cell())
    view = fused_view(tmp_path / "natural")
    for layer in forwards(view, FusedLayer):
        assert isinstance(layer, FusedLayer) and layer.input_norm is not None and layer.input_norm.order is None
    write_model(tiny_model("llama"), tmp_path / "hooked", Cell(act_order=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hooked", dtype=torch.float32).eval()
    seen: list[str] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append("down"))
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q"))
    view = build_view(model)
    fuse(view)
    first = forwards(view, FusedAttention)[0]
    assert isinstance(first, FusedAttention) and first.projections.order is None
    seen.clear()
    generated(model, torch.arange(3, 12)[None])
    assert set(seen) == {"down", "q"}
