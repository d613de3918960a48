"""Models to measure speed on: a real one by its path, or the shape of a well-known one with random weights.

Speed does not depend on what the weights are, only on their shape, so no download is needed. The text means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

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


def load_bench_model(name: str, *, dtype: str = "auto", device: str | None = None) -> PreTrainedModel:
    """The model at the path `name`, or a random one when `name` is in `SHAPES` ("auto" = bf16 there).

    Its end token is taken away: every run generates as many tokens as was asked.

    Raises:
        OSError: neither a shape nor a model.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name in SHAPES:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                SHAPES[name], dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
