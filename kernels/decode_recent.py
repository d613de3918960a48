"""Triton kernel that ends a decode step whose sequences keep their current block in 16 bits beside its codes.

The kernels of `decode_attention` attend to the codes before that block. This one joins their parts, as `decode_join.py`
does, and takes the keys and values of the block in.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hf_paged.kernels.decode_attention import attend_shares, base2_scale, channel_block, join_launch, value_offset_of
from hf_paged.kernels.decode_join import joined, programs_of
from hf_paged.kernels.decode_shares import value_offset
from hf_paged.kernels.layout import AttentionMetadata, LayerKV
from hf_paged.kernels.on_device import on_device

_ELEMENTS = 2048  # of keys taken at once: one warp holds them, and a multiprocessor many of these


@triton.jit(do_not_specialize=["num_seqs", "held"])
def join_recent_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    whole_ptr,  # [num_seqs, heads, V_DIM] fp32, of heads that one program had whole
    whole_lse_ptr,  # [num_seqs, heads] fp32, base 2
    partial_ptr,  # [held, 2, GROUP, V_DIM] fp32, of the others
    lse_ptr,  # [held, 2, GROUP] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_slots, kv_heads, BLOCK_SIZE, K_DIM]
    v_ptr,  # [num_slots, kv_heads, BLOCK_SIZE, V_DIM]
    slots_ptr,  # [num_seqs] int32
    starts_ptr,  # [num_seqs] int32, tokens that are read as codes
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [num_seqs, heads] where SINKS is 2
    offset_ptr,  # [kv_heads, V_DIM] fp32, added to heads that have a key
    q_stride_t, q_stride_h, k_stride, v_stride,
    scale, softcap,  # as the decode kernels have them
    num_seqs, held,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: GROUP or 1
    H_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # H_BLOCK, but as many as a matrix product has
    K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,  # K_DIM padded, to 16 at least
    COLUMNS: tl.constexpr,  # of a program
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # taken at once
    TILE: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Heads of one KV head of one sequence, as `join_kernel`."""
    if OVERLAP:
        gdc_launch_dependents()
    first_head = tl.program_id(0) * HEADS
    kv_head = first_head // GROUP
    seq = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0) * HEADS
    h = tl.arange(0, H_BLOCK)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    q_row = q_ptr + seq * q_stride_t + first_head * q_stride_h
    offset = value_offset(offset_ptr, kv_head, d, V_DIM, OFFSET)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    start = tl.load(starts_ptr + seq)
    count = tl.load(seq_lens_ptr + seq) - start
    tiles, first, last = programs_of(
        tl.program_id(1), kv_head, starts_ptr, num_seqs, heads // GROUP, 0, held, False, TILE, LEAST
    )
    if OVERLAP:
        gdc_wait()
    row = tl.arange(0, ROWS)
    tl.static_assert(K_BLOCK >= 16)  # the interpreter multiplies narrower ones, which no GPU does
    dk = tl.arange(0, K_BLOCK)
    q_mask = (row < HEADS)[:, None] & (dk < K_DIM)[None, :]
    q = tl.load(q_row + row[:, None] * q_stride_h + dk[None, :], mask=q_mask, other=0.0).to(k_ptr.dtype.element_ty)
    k_ptr += slot * k_stride + kv_head * BLOCK_SIZE * K_DIM
    v_ptr += slot * v_stride + kv_head * BLOCK_SIZE * V_DIM
    k, v = _load_keys(k_ptr, v_ptr, 0, count, dk, d, K_DIM, V_DIM, KEYS)  # on their way while parts are joined
    out_row = seq * heads + first_head + h
    at = out_row[:, None] * V_DIM + d[None, :]
    mask = (h < HEADS)[:, None] & (d < V_DIM)[None, :]
    coded, lse = _of_codes(
        whole_ptr + at, whole_lse_ptr + out_row, mask, partial_ptr, lse_ptr, tiles, first, last, first_head % GROUP, d,
        GROUP, HEADS, V_DIM, STEP,
    )  # fmt: skip
    acc, total, top = _own_block(
        q, k, v, k_ptr, v_ptr, count, scale, softcap, dk, d, HEADS, H_BLOCK, K_DIM, V_DIM, KEYS, SOFTCAP
    )
    sink = tl.full([H_BLOCK], float("-inf"), tl.float32)
    if SINKS:
        sink_at = seq * heads * (SINKS - 1) + first_head + h
        sink = tl.load(sinks_ptr + sink_at, mask=h < HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
    result, total = _together(coded, lse, acc, total, top, sink)
    result += tl.where(total == 0.0, 0.0, 1.0)[:, None] * offset[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _of_codes(
    whole_ptr,  # [H_BLOCK, COLUMNS] pointers, to where whole heads are
    whole_lse_ptr,  # [H_BLOCK]
    mask, partial_ptr, lse_ptr, tiles, first, last, first_head, d,
    GROUP: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attention over the codes before the block, and its base-2 log-sum-exps: -inf where there are none."""
    out = tl.zeros(mask.shape, tl.float32)
    lse = tl.full([mask.shape[0]], float("-inf"), tl.float32)
    if tiles > 0:
        if first == last:
            out = tl.load(whole_ptr, mask=mask, other=0.0)
            lse = tl.load(whole_lse_ptr, mask=tl.arange(0, mask.shape[0]) < HEADS, other=float("-inf"))
        else:
            total = tl.zeros([mask.shape[0]], tl.float32)
            out, lse = joined(partial_ptr, lse_ptr, first, last, first_head, lse, total, d, GROUP, HEADS, V_DIM, STEP)
    return out, lse


@triton.jit
def _own_block(
    q, k, v, k_ptr, v_ptr, count, scale, softcap, dk, d,
    HEADS: tl.constexpr, H_BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Columns `d` of weighted values, denominator and maximum of the softmax over the first `count` keys of a block,
    of which the first KEYS are `k` and `v` already. `q` `[ROWS, K_BLOCK]`."""
    ROWS: tl.constexpr = q.shape[0]
    acc = tl.zeros([ROWS, d.shape[0]], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for begin in range(0, count, KEYS):
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        scores = tl.where((begin + tl.arange(0, KEYS) < count)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(probs, 1)
        top = new_top
        k, v = _load_keys(k_ptr, v_ptr, begin + KEYS, count, dk, d, K_DIM, V_DIM, KEYS)
    top = tl.where(count > 0, top, 0.0)  # the rows of heads that are not are no numbers to sum
    acc, total, top = _heads(acc, HEADS, H_BLOCK), _heads(total, HEADS, H_BLOCK), _heads(top, HEADS, H_BLOCK)
    return acc, total, tl.where(count > 0, top, float("-inf"))


@triton.jit
def _together(coded, lse, acc, total, top, sink):
    """One softmax over the codes, with their log-sum-exps, the own block, as `_own_block` gives it, and the sinks; and
    its denominators, 0 for heads that have no key at all: a padded row of a captured graph."""
    new_top = tl.maximum(tl.maximum(top, lse), sink)
    new_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(lse - new_top)
    decay = tl.exp2(top - new_top)
    total = total * decay + weight + tl.exp2(sink - new_top)
    result = (acc * decay[:, None] + coded * weight[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    return result, total


@triton.jit
def _load_keys(k_ptr, v_ptr, begin, count, dk, d, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KEYS: tl.constexpr):
    n = begin + tl.arange(0, KEYS)
    live = (n < count)[:, None]
    k = tl.load(k_ptr + n[:, None] * K_DIM + dk[None, :], mask=live & (dk < K_DIM)[None, :], other=0.0)
    v = tl.load(v_ptr + n[:, None] * V_DIM + d[None, :], mask=live & (d < V_DIM)[None, :], other=0.0)
    return k, v


@triton.jit
def _heads(x, HEADS: tl.constexpr, H_BLOCK: tl.constexpr):
    """The first H_BLOCK rows of `x`, of which HEADS mean something; a matrix product has 16 rows at least."""
    PAD: tl.constexpr = x.shape[0] // H_BLOCK
    live = tl.arange(0, x.shape[0]) < HEADS
    if len(x.shape) == 2:
        x = tl.reshape(tl.where(live[:, None], x, 0.0), [PAD, H_BLOCK, x.shape[1]])
    else:
        x = tl.reshape(tl.where(live, x, 0.0), [PAD, H_BLOCK])
    return tl.sum(x, 0)


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
    whole = torch.empty((num_seqs, heads, v_dim), dtype=torch.float32, device=out.device)
    whole_lse = torch.empty((num_seqs, heads), dtype=torch.float32, device=out.device)
    before = replace(meta, seq_lens=current.starts)
    offset = value_offset_of(layer)
    shares = attend_shares(
        query, layer, before, whole, scale=scale, window=None, softcap=softcap, sinks=None, lse=whole_lse
    )
    grid, shape = join_launch(shares, num_seqs, layer.k.tensor.shape[1])
    k, v, k_block = recent.k.tensor, recent.v.tensor, channel_block(recent.k.head_dim)
    join_recent_kernel[grid](
        out, whole, whole_lse, shares.partial, shares.lse, query, k, v, current.slots, current.starts, meta.seq_lens,
        query if sinks is None else sinks,
        whole if offset is None else offset,
        *query.stride()[:2],
        k.stride(0),
        v.stride(0),
        *base2_scale(scale, softcap),
        num_seqs,
        shares.config.programs,
        K_DIM=recent.k.head_dim,
        K_BLOCK=k_block,
        ROWS=max(shape["H_BLOCK"], 16),
        BLOCK_SIZE=recent.block_size,
        KEYS=min(recent.block_size, max(_ELEMENTS // max(k_block, shape["COLUMNS"]), 16)),
        SOFTCAP=softcap is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        OFFSET=offset is not None,
        **shape,
    )  # fmt: skip
