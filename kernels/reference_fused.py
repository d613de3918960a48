"""The plain-torch definition of the fused kernels: RMSNorm with its residual, gated activation, RoPE and page write.

Each is the sequence of small operations that a Transformers model runs, in the same order and with the same roundings,
but for RoPE, which is computed in fp32 and rounded once (models differ there). `fused_ops.py` picks the kernel or this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.layout import LayerKV, RecentRows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), normalised in fp32 over the last dimension.

    `cast_first`: the normalised value is rounded to the dtype of x *before* the weight multiplies it (Llama); otherwise
    after (Gemma, whose weights are also stored minus one: offset 1).
    """

    weight: Tensor  # [N], dtype of x
    eps: float
    offset: float
    cast_first: bool
    order: Tensor | None = None  # [N] int32: channel i of the result is channel order[i]; None: as they come
    places: Tensor | None = None  # [N] int32, the inverse of `order`: channel i of the input goes to places[i]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Which channels rotate by which angles. Channel pairs are (i, i + rotary_dim / 2), interleaved (2i, 2i + 1)."""

    rotary_dim: int  # leading channels that rotate, even; the others pass; 0 = no rotation
    interleaved: bool = False
    angle_step: int = 1  # pair i reads column i * angle_step of cos and sin: 2 where a table holds each angle twice


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """`x` `[..., N]` normalised, in its dtype."""
    h = x.float()
    h = h * h.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    if norm.cast_first:
        out = (norm.weight + norm.offset if norm.offset else norm.weight) * h.to(x.dtype)
    else:
        out = (h * (norm.offset + norm.weight.float())).to(x.dtype)
    return out if norm.order is None else out.index_select(-1, norm.order)


def add_rms_norm(
    delta: Tensor, residual: Tensor, norm: RMSNorm | None, post: RMSNorm | None
) -> tuple[Tensor, Tensor | None]:
    """The residual stream after a sub-layer and what the next one reads: (s, norm(s)) with s = residual + post(delta).

    Args:
        delta: `[..., N]`, what the sub-layer gives.
        norm: None = no second result.
        post: None = identity (Gemma 2 and OLMo 2 have one).
    """
    total = residual + (delta if post is None else rms_norm(delta, post))
    return total, None if norm is None else rms_norm(total, norm)


def gated_activation(gate: Tensor, up: Tensor, kind: str, order: Tensor | None = None) -> Tensor:
    """act(gate) * up, both `[..., N]`; `kind` is a key of `ACTIVATIONS`, `order` `[N]` int32 as that of a norm."""
    out = ACTIVATIONS[kind](gate) * up
    return out if order is None else out.index_select(-1, order)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope, derived: dict[Any, Any] | None = None) -> Tensor:
    """`x` `[T, heads, head_dim]` rotated by the angles of `cos`, `sin` `[T, columns]`; fp32 inside, rounded once."""
    if rope.rotary_dim == 0:
        return x
    compute = torch.promote_types(x.dtype, torch.float32)
    key = ("angles", rope, compute, cos.data_ptr())  # what is kept holds `cos`, so its address names it
    c, s, _ = reference.once(derived, key, lambda: (*_angles(cos, sin, rope, compute), cos))
    head, tail = x[..., : rope.rotary_dim].to(compute), x[..., rope.rotary_dim :]
    rotated = head * c
    for out, partner, factor in zip(_pairs(rotated, rope), reversed(_pairs(head, rope)), (-1, 1), strict=True):
        out.addcmul_(partner, s, value=factor)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, tail), -1) if tail.shape[-1] else rotated


def _pairs(x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair, `[..., rotary_dim / 2]` each, as views."""
    if rope.interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _angles(cos: Tensor, sin: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines of all channels `[T, 1, rotary_dim]` and sines of their pairs `[T, 1, rotary_dim / 2]`."""
    half = rope.rotary_dim // 2
    columns = slice(0, half * rope.angle_step, rope.angle_step)
    c, s = (table[:, columns].unsqueeze(1).to(dtype) for table in (cos, sin))
    return c.repeat_interleave(2, -1) if rope.interleaved else torch.cat((c, c), -1), s


def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: LayerKV,
    slot_mapping: Tensor,
    *,
    rope: Rope,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    derived: dict[Any, Any] | None = None,
    recent: RecentRows | None = None,
) -> Tensor:
    """Normalise and rotate `query` and `key`, store `key` and `value` in the pages, return the query.

    K is rounded to its dtype after the rotation, then the layer's transform is applied in fp32, and the result stored
    as `reference.write_kv` does: the codes are those of the unfused sequence of operations on the same rotated values.
    The query comes back as the stored keys are to meet it.

    Args:
        query: `[T, heads, head_dim]`; key `[T, kv_heads, head_dim]`; value `[T, kv_heads, v_head_dim]`; any strides
            with contiguous channels, so they may be parts of one projection.
        cos, sin: `[T, columns]` from the model's own rotary module; not read when `rope.rotary_dim` is 0.
        slot_mapping: `[T]` int64, -1 = do not write (the query is computed all the same).
        q_norm, k_norm: per head, before the rotation; both or none, alike but for their weights.
        derived: `AttentionMetadata.derived` of the step.
        recent: where the layer keeps `recent` blocks, filled with the rows that are stored before they are quantized.

    Returns:
        `[T, heads, head_dim]`, contiguous, in the dtype of `query`.
    """
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm), rms_norm(key, k_norm)
    if rope.rotary_dim:
        heads = [query.shape[1], key.shape[1]]
        query, key = rotate(torch.cat((query, key), 1), cos, sin, rope, derived).split_with_sizes(heads, 1)
    if (transform := layer.transform) is not None:
        query, key, value = transform.query(query), transform.stored_key(key), transform.stored_value(value)
    reference.write_kv(layer, key, value, slot_mapping, derived)
    if recent is not None:
        recent.key.copy_(key)
        recent.value.copy_(value)
        assert layer.recent is not None
        reference.write_kv(layer.recent, recent.key, recent.value, recent.slot_mapping)
    return query.contiguous()
