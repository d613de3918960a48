"""Triton kernel that ends a decode step whose sequences keep their current block in 16 bits beside its codes.

`decode_attention` has attended to what lies before that block, as codes, and left a result and a log-sum-exp. One
program takes the keys and values of a sequence's block for the heads of one KV head, joins both, and writes the output.
What it reads of the block is there before the coded keys are attended to, so only the joining waits for them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hf_paged.kernels.decode_attention import base2_scale, channel_block, decode_attention, dot_dtype
from hf_paged.kernels.layout import AttentionMetadata, LayerKV
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import overlap
from hf_paged.kernels.tiles import normalise_rows, softmax_step

_TILE = 32  # tokens


@triton.jit
def _join_recent(
    out_ptr,  # [num_seqs, heads, V_DIM]
    coded_ptr,  # [num_seqs, heads, V_DIM] fp32, attention over the codes before the block
    lse_ptr,  # [num_seqs, heads] fp32, base 2; -inf: there are none
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_slots, kv_heads, BLOCK_SIZE, K_DIM]
    v_ptr,  # [num_slots, kv_heads, BLOCK_SIZE, V_DIM]
    slots_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [num_seqs, heads] where SINKS is 2
    q_stride_t,
    q_stride_h,
    out_stride_t,
    k_stride,
    v_stride,
    scale,  # as the decode kernels take it
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0) * GROUP
    row = tl.arange(0, ROWS)
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    head = kv_head * GROUP + row
    q_at = q_ptr + seq * q_stride_t + head[:, None] * q_stride_h + dk[None, :]
    q = tl.load(q_at, mask=(row < GROUP)[:, None] & (dk < K_DIM)[None, :], other=0.0)
    q, unit = normalise_rows(q, DOT, False)
    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    count = tl.load(seq_lens_ptr + seq) - tl.load(starts_ptr + seq)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    unscaled = tl.zeros([TILE], tl.float32)
    for first in tl.range(0, count, TILE, num_stages=1):  # one tile, as a rule
        n = first + tl.arange(0, TILE)
        keep = n < count
        at = kv_head * BLOCK_SIZE + n
        k_at = k_ptr + slot * k_stride + at[:, None] * K_DIM + dk[None, :]
        v_at = v_ptr + slot * v_stride + at[:, None] * V_DIM + dv[None, :]
        k = tl.load(k_at, mask=keep[:, None] & (dk < K_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=keep[:, None] & (dv < V_DIM)[None, :], other=0.0)
        acc, total, top, _ = softmax_step(
            acc, total, top, 1.0, q, unit * scale, k, unscaled, v, unscaled, keep[None, :], softcap,
            True, SOFTCAP, False, False, DOT, DOT, False,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()
    real = row < GROUP
    mask = real[:, None] & (dv < V_DIM)[None, :]
    coded_top = tl.load(lse_ptr + seq * heads + head, mask=real, other=float("-inf"))
    coded = tl.load(coded_ptr + (seq * heads + head)[:, None] * V_DIM + dv[None, :], mask=mask, other=0.0)
    new_top = tl.maximum(top, coded_top)
    if SINKS:
        sink = tl.load(sinks_ptr + seq * heads * (SINKS - 1) + head, mask=real, other=0.0).to(tl.float32)
        sink *= 1.4426950408889634
        new_top = tl.maximum(new_top, sink)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key at all: a padded row of a captured graph
    decay = tl.exp2(top - anchor)
    weight = tl.exp2(coded_top - anchor)
    total = total * decay + weight
    if SINKS:
        total += tl.exp2(sink - anchor)
    acc = (acc * decay[:, None] + coded * weight[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + seq * out_stride_t + head[:, None] * V_DIM + dv[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@on_device
def decode_recent(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """`decode_attention` where the layer keeps `recent` blocks: codes before a row's own block, 16 bits in it.

    As that, it is graph-safe and never synchronises; rows with `seq_lens` 0 become zeros.
    """
    current, recent = meta.current, layer.recent
    assert current is not None and recent is not None
    num_seqs, heads, v_dim = meta.num_decodes, query.shape[1], layer.v.head_dim
    kv_heads = layer.k.tensor.shape[1]
    coded = torch.empty((num_seqs, heads, v_dim), dtype=torch.float32, device=out.device)
    lse = torch.empty((num_seqs, heads), dtype=torch.float32, device=out.device)
    before = replace(meta, seq_lens=current.starts)
    decode_attention(query, layer, before, coded, scale=scale, window=None, softcap=softcap, sinks=None, lse=lse)
    k, v = recent.k.tensor, recent.v.tensor
    _join_recent[kv_heads, num_seqs](
        out, coded, lse, query, k, v, current.slots, current.starts, meta.seq_lens,
        lse if sinks is None else sinks,
        *query.stride()[:2],
        out.stride(0),
        k.stride(0),
        v.stride(0),
        *base2_scale(scale, softcap),
        GROUP=heads // kv_heads,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        K_DIM=recent.k.head_dim,
        V_DIM=recent.v.head_dim,
        K_BLOCK=channel_block(recent.k.head_dim),
        V_BLOCK=channel_block(recent.v.head_dim),
        BLOCK_SIZE=recent.block_size,
        TILE=min(_TILE, recent.block_size),
        SOFTCAP=softcap is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        DOT=dot_dtype(query, recent.k),
        num_warps=4,
        **overlap(out),
    )  # fmt: skip
    assert out.stride()[1:] == (v_dim, 1), out.stride()
