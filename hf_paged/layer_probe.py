"""What a model's attention layers are, learned from what they pass to attention.

Families name the same thing differently in their configs (and tensor parallelism changes the head counts), but every
layer must call the attention function: what it passes there is the truth. Works on meta-device models too.
`PackedModel` runs the probe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.attention import AttentionCall

# Kinds of `config.layer_types` whose attention is fully described by causality and a sliding window.
_PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one attention layer stores and computes."""

    layer_idx: int
    name: str
    num_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None  # a query at position p attends to keys > p - window; None = all
    softcap: float | None
    has_sinks: bool
    dtype: torch.dtype  # of the keys, before any quantization
    device: torch.device


class LayerProbe:
    """An attention context that records and computes nothing."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}
        self.first: Tensor | None = None  # [n], the first layer's keys and values of the probe's token
        self.keys: dict[int, Tensor] = {}  # [kv_heads, head_dim] of the probe's token, by layer

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer_idx in self.specs:
            raise ValueError(
                f"{call.layer_name} attends more than once; pages hold the keys and values of one attention"
            )
        batch, num_heads, q_len, head_dim = call.query.shape
        self.specs[call.layer_idx] = LayerSpec(
            layer_idx=call.layer_idx,
            name=call.layer_name,
            num_heads=num_heads,
            kv_heads=call.key.shape[1],
            head_dim=head_dim,
            v_head_dim=call.value.shape[-1],
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
            dtype=call.key.dtype,
            device=call.key.device,
        )
        self.keys[call.layer_idx] = call.key[0, :, 0]
        if self.first is None:
            self.first = torch.cat([x[0, :, 0].flatten() for x in (call.key, call.value)])
        return call.value.new_zeros(batch, q_len, num_heads, call.value.shape[-1])


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, before any work, a model whose state does not live in keys and values.

    Raises:
        ValueError: encoder-decoder models, recurrent or convolutional state, attention that is not causal or not
            described by a sliding window, offloaded weights; the message names the model and what was found.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; paged generation serves decoder-only models")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _PAGED_LAYER_TYPES)
    if other:
        raise ValueError(f"{name} has layers of type {other}; paged are {', '.join(sorted(_PAGED_LAYER_TYPES))}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} is recurrent: its state is not keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends in both directions (use_bidirectional_attention)")
    if any(weight.is_meta for weight in model.parameters()) and any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError(f"{name} is offloaded: some of its weights are not in memory; load the model on one device")
