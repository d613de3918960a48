"""Forwards that take the place of a module's own: embedding, norm, rotary tables, gated MLP, attention, decoder layer.

Each is put on one module *instance* of a view as its `forward`, so the module tree, its names and its parameters stay
what they are. They compute what the module computes, with fewer kernels, for inference only. Attention and layers are
fused in an engine step, which a `RotaryContext` announces; in any other call the module's own forward runs.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention import CONTEXT_KEYWORD
from hf_paged.joined_linear import Projections, as_packed
from hf_paged.kernels.folded_linear import OpenNorm
from hf_paged.kernels.fused_ops import embedding, gated_activation, rms_norm
from hf_paged.kernels.reference_fused import RMSNorm, Rope
from hf_paged.kernels.rotary import rotary_tables


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryCall:
    """One layer's attention before rotation: all that lies between the QKV projection and the output projection."""

    layer_idx: int
    query: Tensor  # [T, num_heads, head_dim]
    key: Tensor  # [T, kv_heads, head_dim]
    value: Tensor  # [T, kv_heads, v_head_dim]
    cos: Tensor  # [T, columns], not read when nothing rotates
    sin: Tensor  # [T, columns]
    rope: Rope
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [num_heads]
    is_last: bool = False  # attend to the context's `wanted` tokens only


@dataclass(frozen=True, kw_only=True, eq=False)
class Projected:
    """QKV of a layer, which the one before has multiplied."""

    qkv: Tensor  # [T, N]


class RotaryContext(ABC):
    """An attention context that can rotate, store and attend in one go, and carries a norm from layer to layer."""

    # (hidden states, their norm for the next layer, or what that would first make of it)
    carried: tuple[Tensor, Tensor | OpenNorm | Projected] | None = None
    exchanges: Iterator[Tensor] | None = None  # of the chains of this step (`kernels/layer_chain.py`)
    wanted: Tensor | None = None  # [n] int64, tokens that leave the last layer, each its sequence's last; None = all

    @abstractmethod
    def attend_rotary(self, call: RotaryCall) -> Tensor:
        """Store the call's keys and values, attend, return [T, num_heads, v_head_dim]."""

    def take_norm(self, hidden: Tensor) -> Tensor | OpenNorm | Projected | None:
        """The norm of `hidden` where the layer before left it."""
        carried, self.carried = self.carried, None
        return carried[1] if carried is not None and carried[0] is hidden else None


def own_forward(module: nn.Module) -> weakref.WeakMethod[Callable[..., Any]]:
    """The forward of a module's class, bound weakly: a fused forward must not keep its own module alive."""
    return weakref.WeakMethod(module.forward)


def own_of(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    forward = method()
    assert forward is not None, "a fused forward outlived its module"
    return forward


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedEmbedding:
    """The forward of an embedding."""

    weight: Tensor  # [V, K]

    def __call__(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedNorm:
    """The forward of an RMSNorm."""

    norm: RMSNorm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.norm)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedRotary:
    """The forward of a rotary embedding whose frequencies do not depend on the positions: (cos, sin)."""

    frequencies: Tensor  # [half] fp32
    scale: float

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(position_ids, self.frequencies, self.scale, x.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedMLP:
    """The forward of down(act(gate(x)) * up(x))."""

    projections: Projections  # -> two parts
    gate_first: bool
    activation: str
    down: nn.Module
    down_order: Tensor | None  # of the channels that `down` reads, if it has one
    down_places: Tensor | None  # the inverse of it

    def __call__(self, x: Tensor, *, ordered: bool = False) -> Tensor:
        """`ordered`: the channels of `x` lie in the order of the projections."""
        first, second = self.projections.ordered(x) if ordered else self.projections(x)
        gate, up = (first, second) if self.gate_first else (second, first)
        hidden = gated_activation(gate, up, self.activation, self.down_order)
        out: Tensor = self.down(hidden) if self.down_order is None else as_packed(self.down).ordered(hidden)
        return out


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedAttention:
    """The forward of an attention module: projections, one kernel to the pages, attention, output projection."""

    own: weakref.WeakMethod[Callable[..., Any]]
    layer_idx: int
    projections: Projections  # -> Q, K, V; one part where heads are interleaved
    num_heads: int
    kv_heads: int
    interleaved_heads: bool  # the one part is [T, num_heads, 3, head_dim] (GPT-NeoX)
    rope: Rope
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    output: nn.Module
    output_places: Tensor | None = None  # of the channels that `output` reads in another order, if it does
    is_last: bool = False  # of the layers, see `FusedLayer`

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.get(CONTEXT_KEYWORD)
        if args or not isinstance(context, RotaryContext):
            return own_of(self.own)(hidden_states, *args, **kwargs)
        out = self.attend(self.heads(hidden_states, ordered=kwargs.get("ordered", False)), context, kwargs)
        return self.output(out.flatten(1).unsqueeze(0)), None

    def attend(self, heads: tuple[Tensor, Tensor, Tensor], context: RotaryContext, kwargs: dict[str, Any]) -> Tensor:
        """`[T, num_heads, v_head_dim]` of Q, K and V as `heads` gives them, and the call's keywords."""
        query, key, value = heads
        cos = sin = query  # not read
        if self.rope.rotary_dim:
            cos, sin = (table.flatten(0, -2) for table in kwargs["position_embeddings"])
        call = RotaryCall(
            layer_idx=self.layer_idx,
            query=query,
            key=key,
            value=value,
            cos=cos,
            sin=sin,
            rope=self.rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            is_last=self.is_last,
        )
        return context.attend_rotary(call)

    def heads(self, hidden_states: Tensor, *, ordered: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Q `[T, num_heads, head_dim]`, K and V `[T, kv_heads, ...]` of hidden states `[1, T, hidden]`, as views."""
        return self.split(self.projections.ordered(hidden_states) if ordered else self.projections(hidden_states))

    def split(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The same of what the projections gave, `[..., features]` each."""
        tokens = parts[0].numel() // parts[0].shape[-1]
        if self.interleaved_heads:
            query, key, value = parts[0].view(tokens, self.num_heads, 3, -1).unbind(2)
            return query, key, value
        query, key, value = parts
        return (
            query.view(tokens, self.num_heads, -1),
            key.view(tokens, self.kv_heads, -1),
            value.view(tokens, self.kv_heads, -1),
        )


def leaves_tokens_out(view: nn.Module) -> bool:
    """Whether the last layer of a fused view heeds `RotaryContext.wanted`."""
    return any(getattr(vars(module).get("forward"), "is_last", False) for module in view.modules())


def first_output(output: Any) -> Tensor:
    """The tensor of a module's output; a mixture of experts gives its router's scores beside it."""
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, torch.Tensor)
    return tensor
