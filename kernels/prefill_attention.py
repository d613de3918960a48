"""Triton varlen causal attention over pages for sequences with several queries: prompts and chunks with history.

One program takes a tile of queries of one sequence and one KV head; the query heads of that KV head share the tile's
rows, so every key tile is read once for all of them. Programs find their sequence by bisection in `cu_seqlens_q`, which
needs no host knowledge of the lengths: the grid is a bound from Python. Later tiles have more keys and start first.
Keys come from the pages, the chunk's own too, so a chunk sees exactly what a later step will see; where a layer keeps
`recent` blocks, those of a query's own block come from the step instead. Only tiles that the causal diagonal or the
window's edge crosses are masked.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels import prefill_workspace
from hf_paged.kernels.decode_attention import base2_scale, channel_block, dot_dtype, scale_of
from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.layout import AttentionMetadata, GroupPages, LayerKV, PlainPages, RecentRows
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.prefill_config import PrefillConfig, choose_config
from hf_paged.kernels.prefill_recent import own_block_tiles
from hf_paged.kernels.tiles import normalise_rows, softmax_step


@triton.jit
def _find_sequence(cu_seqlens_ptr, first_seq, num_seqs, tile, QUERIES: tl.constexpr):
    """The sequence that query tile `tile` belongs to: sequence i starts at tile cu[i] // QUERIES + i."""
    base = tl.load(cu_seqlens_ptr + first_seq) // QUERIES
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_ptr + first_seq + middle) // QUERIES - base + middle
        if start <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    return seq, tile - (tl.load(cu_seqlens_ptr + first_seq + seq) // QUERIES - base + seq)


@triton.jit
def _key_tiles(
    begin,
    end,
    acc,
    total,
    top,
    v_unit,
    q,
    q_unit,
    position,  # [ROWS] of the last keys that the queries see
    first_key,  # first key that any of them sees; blocks before it may be freed
    seq_len,
    window,
    softcap,
    table_ptr,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    k_stride,
    k_scale_stride,
    v_stride,
    v_scale_stride,
    kv_head,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORKSPACE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr,
    V_INT4: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the key tiles `[begin, end)`."""
    n = tl.arange(0, TILE)
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    for tile in tl.range(begin, end, num_stages=STAGES):
        key = tile * TILE + n
        live = (key >= first_key) & (key < seq_len)
        if WORKSPACE:
            k_tile = k_ptr + (key * K_DIM)[:, None] + dk[None, :]
            v_tile = v_ptr + (key * V_DIM)[:, None] + dv[None, :]
            k_scales = k_scale_ptr
            v_scales = v_scale_ptr
        else:
            if MASKED:
                block = tl.load(table_ptr + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
            row_in_block = kv_head * BLOCK_SIZE + key % BLOCK_SIZE
            k_tile = k_ptr + (block * k_stride + row_in_block * K_DIM)[:, None] + dk[None, :]
            v_tile = v_ptr + (block * v_stride + row_in_block * V_DIM)[:, None] + dv[None, :]
            k_scales = k_scale_ptr + block * k_scale_stride + row_in_block
            v_scales = v_scale_ptr + block * v_scale_stride + row_in_block
        if MASKED:
            if not K_INT4:
                k = tl.load(k_tile, mask=live[:, None] & (dk < K_DIM)[None, :], other=0.0)
            if not V_INT4:
                v = tl.load(v_tile, mask=live[:, None] & (dv < V_DIM)[None, :], other=0.0)
            keep = key[None, :] <= position[:, None]
            if WINDOW:
                keep &= key[None, :] > position[:, None] - window
        else:
            keep = None
            if K_BLOCK == K_DIM and not K_INT4:
                k = tl.load(k_tile)
            elif not K_INT4:
                k = tl.load(k_tile, mask=(dk < K_DIM)[None, :], other=0.0)
            if V_BLOCK == V_DIM and not V_INT4:
                v = tl.load(v_tile)
            elif not V_INT4:
                v = tl.load(v_tile, mask=(dv < V_DIM)[None, :], other=0.0)
        k_scale = tl.zeros([TILE], tl.float32)
        v_scale = tl.zeros([TILE], tl.float32)
        if K_INT4:
            k, k_scale = group_tile(
                k_ptr, k_scale_ptr, block, row_in_block, k_stride, k_scale_stride, dk, live, K_DIM, K_DOT
            )
        elif K_SCALED:
            if MASKED:
                k_scale = tl.load(k_scales, mask=live, other=0.0).to(tl.float32)
            else:
                k_scale = tl.load(k_scales).to(tl.float32)
        if V_INT4:
            v, v_scale = group_tile(
                v_ptr, v_scale_ptr, block, row_in_block, v_stride, v_scale_stride, dv, live, V_DIM, V_DOT
            )
        elif V_SCALED:
            if MASKED:
                v_scale = tl.load(v_scales, mask=live, other=0.0).to(tl.float32)
            else:
                v_scale = tl.load(v_scales).to(tl.float32)
        acc, total, top, v_unit = softmax_step(
            acc, total, top, v_unit, q, q_unit, k, k_scale, v, v_scale, keep, softcap,
            MASKED, SOFTCAP, K_SCALED, V_SCALED, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip
    return acc, total, top, v_unit


# these vary: no kernel per value
@triton.jit(do_not_specialize=["first_seq", "num_seqs", "window", "tables_stride", "tokens"])
def _prefill(
    out_ptr,  # [T, heads, V_DIM]
    q_ptr,  # [T, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM]
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM]
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16
    tables_ptr,  # [num_seqs, max_blocks] int32
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [T, heads] where SINKS is 2
    own_k_ptr,  # [T, kv_heads, K_DIM], of the step's own tokens, where RECENT
    own_v_ptr,  # [T, kv_heads, V_DIM]
    first_seq,
    num_seqs,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    k_stride,
    k_scale_stride,
    v_stride,
    v_scale_stride,
    own_k_stride,
    own_v_stride,
    tables_stride,
    tokens,  # of a block, where WORKSPACE
    scale,  # softmax scale; times log2 e without SOFTCAP, times 2 log2 e / softcap with it
    softcap,  # softcap * log2 e
    window,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORKSPACE: tl.constexpr,
    RECENT: tl.constexpr,  # tokens of a block, 0: codes only
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr,
    V_INT4: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    OWN_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq, q_tile = _find_sequence(
        cu_seqlens_ptr, first_seq, num_seqs, tl.num_programs(1) - 1 - tl.program_id(1), QUERIES
    )
    q_begin = tl.load(cu_seqlens_ptr + first_seq + seq)
    q_len = tl.load(cu_seqlens_ptr + first_seq + seq + 1) - q_begin
    first_query = q_tile * QUERIES
    if first_query >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + first_seq + seq)
    history = seq_len - q_len

    row = tl.arange(0, QUERIES * GROUP_BLOCK)
    query = first_query + row // GROUP_BLOCK
    head = kv_head * GROUP + row % GROUP_BLOCK
    live = (query < q_len) & (row % GROUP_BLOCK < GROUP)
    position = history + query
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    q_offset = (q_begin + query).to(tl.int64) * q_stride_t + head * q_stride_h
    q_mask = live[:, None] & (dk < K_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dk[None, :], mask=q_mask, other=0.0)
    q, q_unit = normalise_rows(q, K_DOT, K_SCALED)
    q_unit *= scale

    acc = tl.zeros([QUERIES * GROUP_BLOCK, V_BLOCK], tl.float32)
    total = tl.zeros([QUERIES * GROUP_BLOCK], tl.float32)
    top = tl.full([QUERIES * GROUP_BLOCK], float("-inf"), tl.float32)
    v_unit = 1e-30
    table_ptr = tables_ptr + (first_seq + seq).to(tl.int64) * tables_stride
    if WORKSPACE:  # block `seq` belongs to it
        first_row = (seq * tl.num_programs(0) + kv_head).to(tl.int64) * tokens
        k_ptr += first_row * K_DIM
        v_ptr += first_row * V_DIM
    first_position = history + first_query
    last_position = history + tl.minimum(first_query + QUERIES, q_len) - 1
    last_seen = position
    first_end = first_position + 1  # keys that the first query sees here, and the last one
    last_end = last_position + 1
    if RECENT:  # the rest is the step's own
        last_seen = position // RECENT * RECENT - 1
        first_end = first_position // RECENT * RECENT
        last_end = last_position // RECENT * RECENT
    first_key = 0
    open_begin = 0
    if WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
        # the first tile that lies inside the window of the last query, hence of all
        open_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE)
    end = tl.cdiv(last_end, TILE)
    open_end = tl.maximum(first_end // TILE, open_begin)  # tiles before it precede every query
    open_begin = tl.minimum(open_begin, end)
    open_end = tl.minimum(open_end, end)

    # the window's edge, what every query sees, the diagonal
    for region in tl.static_range(0 if WINDOW else 1, 3):
        first = first_key // TILE if region == 0 else (open_begin if region == 1 else open_end)
        last = open_begin if region == 0 else (open_end if region == 1 else end)
        acc, total, top, v_unit = _key_tiles(
            first, last, acc, total, top, v_unit, q, q_unit, last_seen, first_key, seq_len, window, softcap,
            table_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, k_stride, k_scale_stride, v_stride, v_scale_stride,
            kv_head, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, WORKSPACE, TILE, region != 1, WINDOW, SOFTCAP,
            K_SCALED, V_SCALED, K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE, STAGES,
        )  # fmt: skip

    if V_SCALED:
        acc *= v_unit
    if RECENT:
        q = tl.load(q_ptr + q_offset[:, None] + dk[None, :], mask=q_mask, other=0.0).to(OWN_DOT)
        acc, total, top = own_block_tiles(
            acc, total, top, q, scale, softcap, position, first_end, last_position, q_begin - history,
            own_k_ptr + kv_head * K_DIM, own_v_ptr + kv_head * V_DIM, own_k_stride, own_v_stride,
            K_DIM, V_DIM, K_BLOCK, V_BLOCK, RECENT, TILE, SOFTCAP, OWN_DOT,
        )  # fmt: skip
    if SINKS:
        at = (q_begin + query).to(tl.int64) * (tl.num_programs(0) * GROUP) * (SINKS - 1) + head
        sink = tl.load(sinks_ptr + at, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        acc *= tl.exp2(top - new_top)[:, None]
        total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    out_offset = (q_begin + query).to(tl.int64) * out_stride_t + head * out_stride_h
    out_mask = live[:, None] & (dv < V_DIM)[None, :]
    tl.store(out_ptr + out_offset[:, None] + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@on_device
def prefill_attention(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    recent: RecentRows | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Attention of the rows of `query` `[T, heads, head_dim]` after the decodes, written to the same rows of `out`.

    Never synchronises. Rows past `cu_seqlens_q[-1]` are left as they are. Long prompts on coded pages go through the
    workspace of `prefill_workspace.py`, except under a given `config`.
    """
    attend = partial(_attend, scale=scale, window=window, softcap=softcap, config=config)
    workspace = config is None and prefill_workspace.wanted(query, layer, meta)
    slices: Iterable[tuple[slice, LayerKV]] = [(slice(0, layer.k.tensor.shape[1]), layer)]
    if workspace:
        slices = prefill_workspace.slices(query, layer, meta, window)
    elif isinstance(layer.k, PlainPages) and isinstance(layer.v, PlainPages):
        slices = prefill_workspace.plain_slices(query, layer, meta)
    group = query.shape[1] // layer.k.tensor.shape[1]
    for kv_heads, values in slices:
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        of_heads = None if sinks is None else sinks[..., heads].contiguous()
        own = None if recent is None else (recent.key[:, kv_heads], recent.value[:, kv_heads], layer.block_size)
        attend(query[:, heads], values, meta, out[:, heads], sinks=of_heads, own=own, workspace=workspace)


def _attend(
    query: Tensor, layer: LayerKV, meta: AttentionMetadata, out: Tensor, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None, config: PrefillConfig | None,
    own: tuple[Tensor, Tensor, int] | None, workspace: bool,
) -> None:  # fmt: skip
    """One launch, over pages, or over a workspace that holds one block per prompt.

    `own`: K and V of the step's tokens `[T, kv_heads, head_dim]` and tokens per block, where a query's own block is
    taken from there.
    """
    heads = query.shape[1]
    k, v = layer.k.tensor, layer.v.tensor
    own_k, own_v, recent = (query, query, 0) if own is None else own
    kv_heads = k.shape[1]
    group = heads // kv_heads
    num_seqs = meta.num_seqs - meta.num_decodes
    config = config or choose_config(layer, query, group)
    group_block = triton.next_power_of_2(group)
    queries = max(config.rows // group_block, 1)
    most_tiles = query.shape[0] // queries - meta.num_decodes // queries + num_seqs  # tiles are counted from row 0
    _prefill[kv_heads, most_tiles](
        out,
        query,
        k,
        scale_of(layer.k),
        v,
        scale_of(layer.v),
        meta.block_tables,
        meta.cu_seqlens_q,
        meta.seq_lens,
        query if sinks is None else sinks,
        own_k,
        own_v,
        meta.num_decodes,
        num_seqs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        *(x.stride(0) for x in (k, scale_of(layer.k), v, scale_of(layer.v), own_k, own_v, meta.block_tables)),
        k.shape[2] if workspace else 0,
        *base2_scale(scale, softcap),
        window or 0,
        GROUP=group,
        GROUP_BLOCK=group_block,
        QUERIES=queries,
        K_DIM=layer.k.head_dim,
        V_DIM=layer.v.head_dim,
        K_BLOCK=channel_block(layer.k.head_dim),
        V_BLOCK=channel_block(layer.v.head_dim),
        BLOCK_SIZE=1 if workspace else layer.block_size,
        WORKSPACE=workspace,
        RECENT=recent,
        TILE=config.tile,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        K_SCALED=not isinstance(layer.k, PlainPages),
        V_SCALED=not isinstance(layer.v, PlainPages),
        K_INT4=isinstance(layer.k, GroupPages),
        V_INT4=isinstance(layer.v, GroupPages),
        K_DOT=dot_dtype(query, layer.k),
        V_DOT=dot_dtype(query, layer.v),
        OWN_DOT=dot_dtype(query, PlainPages(data=own_k)),
        BYTE_PERMUTE=config.byte_permute and query.is_cuda,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
