"""The one attention function and the one mask function that hf_paged registers with Transformers.

A forward reaches pages in one of two ways: the engine passes `paged_context=` to the model's forward, and
Transformers hands every extra keyword on to the attention function; or a `PagedCache.update` tags the keys it
returns. Without either the call is an ordinary dense forward and gets dense attention. Paged-ness belongs to the
call, never to the model.

What a context cannot honour is refused by name at the first call: nothing a layer asks for is dropped.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "hf_paged"
CONTEXT_KEYWORD = "paged_context"  # keyword that carries a context through a model's forward
CONTEXT_TAG = "_hf_paged_context"  # attribute that carries it on the keys returned by PagedCache.update

# Keywords that reach attention functions and do not change what attention computes.
_NO_EFFECT = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One layer's attention, as the model asks for it."""

    layer_idx: int
    layer_name: str
    query: Tensor  # [batch, num_heads, q_len, head_dim]
    key: Tensor  # [batch, kv_heads, kv_len, head_dim]
    value: Tensor  # [batch, kv_heads, kv_len, v_head_dim]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [num_heads]


class AttentionContext(Protocol):
    """Where a call's keys and values live: an engine step, a `PagedCache`, or a probe that only looks."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's new keys and values, attend, return [batch, q_len, num_heads, v_head_dim]."""
        ...


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over pages, with the signature of Transformers' attention interface.

    Raises:
        ValueError: the layer asks for something pages do not do (named with the layer), or for dropout, or has no
            index.
    """
    context: AttentionContext | None = kwargs.pop(CONTEXT_KEYWORD, None) or getattr(key, CONTEXT_TAG, None)
    if context is None:
        features = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return _dense_attention(module, query, key, value, attention_mask, scaling, dropout, features)
    layer_idx = getattr(module, "layer_idx", None)
    if not isinstance(layer_idx, int):
        raise ValueError(f"{type(module).__name__} has no layer_idx; pages cannot tell its layers apart")
    name = f"layer {layer_idx} ({type(module).__name__})"
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _NO_EFFECT)
    if unknown:
        raise ValueError(f"{name} passes {unknown} to attention, which paged attention does not support")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name} is not causal; paged attention is causal only")
    if attention_mask is not None and attention_mask.numel() > 1:  # `no_mask` has one element
        raise ValueError(f"{name} brings a mask of its own, which paged attention cannot apply")
    if dropout:
        raise ValueError(f"{name} asks for attention dropout {dropout}; call model.eval() first")
    call = AttentionCall(
        layer_idx=layer_idx,
        layer_name=name,
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return context.attend(call), None


def paged_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask function under our name.

    A `PagedCache` announces itself through the `kv_length` it reported (see `PagedCache.get_mask_sizes`): it learns the
    left padding here, before the first layer writes, and needs no mask. Any other forward gets the additive mask of
    eager attention, which both sdpa and eager accept.
    """
    cache = getattr(kwargs.get("kv_length"), "cache", None)
    if cache is not None:
        if not kwargs.get("allow_is_causal_skip", True):
            raise ValueError("the model masks more than causality, windows and padding; pages cannot express its mask")
        cache.learn_padding(kwargs.get("attention_mask"), kwargs["batch_size"], kwargs["q_length"])
        return None
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["eager"](*args, **kwargs)
    return mask


def _dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    features: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention of a forward without pages: sdpa, or the model's own eager where sdpa would drop softcap or sinks."""
    fn: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if features.get("softcap") is not None or features.get("s_aux") is not None:
        fn = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = fn(module, query, key, value, mask, scaling=scaling, dropout=dropout, **features)
    return out, None


def no_mask(device: torch.device | str) -> Tensor:
    """A stand-in for the attention mask of an engine forward.

    Transformers passes a 4-D mask on untouched: no mask is built, nothing synchronises, and models that would warn
    about padding see that a mask was given. Paged attention never reads it.
    """
    return torch.empty((1, 1, 1, 1), device=device)
