"""The fused operations of a decoder layer, and of a step's ends: Triton on a GPU, Numba or plain torch elsewhere.

`reference_fused.py` defines those of a layer.

Nothing synchronises and the only allocations are the results, so all of them can be captured in a CUDA graph. They are
for inference: no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels import cpu_linear, reference_fused, sample_reference
from hf_paged.kernels.cpu_launch import on_cpu
from hf_paged.kernels.interleaved_rows import InterleavedRows
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import LayerKV, RecentRows
from hf_paged.kernels.reference_fused import RMSNorm, Rope

_FEW_ROWS = 16  # at most so many rows are bound by reading the weight: there our kernel is 5 to 20% faster than cuBLAS


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, reordered: cpu_linear.ReorderedWeight | None = None
) -> Tensor:
    """`x` `[..., K]` times `weight` `[N, K]` transposed, plus `bias` `[N]`.

    `reordered` is a copy of `weight` on a CPU.
    """
    if x.device.type == "cpu":
        return cpu_linear.cpu_linear(x, weight, bias, reordered)
    few = 0 < x.numel() <= _FEW_ROWS * x.shape[-1]
    contiguous = x.stride(-1) == weight.stride(-1) == 1  # channels, as the kernel reads them
    if not (few and contiguous and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return torch.nn.functional.linear(x, weight, bias)
    from hf_paged.kernels.few_rows_linear import few_rows_linear  # Triton exists on Linux only

    return few_rows_linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """`x` `[..., N]` normalised over its last dimension."""
    if on_cpu(x):
        from hf_paged.kernels import cpu_fused  # Numba is not there for everybody, and slow to import

        if cpu_fused.takes_norm(x, None, norm):
            return cpu_fused.add_rms_norm(x, None, norm)[1]
    if not x.is_cuda:
        return reference_fused.rms_norm(x, norm)
    from hf_paged.kernels.rms_norm import rms_norm as launch  # Triton exists on Linux only

    return launch(x, norm)


def add_rms_norm(
    delta: Tensor, residual: Tensor, norm: RMSNorm | None, post: RMSNorm | None = None
) -> tuple[Tensor, Tensor | None]:
    """(s, norm(s)) with s = residual + post(delta); all `[..., N]`."""
    if norm is None and post is None:
        return residual + delta, None
    if norm is not None and post is None and on_cpu(delta):
        from hf_paged.kernels import cpu_fused

        if cpu_fused.takes_norm(delta, residual, norm):
            return cpu_fused.add_rms_norm(delta, residual, norm)
    if not delta.is_cuda:
        return reference_fused.add_rms_norm(delta, residual, norm, post)
    from hf_paged.kernels.rms_norm import add_rms_norm as launch

    return launch(delta, residual, norm, post)


def interleave(x: Tensor, places: Tensor) -> InterleavedRows:
    """`x` `[M, K]` with channel i at `places[i]` (`[K]` int32), for a folded product that reads them so."""
    if not x.is_cuda:
        return InterleavedRows.of(x, places)
    from hf_paged.kernels.interleave import interleave as launch

    return launch(x.contiguous(), places)


def gated_activation(gate: Tensor, up: Tensor, kind: str, order: Tensor | None = None) -> Tensor:
    """act(gate) * up, both `[..., N]`, rows of any stride; with `order` `[N]` its channel i is channel order[i]."""
    if on_cpu(gate):
        from hf_paged.kernels import cpu_fused

        if cpu_fused.takes_gate(gate, up, kind, order):
            return cpu_fused.gated_activation(gate, up)
    if not gate.is_cuda:
        return reference_fused.gated_activation(gate, up, kind, order)
    from hf_paged.kernels.gated_activation import gated_activation as launch

    return launch(gate, up, kind, order)


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
    """Rotate query and key, store key and value in the pages as the layer's transform says; the query to meet them.

    `derived` is that of the step's `AttentionMetadata`; `recent` is filled where the layer keeps `recent` blocks.
    """
    if on_cpu(query):
        from hf_paged.kernels import cpu_fused

        if cpu_fused.takes_rope(query, key, value, rope, q_norm, k_norm):
            return cpu_fused.rope_write(query, key, value, cos, sin, layer, slot_mapping, rope, derived, recent)
    if not query.is_cuda:
        return reference_fused.rope_write(
            query, key, value, cos, sin, layer, slot_mapping, rope=rope, q_norm=q_norm, k_norm=k_norm, derived=derived,
            recent=recent,
        )  # fmt: skip
    from hf_paged.kernels.rope_write import rope_write as launch

    return launch(
        query, key, value, cos, sin, layer, slot_mapping, rope=rope, q_norm=q_norm, k_norm=k_norm, recent=recent
    )


def restore_output(out: Tensor, transform: KVTransform | None) -> Tensor:
    """Attention's output `[T, heads, v_head_dim]` over the values, from that over stored values; may overwrite it."""
    if transform is None:
        return out
    if on_cpu(out):
        from hf_paged.kernels import cpu_fused

        if cpu_fused.takes_output(out, transform):
            return cpu_fused.restore_output(out, transform)
    if not out.is_cuda:
        return transform.output(out)
    from hf_paged.kernels.restore_output import restore_output as launch

    return launch(out, transform)


def input_tokens(input_ids: Tensor, token_rows: Tensor, last_token: Tensor) -> Tensor:
    """`input_ids` `[T]` int64, where negative the `last_token` of its row; `token_rows` `[T]` int64."""
    if not input_ids.is_cuda:
        return torch.where(input_ids >= 0, input_ids, last_token[token_rows])
    from hf_paged.kernels.step_tokens import input_tokens as launch

    return launch(input_ids, token_rows, last_token)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `ids` `[...]` of `weight` `[V, K]`, `[..., K]`."""
    if not (ids.is_cuda and ids.dtype == torch.int64 and weight.is_contiguous()):
        return torch.nn.functional.embedding(ids, weight)
    from hf_paged.kernels.step_tokens import embedding as launch

    return launch(ids, weight)


def likeliest_tokens(logits: Tensor, rows: Tensor, last_token: Tensor) -> Tensor:
    """`sample_reference.likeliest` of logits `[n, V]`; also written to `last_token[rows]`."""
    if not logits.is_cuda:
        likeliest = sample_reference.likeliest(logits)
        last_token[rows] = likeliest
        return likeliest
    from hf_paged.kernels.step_tokens import likeliest_tokens as launch

    return launch(logits, rows, last_token)
