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
from hf_paged.kernels.decode_attention import base2_scale, dot_dtype, page_constants, scale_of
from hf_paged.kernels.group_tile import group_tile
from hf_paged.kernels.layout import AttentionMetadata, LayerKV, PlainPages, RecentRows
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.prefill_config import PrefillConfig, choose_config
from hf_paged.kernels.prefill_recent import own_block_tiles
from hf_paged.kernels.tiles import add_sinks, normalise_rows, softmax_step


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
def _query_tile(cu_seqlens_ptr, seq_lens_ptr, first_seq, num_seqs, tile, QUERIES: tl.constexpr):
    """Of query tile `tile`: its sequence, first query in that, the sequence's first row and queries, and its keys."""
    seq, q_tile = _find_sequence(cu_seqlens_ptr, first_seq, num_seqs, tile, QUERIES)
    q_begin = tl.load(cu_seqlens_ptr + first_seq + seq)
    q_len = tl.load(cu_seqlens_ptr + first_seq + seq + 1) - q_begin
    return seq, q_tile * QUERIES, q_begin, q_len, tl.load(seq_lens_ptr + first_seq + seq)


@triton.jit
def _bounds(first_position, last_position, window, TILE: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr):
    """Of queries from one position to another: the first key that any sees, where the own blocks of those whose own
    keys come from elsewhere begin, and key tiles: first and last one that all see, last one that any sees, each + 1."""
    first_end = first_position + 1  # keys that the first query sees here, and the last one
    last_end = last_position + 1
    if RECENT:  # the rest is the step's own
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
    return first_key, first_end, tl.minimum(open_begin, end), tl.minimum(open_end, end), end


