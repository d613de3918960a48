"""Tiny models of every family that pages serve: random fp32 weights with a spread that makes greedy outputs diverse.

Sizes differ on purpose: head dimensions 8 to 32, MHA, GQA and MQA, windows smaller than the prompts, a softcap that
bites.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 96
EOS = 2
PAD = 0
WINDOW = 6  # smaller than every prompt of the tests

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "tie_word_embeddings": False,  # a tied head makes random models repeat their last token
    "eos_token_id": None,  # tests choose an eos that some rows meet
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW, "head_dim": 32},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4},
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {"rotary_pct": 0.5, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_inner": 96, "n_positions": 256},
    "mixtral": {**_MOE, "sliding_window": WINDOW},
    "gpt_oss": {**_MOE, "sliding_window": WINDOW, "head_dim": 16, "num_hidden_layers": 4},
    "olmo2": {"num_key_value_heads": 4},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 1.0},
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True},
}
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "gpt_oss", "starcoder2")
NEEDS_EAGER = ("gemma2", "gpt_oss")  # sdpa drops softcap and sinks: their truth is the model's own eager attention


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of `family` in eval mode; `changes` override its config."""
    own = FAMILIES[family]
    common = {} if family == "gpt2" else _COMMON
    if family == "gpt2":
        own = {
            **own,
            **{
                k: _COMMON[k]
                for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
            },
        }
    config = AutoConfig.for_model(family, **{**common, **own, **changes})
    attention = "eager" if family in NEEDS_EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    _spread(model, seed)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.eval()


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Random weights: matrices keep the scale of their input, vectors (norms, biases, sinks) get noise on top."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.add_(0.3 * noise)
            elif "lm_head" in name or "embed_out" in name:
                weight.copy_(0.3 * noise)  # flat enough that beams and samples differ from greedy
                weight[: EOS + 1] = 0.0  # pad, bos and eos hardly ever win: generate would take a pad for padding
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Random prompts that hold no special token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def exact_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the others multiply in 32 bits at most
    return exact


def assert_as_exact(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Two ways through a model in fp32 miss what it gives in fp64 by as much, but for the order of their sums."""
    error, allowed = ((x.double() - exact).abs().max() for x in (ours, theirs))
    assert 0 < allowed < 1e-3 * exact.abs().max()  # the truth is that of the same call
    assert error <= 4 * allowed


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a batch, as a tokenizer with padding_side="left" makes them."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.full((width - len(row),), PAD), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def cache_of(output: Any) -> Any:
    """The cache in what `generate` returned; Transformers 5.24 renamed the field."""
    return output["cache"] if "cache" in output else output["past_key_values"]
