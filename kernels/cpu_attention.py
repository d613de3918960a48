"""Decode attention of bf16 queries on a CPU over bf16 or int8 pages, read where they lie, neither gathered nor padded.

Sums are in fp32, as is the softmax. Other formats, softcaps and sinks are left to `reference.py`, which defines the
result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.kernels import cpu_kernels
from hf_paged.kernels.cpu_fused import holds, scales
from hf_paged.kernels.cpu_launch import bits, launch
from hf_paged.kernels.layout import AttentionMetadata, LayerKV


def takes(query: Tensor, layer: LayerKV) -> bool:
    """Whether `decode_attention` computes queries of this dtype on these pages."""
    return query.dtype == torch.bfloat16 and holds(layer)


def decode_attention(
    query: Tensor, layer: LayerKV, meta: AttentionMetadata, *, scale: float, window: int | None
) -> Tensor:
    """`reference.paged_attention` of the single queries of a step, `[B, heads, head_dim]` -> `[B, heads, v_head_dim]`.

    They are those of the first B sequences.
    """
    query = query.contiguous()
    num_seqs, heads, head_dim = query.shape
    k, v, v_dim = layer.k.tensor, layer.v.tensor, layer.v.head_dim
    kv_heads, tables, seq_lens = k.shape[1], meta.block_tables, meta.seq_lens
    out = query.new_empty(num_seqs, heads, v_dim)
    longest = min(meta.max_seq_len, window) if window else meta.max_seq_len
    scratch = query.new_empty(num_seqs, heads, longest, dtype=torch.float32)
    assert tables.is_contiguous() and tables.dtype == seq_lens.dtype == torch.int32
    launch(
        cpu_kernels.decode_attention, num_seqs * kv_heads, query.data_ptr(), k.data_ptr(), v.data_ptr(), k.stride(0),
        v.stride(0), out.data_ptr(), tables.data_ptr(), tables.shape[1], seq_lens.data_ptr(), scratch.data_ptr(),
        longest, num_seqs, kv_heads, heads // kv_heads, head_dim, v_dim, layer.block_size, window or 0, bits(scale),
        *scales(layer.k), *scales(layer.v),
    )  # fmt: skip
    return out
