"""Attention over pages for a mixed step, decodes first: Triton on a GPU, Numba or plain torch elsewhere."""

from __future__ import annotations

from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.cpu_launch import on_cpu
from hf_paged.kernels.fused_ops import restore_output
from hf_paged.kernels.layout import AttentionMetadata, LayerKV, RecentRows


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    recent: RecentRows | None = None,
) -> Tensor:
    """Causal attention of `query` `[T, heads, head_dim]` over its sequences' values, `[T, heads, v_head_dim]`.

    `reference.paged_attention` defines it over what pages hold, `KVTransform.output` what is then done to it; `query`
    meets stored keys. On a GPU nothing synchronises, and a step of decodes alone can be captured in a graph:
    its launch depends on `meta`'s Python bounds only. Rows beyond `cu_seqlens_q[-1]` (padding of a bucketed step) are
    zeros, transformed. `recent`: the step's own rows, where the layer keeps `recent` blocks.
    """
    if not query.is_cuda:
        decoded = None
        if meta.num_decodes and softcap is None and sinks is None and layer.recent is None and on_cpu(query):
            from hf_paged.kernels import cpu_attention  # Numba is not there for everybody, and slow to import

            if cpu_attention.takes(query, layer):
                decoded = cpu_attention.decode_attention(
                    query[: meta.num_decodes], layer, meta, scale=scale, window=window
                )
        out = reference.paged_attention(
            query, layer, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, fast=True, decoded=decoded,
            recent=recent,
        )  # fmt: skip
        return restore_output(out, layer.transform)
    from hf_paged.kernels.decode_attention import decode_attention, value_offset_of  # Triton exists on Linux only
    from hf_paged.kernels.decode_recent import decode_recent
    from hf_paged.kernels.prefill_attention import prefill_attention

    only_decodes = meta.num_seqs == meta.num_decodes
    out = (query.new_empty if only_decodes else query.new_zeros)((*query.shape[:2], layer.v.head_dim))
    if meta.num_decodes and layer.recent is None:
        decode_attention(query, layer, meta, out, scale=scale, window=window, softcap=softcap, sinks=sinks)
    elif meta.num_decodes:
        decode_recent(query, layer, meta, out, scale=scale, softcap=softcap, sinks=sinks)
    if not only_decodes:
        prefill_attention(
            query, layer, meta, out, scale=scale, window=window, softcap=softcap, sinks=sinks, recent=recent
        )
    done = 0 if value_offset_of(layer) is None else meta.num_decodes  # rows that have V's offset already
    restore_output(out[done:], layer.transform)
    return out