@triton.jit
def _key_tiles(
    begin, end, acc, total, top, v_unit, q, q_unit,
    position,  # [ROWS] of the last keys that the queries see
    first_key,  # first key that any of them sees; blocks before it may be freed
    seq_len, window, softcap, table_ptr,
    k_pages,  # pages, scales, and their strides; as v_pages
    v_pages, kv_head,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WORKSPACE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    K_INT4: tl.constexpr, V_INT4: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the key tiles `[begin, end)`."""
    for tile in tl.range(begin, end, num_stages=STAGES):
        key = tile * TILE + tl.arange(0, TILE)
        live = (key >= first_key) & (key < seq_len)
        block = key
        row = key
        if not WORKSPACE:
            if MASKED:
                block = tl.load(table_ptr + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
            row = kv_head * BLOCK_SIZE + key % BLOCK_SIZE
        k, k_scale = _load(k_pages, block, row, live, WORKSPACE, MASKED, K_DIM, K_BLOCK, K_SCALED, K_INT4, K_DOT)
        v, v_scale = _load(v_pages, block, row, live, WORKSPACE, MASKED, V_DIM, V_BLOCK, V_SCALED, V_INT4, V_DOT)
        keep = None
        if MASKED:
            keep = key[None, :] <= position[:, None]
            if WINDOW:
                keep &= key[None, :] > position[:, None] - window
        acc, total, top, v_unit = softmax_step(
            acc, total, top, v_unit, q, q_unit, k, k_scale, v, v_scale, keep, softcap,
            MASKED, SOFTCAP, K_SCALED, V_SCALED, K_DOT, V_DOT, BYTE_PERMUTE,
        )  # fmt: skip
    return acc, total, top, v_unit


@triton.jit
def _load(
    pages, block, row, live, WORKSPACE: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, INT4: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `[TILE, BLOCK]` of blocks, or of the one that a workspace has, and their scales; where MASKED, live ones."""
    ptr, scale_ptr, stride, scale_stride = pages
    d = tl.arange(0, BLOCK)
    scale = tl.zeros(row.shape, tl.float32)
    if INT4:
        values, scale = group_tile(ptr, scale_ptr, block, row, stride, scale_stride, d, live, DIM, DOT)
    else:
        at = row * DIM
        if not WORKSPACE:
            at += block * stride
        pointers = ptr + at[:, None] + d[None, :]
        if MASKED:
            values = tl.load(pointers, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        elif BLOCK == DIM:
            values = tl.load(pointers)
        else:
            values = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
        if SCALED and MASKED:
            scale = tl.load(scale_ptr + block * scale_stride + row, mask=live, other=0.0).to(tl.float32)
        elif SCALED:
            scale = tl.load(scale_ptr + block * scale_stride + row).to(tl.float32)
    return values, scale


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
    first_seq, num_seqs, q_stride_t, q_stride_h, out_stride_t, out_stride_h, k_stride, k_scale_stride, v_stride,
    v_scale_stride, own_k_stride, own_v_stride, tables_stride,
    tokens,  # of a block, where WORKSPACE
    scale,  # softmax scale; times log2 e without SOFTCAP, times 2 log2 e / softcap with it
    softcap,  # softcap * log2 e
    window,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, QUERIES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORKSPACE: tl.constexpr,
    RECENT: tl.constexpr,  # tokens of a block, 0: codes only
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, K_INT4: tl.constexpr, V_INT4: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    OWN_DOT: tl.constexpr, BYTE_PERMUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    seq, first_query, q_begin, q_len, seq_len = _query_tile(
        cu_seqlens_ptr, seq_lens_ptr, first_seq, num_seqs, tl.num_programs(1) - 1 - tl.program_id(1), QUERIES
    )
    if first_query >= q_len:
        return
    history = seq_len - q_len
    row = tl.arange(0, QUERIES * GROUP_BLOCK)
    query = first_query + row // GROUP_BLOCK
    head = kv_head * GROUP + row % GROUP_BLOCK
    live = (query < q_len) & (row % GROUP_BLOCK < GROUP)
    position = history + query
    dk = tl.arange(0, K_BLOCK)
    q_at = q_ptr + ((q_begin + query).to(tl.int64) * q_stride_t + head * q_stride_h)[:, None] + dk[None, :]
    q_mask = live[:, None] & (dk < K_DIM)[None, :]
    q, q_unit = normalise_rows(tl.load(q_at, mask=q_mask, other=0.0), K_DOT, K_SCALED)
    q_unit *= scale
    acc = tl.zeros([QUERIES * GROUP_BLOCK, V_BLOCK], tl.float32)
    total = tl.zeros([QUERIES * GROUP_BLOCK], tl.float32)
    top = tl.full([QUERIES * GROUP_BLOCK], float("-inf"), tl.float32)
    v_unit = 1e-30
    if WORKSPACE:  # block `seq` belongs to it
        first_row = (seq * tl.num_programs(0) + kv_head).to(tl.int64) * tokens
        k_ptr += first_row * K_DIM
        v_ptr += first_row * V_DIM
    last_position = history + tl.minimum(first_query + QUERIES, q_len) - 1
    first_key, own_begin, open_begin, open_end, end = _bounds(
        history + first_query, last_position, window, TILE, WINDOW, RECENT
    )
    last_seen = position // RECENT * RECENT - 1 if RECENT else position
    # the window's edge, what every query sees, the diagonal
    for region in tl.static_range(0 if WINDOW else 1, 3):
        first = first_key // TILE if region == 0 else (open_begin if region == 1 else open_end)
        last = open_begin if region == 0 else (open_end if region == 1 else end)
        acc, total, top, v_unit = _key_tiles(
            first, last, acc, total, top, v_unit, q, q_unit, last_seen, first_key, seq_len, window, softcap,
            tables_ptr + (first_seq + seq).to(tl.int64) * tables_stride,
            (k_ptr, k_scale_ptr, k_stride, k_scale_stride), (v_ptr, v_scale_ptr, v_stride, v_scale_stride),
            kv_head, K_DIM, V_DIM, K_BLOCK, V_BLOCK, BLOCK_SIZE, WORKSPACE, TILE, region != 1, WINDOW, SOFTCAP,
            K_SCALED, V_SCALED, K_INT4, V_INT4, K_DOT, V_DOT, BYTE_PERMUTE, STAGES,
        )  # fmt: skip
    if V_SCALED:
        acc *= v_unit
    if RECENT:
        q = tl.load(q_at, mask=q_mask, other=0.0).to(OWN_DOT)
        acc, total, top = own_block_tiles(
            acc, total, top, q, scale, softcap, position, own_begin, last_position, q_begin - history,
            own_k_ptr + kv_head * K_DIM, own_v_ptr + kv_head * V_DIM, own_k_stride, own_v_stride,
            K_DIM, V_DIM, K_BLOCK, V_BLOCK, RECENT, TILE, SOFTCAP, OWN_DOT,
        )  # fmt: skip
    if SINKS:
        at = (q_begin + query).to(tl.int64) * (tl.num_programs(0) * GROUP) * (SINKS - 1) + head
        total, decay = add_sinks(total, top, sinks_ptr + at, live)
        acc *= decay[:, None]
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    dv = tl.arange(0, V_BLOCK)
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
        **page_constants(query, layer),
        BLOCK_SIZE=1 if workspace else layer.block_size,
        WORKSPACE=workspace,
        RECENT=recent,
        TILE=config.tile,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        OWN_DOT=dot_dtype(query, PlainPages(data=own_k)),
        BYTE_PERMUTE=config.byte_permute and query.is_cuda,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
