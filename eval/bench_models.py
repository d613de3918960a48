"""Models to measure speed on: a real one by its path, or the shape of a well-known one with random weights.

Speed does not depend on what the weights are, only on their shape, so no download is needed. The text means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_paged.private_transformers import initialize
from hf_paged.quant.layout import Layout
from hf_paged.quant.linear import PackedLinear

_LLAMA_3 = {"vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
_SMOLLM2 = {"vocab_size": 49152, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}


def _llama(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, context: int, **other: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        **other,
    )


SHAPES = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 4096),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 4096),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, 4096),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 8192, **_LLAMA_3),
    "smollm2": _llama(30, 576, 1536, 9, 3, 8192, tie_word_embeddings=True, **_SMOLLM2),
}


def load_bench_model(
    name: str, *, dtype: str = "auto", device: str | None = None, weight_bits: int | None = None
) -> PreTrainedModel:
    """The model at the path `name`, or a random one when `name` is in `SHAPES` ("auto" = bf16 there).

    Its end token is taken away: every run generates as many tokens as was asked.

    Args:
        weight_bits: of a shape's linears, stored as GPTQ does (groups of 128, symmetric); None = plain weights.

    Raises:
        OSError: neither a shape nor a model.
        ValueError: `weight_bits` for a model that is no shape.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name in SHAPES:
        made = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        model = _random_model(SHAPES[name], made, device, weight_bits)
    elif weight_bits is not None:
        raise ValueError(f"weight_bits={weight_bits} is for {', '.join(SHAPES)}; {name} has weights of its own")
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _random_model(config: LlamaConfig, dtype: torch.dtype, device: str, weight_bits: int | None) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if weight_bits is not None:
            for name, linear in list(model.model.named_modules(prefix="model")):
                if isinstance(linear, nn.Linear):
                    model.set_submodule(name, _empty_packed(linear, weight_bits, dtype))
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            _fill(module)
        else:
            initialize(model, module)
    model.tie_weights()
    return model


def _empty_packed(linear: nn.Linear, bits: int, dtype: torch.dtype) -> PackedLinear:
    layout = Layout(
        kind="gptq", in_features=linear.in_features, out_features=linear.out_features,
        bits=bits, group_size=128, zero_offset=1, tensors={},
    )  # fmt: skip
    packed = PackedLinear(layout, bias=False, dtype=dtype, scales_dtype=torch.float16)
    packed.zeros = packed.perm = None
    return packed


@torch.no_grad()
def _fill(linear: PackedLinear) -> None:
    """Uniform codes, and scales with which an output is about as large as an input."""
    linear.packed.random_(-(1 << 31), 1 << 31)
    spread = 2**linear.layout.bits / 12**0.5  # standard deviation of the codes
    linear.scales.uniform_(0.75, 1.25).div_(spread * linear.in_features**0.5)
    linear.locks.zero_()
