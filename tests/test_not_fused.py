"""What looks like a part of a model that is fused, and computes something else or is watched by somebody, stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import tiny_model
from test_fusion import assert_same_logits, fused_view, step_logits
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from hf_paged.fusion import fuse
from hf_paged.model_view import build_view


class PositionScaledAttention(LlamaAttention):
    """Scales queries far into the sequence (Llama 4): the same as Llama's up to some position."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
        far = kwargs["position_ids"] > 200
        cos, sin = position_embeddings
        stretch = torch.where(far, 1.1, 1.0).unsqueeze(-1)
        return super().forward(hidden_states, (cos * stretch, sin * stretch**0.5), **kwargs)


class ClampedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=0.5))


class LimitedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-20, 20))


class ShiftedNorm(LlamaRMSNorm):
    """eps outside the root: differs only for tiny rows."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        rms = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (rms + self.variance_epsilon**0.5)


@pytest.mark.parametrize(
    ("target", "cls", "component", "reason"),
    [
        ("self_attn", PositionScaledAttention, "attention", "rotation"),
        ("mlp", ClampedMLP, "MLP", "multiply"),
        ("input_layernorm", ShiftedNorm, "RMSNorm", "does not compute an RMSNorm"),
    ],
)
def test_a_module_that_looks_alike_and_computes_something_else_is_kept(
    target: str, cls: type[nn.Module], component: str, reason: str
) -> None:
    model = tiny_model("llama")
    getattr(model.model.layers[1], target).__class__ = cls
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    assert sum(report.component(component).kept.values()) == 1
    assert reason in next(iter(report.component(component).kept))
    assert_same_logits(step_logits(view), expected)


@pytest.mark.parametrize("clip", [None, 30.0])
def test_a_clamp_that_ordinary_values_never_meet_is_found(clip: float | None) -> None:
    """OLMo clips Q, K and V of rare outlier tokens; on everything else it is the pattern that is fused."""
    config = AutoConfig.for_model(
        "olmo", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        clip_qkv=clip,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    view, report = fused_view(model)
    assert report.component("attention").fused == (2 if clip is None else 0)
    assert_same_logits(step_logits(view), step_logits(build_view(model)))


def test_an_mlp_limit_that_ordinary_values_never_meet_is_found() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.__class__ = LimitedMLP
    assert sum(fused_view(model)[1].component("MLP").kept.values()) == 1


def test_hooked_modules_are_called_and_their_hooks_run() -> None:
    model = tiny_model("llama")
    calls = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(module)
        return output * 1.5

    layer = model.model.layers[0]
    for module in (layer.self_attn.k_proj, layer.post_attention_layernorm, layer.mlp.act_fn, layer.mlp):
        module.register_forward_hook(hook)
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    calls.clear()
    assert_same_logits(step_logits(view), expected)
    assert len(calls) >= 4
    kept = {name: report.component(name).kept for name in ("RMSNorm", "joined projections")}
    assert kept == {
        "RMSNorm": {"a LlamaRMSNorm has forward hooks": 1},
        "joined projections": {"a Linear has forward hooks": 1},
    }


def test_offloaded_modules_are_left_alone() -> None:
    accelerate = pytest.importorskip("accelerate.hooks")
    model = tiny_model("llama")
    layer = model.model.layers[2]
    for module in (layer.self_attn, layer.mlp, layer.self_attn.q_proj):
        accelerate.add_hook_to_module(module, accelerate.ModelHook())
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    assert report.component("attention").kept == {
        "the forward of a LlamaAttention is wrapped (offloaded or patched)": 1
    }
    assert report.component("MLP").fused == 2
    assert_same_logits(step_logits(view), expected)


def test_adapters_stay_in_the_path() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval().base_model.model
    expected = step_logits(build_view(adapted))
    view, report = fused_view(adapted)
    assert report.component("attention").fused == 3 and report.component("MLP").fused == 3
    reason = "peft.tuners.lora.layer.Linear is no linear that can be joined"
    assert report.component("joined projections").kept == {reason: 6}
    assert_same_logits(step_logits(view), expected)


def share_k_and_v(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight


def one_bias(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.ones(64))


@pytest.mark.parametrize(("change", "reason"), [(share_k_and_v, "shared"), (one_bias, "biases differ")])
def test_weights_that_cannot_be_rows_of_one_matrix_stay_apart(
    change: Callable[[PreTrainedModel], None], reason: str
) -> None:
    model = tiny_model("llama")
    change(model)
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    assert report.component("attention").fused == 3
    assert [reason in why for why in report.component("joined projections").kept] == [True]
    assert_same_logits(step_logits(view), expected)


def test_nothing_is_fused_without_values_or_in_training() -> None:
    with torch.device("meta"):
        meta = tiny_model_shell()
    assert "meta device" in str(fuse(build_view(meta)))
    assert "training mode" in str(fuse(build_view(tiny_model("llama").train())))


def tiny_model_shell() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    return model.eval()
