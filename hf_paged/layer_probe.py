"""Find out what a model's attention layers are by running one token through it.

Families name the same thing differently in their configs (and tensor parallelism changes the head counts), but every
layer must call the attention function: what it passes there is the truth. Works on meta-device models too.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel

from hf_paged.attention import CONTEXT_KEYWORD, CONTEXT_TAG, AttentionCall, no_mask

# Transformers 5.24 renamed the keyword of every forward; older releases know the first name only.
CACHE_NAMES = ("past_key_values", "cache")
CACHE_KEYWORD = CACHE_NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]

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


class _Probe:
    """An attention context that records and computes nothing."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}

    def attend(self, call: AttentionCall) -> Tensor:
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
        return call.value.new_zeros(batch, q_len, num_heads, call.value.shape[-1])


class _ProbeCache(Cache):
    """Hands the probe over as `PagedCache` hands over its pages: as a tag on the keys."""

    def __init__(self, probe: _Probe) -> None:
        super().__init__(layers=[])
        self._probe = probe

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        setattr(key_states, CONTEXT_TAG, self._probe)
        return key_states, value_states


def check_supported(model: PreTrainedModel) -> None:
    """Refuse, before any work, a model whose state does not live in keys and values.

    Raises:
        ValueError: encoder-decoder models, recurrent or convolutional state, attention that is not causal or not
            described by a sliding window; the message names what was found.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; paged generation serves decoder-only models")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _PAGED_LAYER_TYPES)
    if other or getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} has layers of type {other or 'recurrent'}: their state is not keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends in both directions (use_bidirectional_attention)")


@torch.no_grad()
def probe_layers(view: PreTrainedModel, *, through_cache: bool = False) -> list[LayerSpec]:
    """The attention layers of a model whose attention implementation is hf_paged (see `model_view.py`), by layer index.

    Args:
        through_cache: reach attention by the tag of a cache instead of a keyword of the forward. Models that drop
            unknown keywords on the way (StableLM) are reached by the tag only, those that expand keys after storing
            them (latent attention) by the keyword only.

    Raises:
        ValueError: a layer does not go through the attention interface, or the model is refused by `check_supported`.
    """
    check_supported(view)
    probe = _Probe()
    embeddings: Any = view.get_input_embeddings()
    device = embeddings.weight.device
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    context = {CACHE_KEYWORD: _ProbeCache(probe)} if through_cache else {CONTEXT_KEYWORD: probe}
    view(input_ids=token, position_ids=token, attention_mask=no_mask(device), use_cache=through_cache, **context)
    expected = view.config.get_text_config(decoder=True).num_hidden_layers
    if len(probe.specs) != expected:
        raise ValueError(
            f"{type(view).__name__}: {len(probe.specs)} of {expected} layers use Transformers' attention interface; "
            "paged attention needs all of them"
        )
    return [probe.specs[i] for i in sorted(probe.specs)]
