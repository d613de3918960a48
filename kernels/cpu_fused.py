"""The fused operations of a decoder layer in bf16 on a CPU: norm with its residual, gated activation, RoPE and write.

`reference_fused.py` defines them: one pass here for the eight to twenty small operations there, each of which costs a
step of few rows more in overhead than in arithmetic, and a prompt a pass through memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels import cpu_kernels, reference_fused
from hf_paged.kernels.cpu_launch import bits, launch
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import LayerKV, Pages, PlainPages, RecentRows, ScaledPages
from hf_paged.kernels.reference import once
from hf_paged.kernels.reference_fused import RMSNorm, Rope


def takes_norm(x: Tensor, residual: Tensor | None, norm: RMSNorm | None) -> bool:
    """Whether `add_rms_norm` computes this one."""
    if norm is None or norm.order is not None or (norm.cast_first and norm.offset):
        return False
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return False
    return x.dtype == norm.weight.dtype == torch.bfloat16 and x.stride(-1) == norm.weight.stride(0) == 1


def add_rms_norm(x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(s, norm(s)) with s = residual + x, or x; all `[..., N]`."""
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    total = x if residual is None else x.new_empty(x.shape)
    other = 0 if residual is None else (residual := residual.contiguous()).data_ptr()
    out = x.new_empty(x.shape)
    launch(
        cpu_kernels.add_rms_norm, -(-len(rows) // cpu_kernels.NORM_ROWS), rows.data_ptr(), rows.stride(0), other,
        norm.weight.data_ptr(), total.data_ptr(), out.data_ptr(), len(rows), n, bits(norm.eps), bits(norm.offset),
        int(norm.cast_first),
    )  # fmt: skip
    return total, out


def takes_gate(gate: Tensor, up: Tensor, kind: str, order: Tensor | None) -> bool:
    """Whether `gated_activation` computes this one."""
    plain = gate.dtype == up.dtype == torch.bfloat16 and gate.stride(-1) == up.stride(-1) == 1
    return plain and kind == "silu" and order is None


def gated_activation(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both `[..., N]`."""
    n = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    first, second = gate.reshape(-1, n), up.reshape(-1, n)
    launch(
        cpu_kernels.silu_times, len(first), first.data_ptr(), first.stride(0), second.data_ptr(), second.stride(0),
        out.data_ptr(), len(first), n,
    )  # fmt: skip
    return out


def takes_rope(
    query: Tensor, key: Tensor, value: Tensor, rope: Rope, q_norm: RMSNorm | None, k_norm: RMSNorm | None
) -> bool:
    """Whether `rope_write` computes this one."""
    rows = all(x.dtype == torch.bfloat16 and x.stride()[1:] == (x.shape[2], 1) for x in (query, key, value))
    return rows and q_norm is None and k_norm is None and not rope.interleaved


def rope_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, layer: LayerKV, slot_mapping: Tensor,
    rope: Rope, derived: dict[Any, Any] | None, recent: RecentRows | None = None,
) -> Tensor:  # fmt: skip
    """`reference_fused.rope_write` without norms; what is neither bf16 nor int8, or rotated, is written by it."""
    transform = layer.transform
    rotates = transform is not None and (transform.rotates_k or transform.rotates_v)
    if recent is None and not rotates and holds(layer):
        return _rope_write(query, key, value, cos, sin, layer, slot_mapping, rope, derived)
    tokens, kv_heads, head_dim = key.shape
    rotated = key.new_empty(tokens, kv_heads, 1, head_dim)  # pages of one token
    pages = PlainPages(data=rotated)
    each = once(derived, "each token", lambda: torch.arange(tokens, device=key.device))
    of_one = LayerKV(k=pages, v=pages)
    query = _rope_write(query, key, value[..., :0], cos, sin, of_one, each, rope, derived)
    return reference_fused.rope_write(
        query, rotated[:, :, 0], value, cos, sin, layer, slot_mapping, rope=Rope(rotary_dim=0), derived=derived,
        recent=recent,
    )  # fmt: skip


def _rope_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, layer: LayerKV, slot_mapping: Tensor,
    rope: Rope, derived: dict[Any, Any] | None,
) -> Tensor:  # fmt: skip
    """The rotated query; the rotated key and the value go into pages that the kernel writes."""
    assert slot_mapping.is_contiguous() and slot_mapping.dtype == torch.int64
    tokens, heads, head_dim = query.shape
    kv_heads, v_dim = value.shape[1:]
    half = rope.rotary_dim // 2
    key_of = ("cpu angles", rope, cos.data_ptr())  # what is kept holds `cos`, so its address names it
    c, s, _ = once(derived, key_of, lambda: (*(_angles(table, rope) for table in (cos, sin)), cos))
    out = query.new_empty(tokens, heads, head_dim)
    k, v, transform = layer.k.tensor, layer.v.tensor, layer.transform
    constants = (None,) * 3 if transform is None else (transform.k_offset, transform.k_factor, transform.v_offset)
    assert all(x is None or (x.is_contiguous() and x.dtype == torch.float32) for x in constants)
    launch(
        cpu_kernels.rope_write, tokens, query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0),
        key.stride(0), value.stride(0), c.data_ptr(), s.data_ptr(), half, out.data_ptr(), slot_mapping.data_ptr(),
        k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), k.shape[2], tokens, heads, kv_heads, head_dim, v_dim,
        *scales(layer.k), *scales(layer.v), *(0 if x is None else x.data_ptr() for x in constants),
    )  # fmt: skip
    return out


def takes_output(out: Tensor, transform: KVTransform) -> bool:
    """Whether `restore_output` computes this one."""
    return transform.v_offset is not None and not transform.rotates_v and out.is_contiguous()


def restore_output(out: Tensor, transform: KVTransform) -> Tensor:
    """`KVTransform.output` of `out` `[T, heads, v_head_dim]`, in place."""
    offset = transform.v_offset
    assert offset is not None and offset.is_contiguous() and offset.dtype == torch.float32
    launch(cpu_kernels.add_offset, len(out), out.data_ptr(), offset.data_ptr(), *out.shape[:2], *offset.shape)
    return out


def holds(layer: LayerKV) -> bool:
    """Whether the kernels read and write a layer's pages: bf16 values, int8 codes."""
    return all(pages.tensor.dtype in (torch.bfloat16, torch.int8) for pages in (layer.k, layer.v))


def scales(pages: Pages) -> tuple[int, int]:
    """Address and block stride; 0 where values are plain."""
    return (pages.scale.data_ptr(), pages.scale.stride(0)) if isinstance(pages, ScaledPages) else (0, 0)


def _angles(table: Tensor, rope: Rope) -> Tensor:
    """One column for each pair, `[T, rotary_dim / 2]` fp32."""
    half = rope.rotary_dim // 2
    return table[:, : half * rope.angle_step : rope.angle_step].float().contiguous()
