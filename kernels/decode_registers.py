"""Gluon decode attention over 8-bit and 16-bit pages: from memory to matrix-unit operands inside registers.

The portable kernel (`decode_portable.py`) sends tiles through shared memory and picks codes out byte by byte, 5.5
instructions per code, which bounds it at two thirds of an H200's bandwidth. Here a program is one warp, a tile never
leaves its registers (`register_tiles.py`), and the heads of one KV head pad to 8, not 16. The next tile's keys are on
their way while this one's values are weighted, and the other way round: 4 KB in flight per warp at all times.

Serves head_dim 64, 128, 256 in 16-byte aligned pages, 16-bit queries, up to 16 heads per KV head; `fits` says when.
Any GPU with `mma.m16n8k16` (compute capability 8.0), for e4m3 8.9. Not in the interpreter: GPU tests cover it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.decode_int4 import attend_int4
from hf_paged.kernels.decode_shares import SCAN, next_piece, result_pointers, share
from hf_paged.kernels.layout import GroupPages, LayerKV
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.kernels.register_tiles import (
    INT8_BIAS,
    add_code_products,
    at_edge,
    block_of,
    capped,
    code_values,
    dot_type,
    head_of_pages,
    inverse_denominator,
    k_layout,
    k_operand,
    k_pairs,
    parts,
    plus_offset,
    prefetch_rows,
    q_layout,
    q_operands,
    q_pairs,
    run_of,
    tile_words,
    v_layout,
    v_operand,
    v_pairs,
)


@gluon.jit(do_not_specialize=["num_seqs", "kv_heads", "window", "tables_stride"])
def decode_registers_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [programs, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [programs, 2, GROUP] fp32, base 2
    q_ptr,  # [num_seqs, heads, K_DIM], last dimension contiguous
    k_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM] int8, e4m3 or 16-bit
    k_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, for codes
    v_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM] int8, e4m3 or 16-bit
    v_scale_ptr,  # [num_blocks, kv_heads, BLOCK_SIZE] fp16, for codes
    tables_ptr,  # [num_seqs, max_blocks] int32
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads]; [num_seqs, heads] where SINKS is 2; 3: base-2 log-sum-exps of whole heads go there
    offset_ptr,  # [kv_heads, V_DIM] fp32, added to whole heads
    q_stride_t, q_stride_h, k_stride, k_scale_stride, v_stride, v_scale_stride, tables_stride,
    scale,  # softmax scale; times log2 e without SOFTCAP, times 2 log2 e / softcap with it
    softcap,  # softcap * log2 e
    window, num_seqs, kv_heads,
    GROUP: gl.constexpr,
    N: gl.constexpr,  # heads of a KV head, padded
    K_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, LEAST: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, OVERLAP: gl.constexpr, INT4: gl.constexpr,
    OFFSET: gl.constexpr, WAITS: gl.constexpr = False,
):  # fmt: skip
    if OVERLAP:  # the joining kernel may start now; it waits for all results
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    n = gl.arange(0, SCAN, layout=gl.BlockedLayout([SCAN // 32], [32], [1], [0]))
    program, begin, end, seq, before = share(n, seq_lens_ptr, num_seqs, kv_heads, window, WINDOW, TILE, LEAST)
    if WAITS:  # every program: what follows this kernel follows the ones before it too
        if begin < end:
            seq, before, kv_head, _, _, keys = next_piece(
                begin, end, seq, before, seq_lens_ptr, kv_heads, window, WINDOW, TILE
            )
            k = head_of_pages(k_ptr, k_scale_ptr, k_stride, k_scale_stride, kv_head * BLOCK_SIZE, K_DIM)
            v = head_of_pages(v_ptr, v_scale_ptr, v_stride, v_scale_stride, kv_head * BLOCK_SIZE, V_DIM)
            _prefetch(
                keys, tables_ptr + seq.to(gl.int64) * tables_stride, k, v, k_ptr.dtype.element_ty,
                v_ptr.dtype.element_ty, K_DIM, V_DIM, BLOCK_SIZE, TILE,
            )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    while begin < end:
        seq, before, kv_head, first, whole, keys = next_piece(
            begin, end, seq, before, seq_lens_ptr, kv_heads, window, WINDOW, TILE
        )
        table_ptr = tables_ptr + seq.to(gl.int64) * tables_stride
        q_row = q_ptr + seq.to(gl.int64) * q_stride_t + kv_head * GROUP * q_stride_h
        k = head_of_pages(k_ptr, k_scale_ptr, k_stride, k_scale_stride, kv_head * BLOCK_SIZE, K_DIM)
        v = head_of_pages(v_ptr, v_scale_ptr, v_stride, v_scale_stride, kv_head * BLOCK_SIZE, V_DIM)
        results = result_pointers(
            out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr, program, seq, kv_head, kv_heads, first, whole,
            GROUP, V_DIM, SINKS,
        )  # fmt: skip
        if INT4:
            attend_int4(
                keys, table_ptr, q_row, q_stride_h, k, v, scale, softcap, results, k_ptr.dtype.element_ty,
                v_ptr.dtype.element_ty, GROUP, N, K_DIM, V_DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, SINKS, OFFSET,
            )  # fmt: skip
        else:
            _attend(
                keys, table_ptr, q_row, q_stride_h, k, v, scale, softcap, results, k_ptr.dtype.element_ty,
                v_ptr.dtype.element_ty, GROUP, N, K_DIM, V_DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, SINKS, OFFSET,
            )  # fmt: skip
        begin += keys[1] - keys[0]


@gluon.jit
def _prefetch(
    keys, table_ptr, k_pages, v_pages, K_TYPE: gl.constexpr, V_TYPE: gl.constexpr, K_DIM: gl.constexpr,
    V_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Ask the first two tiles into the L2. Not into registers: the step may still write them, and not only the newest
    token, for a sequence may begin with blocks that another fills in this very step."""
    for tile in range(keys[0], gl.minimum(keys[0] + 2, keys[1])):
        block = block_of(table_ptr, tile, TILE, BLOCK_SIZE)
        row = tile * TILE % BLOCK_SIZE
        prefetch_rows(k_pages, block, row, K_TYPE, K_DIM, TILE)
        prefetch_rows(v_pages, block, row, V_TYPE, V_DIM, TILE)


@gluon.jit
def _attend(
    keys,  # as `next_piece` gives them
    table_ptr, q_row, q_stride_h,
    k_pages,  # `head_of_pages`, as v_pages
    v_pages, scale, softcap,
    results,  # `result_pointers`
    K_TYPE: gl.constexpr, V_TYPE: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, K_DIM: gl.constexpr,
    V_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Tiles of one sequence and KV head, from the first key to the stored result."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    K_WORDS: gl.constexpr = K_DIM // parts(K_TYPE)
    V_WORDS: gl.constexpr = V_DIM // parts(V_TYPE)
    KL: gl.constexpr = k_layout(TILE, K_WORDS)
    VL: gl.constexpr = v_layout(TILE, V_WORDS, run_of(V_WORDS), False)
    begin, end, first_token, seq_len = keys
    block = block_of(table_ptr, begin, TILE, BLOCK_SIZE)
    next_block = block_of(table_ptr, gl.minimum(begin + 1, end - 1), TILE, BLOCK_SIZE)
    row = begin * TILE % BLOCK_SIZE
    k, k_scale = _load(k_pages, block, row, True, K_TYPE, K_WORDS, TILE, KL, MMA)
    v, v_scale = _load(v_pages, block, row, True, V_TYPE, V_WORDS, TILE, VL, MMA)
    q = _queries(q_row, q_stride_h, scale, GROUP, N, K_DIM, K_TYPE, MMA)
    a0 = gl.zeros([V_WORDS, N], gl.float32, layout=MMA)
    sums = (a0, a0, a0, a0)  # weighted values i of each word / v_unit
    total = gl.zeros([TILE, N], gl.float32, layout=MMA)  # of the softmax denominator
    top = gl.full([N], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))  # running maximum of base-2 scores
    v_unit = 1.0
    if parts(V_TYPE) == 4:
        v_unit = 1e-30  # largest scale of v so far
    for tile in range(begin, end):
        scores = _scores(k, k_scale, q, TILE, N, K_WORDS, K_TYPE, MMA)
        more = tile + 1 < end
        block = next_block  # the one after is asked for now: no two latencies in a row
        next_block = block_of(table_ptr, gl.minimum(tile + 2, end - 1), TILE, BLOCK_SIZE)
        row = (tile + 1) * TILE % BLOCK_SIZE
        k, k_scale = _load(k_pages, block, row, more, K_TYPE, K_WORDS, TILE, KL, MMA)
        if SOFTCAP:
            scores = capped(scores, softcap)
        if at_edge(tile, first_token, seq_len, TILE, WINDOW):
            scores, v, v_scale = _living(
                first_token - tile * TILE, seq_len - tile * TILE, scores, v, v_scale, V_TYPE, TILE, VL, MMA
            )
        weights, decay, total, top, v_unit = _weigh(scores, v_scale, total, top, v_unit, V_TYPE, MMA)
        sums = _add_values(v, weights, decay, sums, TILE, V_WORDS, V_TYPE, MMA)
        v, v_scale = _load(v_pages, block, row, more, V_TYPE, V_WORDS, TILE, VL, MMA)
    whole, out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr = results
    factor = v_unit * inverse_denominator(top, gl.sum(total, 0), whole, lse_ptr, sinks_ptr, GROUP, SINKS)
    if whole:
        _store(out_ptr, sums, factor, offset_ptr, parts(V_TYPE), V_WORDS, N, GROUP, OFFSET)
    else:
        _store(partial_ptr, sums, factor, offset_ptr, parts(V_TYPE), V_WORDS, N, GROUP, False)


@gluon.jit
def _load(
    pages, block, row, more,
    TYPE: gl.constexpr, WORDS: gl.constexpr, TILE: gl.constexpr, L: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A tile `[TILE, WORDS]` from row `row` of a block on, in layout L, and its scales, if there is one more."""
    ptr, scale_ptr, stride, scale_stride = pages
    S: gl.constexpr = gl.SliceLayout(1, MMA)
    words = gl.load(tile_words(ptr, stride, block, row, WORDS, TILE, L), mask=more, eviction_policy="evict_first")
    scale = gl.full([TILE], 1.0, gl.float16, layout=S)
    if parts(TYPE) == 4:
        first = scale_ptr + (block.to(gl.int64) * scale_stride + row)
        scale = gl.load(first + gl.arange(0, TILE, layout=S), mask=more)
    return words, scale


@gluon.jit
def _queries(
    q_row, q_stride_h, scale,
    GROUP: gl.constexpr, N: gl.constexpr, K_DIM: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The heads' queries as right operands, their scores' unit, and what INT8_BIAS adds to these.

    The operands are divided by a power of two, so that fp16 holds them. For 16-bit pages the last two repeat the first.
    """
    PARTS: gl.constexpr = parts(TYPE)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L: gl.constexpr = q_layout(N, K_DIM, PARTS)
    head = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    channel = gl.arange(0, K_DIM, layout=gl.SliceLayout(0, L))
    q = gl.load(q_row + head[:, None] * q_stride_h + channel[None, :], mask=(head < GROUP)[:, None], other=0.0)
    q = q.to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    q = (q * (1.0 / unit)[:, None]).to(dot_type(TYPE))
    bias = gl.zeros([N], gl.float32, layout=gl.SliceLayout(0, MMA))
    if gl.int8 == TYPE:
        bias = gl.convert_layout(gl.sum(q.to(gl.float32), 1), gl.SliceLayout(0, MMA)) * INT8_BIAS
    if PARTS == 4:
        q0, q1, q2, q3 = q_operands(q, TYPE, K_DIM // PARTS, N, B)
    else:
        q0, q1 = q_pairs(q, K_DIM // PARTS, N, B)
        q2 = q0
        q3 = q1
    return q0, q1, q2, q3, gl.convert_layout(unit, gl.SliceLayout(0, MMA)) * scale, bias


@gluon.jit
def _scores(
    k, k_scale, queries,
    TILE: gl.constexpr, N: gl.constexpr, WORDS: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Scaled K q^T, `[TILE, N]` fp32."""
    q0, q1, q2, q3, unit, bias = queries
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    products = gl.zeros([TILE, N], gl.float32, layout=MMA) - bias[None, :]
    if parts(TYPE) == 4:
        products = add_code_products(products, k, q0, q1, q2, q3, TYPE, WORDS, A) * k_scale.to(gl.float32)[:, None]
    else:
        k0, k1 = k_pairs(k, TYPE)
        products = mma_v2(k_operand(k0, TILE, WORDS, A), q0, products)
        products = mma_v2(k_operand(k1, TILE, WORDS, A), q1, products)
    return products * unit[None, :]


@gluon.jit
def _living(
    first, left, scores, v, v_scale, TYPE: gl.constexpr, TILE: gl.constexpr, VL: gl.constexpr, MMA: gl.constexpr
):
    """A tile at an edge, of which the rows from `first` to `left` are seen: dead slots may hold NaN, int8 codes not."""
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, MMA))
    keep = (n >= first) & (n < left)
    scores = gl.where(keep[:, None], scores, float("-inf"))
    if parts(TYPE) == 4:
        v_scale = gl.where(keep, v_scale, 0.0)
    if gl.int8 != TYPE:
        v = gl.where((gl.arange(0, TILE, layout=gl.SliceLayout(1, VL)) < left)[:, None], v, 0)
    return scores, v, v_scale


@gluon.jit
def _weigh(scores, v_scale, total, top, v_unit, TYPE: gl.constexpr, MMA: gl.constexpr):
    """Probabilities, times the values' scales / v_unit, as right operand; what sums of them decay by; new sums."""
    new_top = gl.maximum(top, gl.max(scores, 0))
    probs = gl.exp2(scores - new_top[None, :])
    decay = gl.exp2(top - new_top)
    total = total * decay[None, :] + probs
    if parts(TYPE) == 4:
        weight = v_scale.to(gl.float32)
        new_unit = gl.maximum(v_unit, gl.max(weight, 0))
        decay *= v_unit / new_unit
        v_unit = new_unit
        probs = probs * (weight * (1.0 / new_unit))[:, None]
    weights = gl.convert_layout(probs.to(dot_type(TYPE)), gl.DotOperandLayout(1, MMA, 2))
    return weights, decay, total, new_top, v_unit


@gluon.jit
def _add_values(
    v, weights, decay, sums, TILE: gl.constexpr, WORDS: gl.constexpr, TYPE: gl.constexpr, MMA: gl.constexpr
):
    """Weighted values, `[WORDS, N]` of values i of each word: what there was, times `decay`, + V^T weights."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    a0, a1, a2, a3 = sums
    a0 = a0 * decay[None, :]
    a1 = a1 * decay[None, :]
    if parts(TYPE) == 4:
        v0, v1, v2, v3 = code_values(v, TYPE, WORDS, A)
        a0 = mma_v2(v0, weights, a0)
        a1 = mma_v2(v1, weights, a1)
        a2 = mma_v2(v2, weights, a2 * decay[None, :])
        a3 = mma_v2(v3, weights, a3 * decay[None, :])
    else:
        RUN: gl.constexpr = run_of(WORDS)
        v0, v1 = v_pairs(gl.convert_layout(v, v_layout(TILE, WORDS, RUN, True), assert_trivial=True), TYPE)
        a0 = mma_v2(v_operand(v0, TILE, WORDS, RUN, A), weights, a0)
        a1 = mma_v2(v_operand(v1, TILE, WORDS, RUN, A), weights, a1)
    return a0, a1, a2, a3


@gluon.jit
def _store(
    ptr, sums, factor, offset_ptr,
    PARTS: gl.constexpr, WORDS: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """All heads, plus `[V_DIM]` at `offset_ptr`, into `[GROUP, V_DIM]` at `ptr`: 16 bytes per lane and store, in the
    order of channels."""
    RUN: gl.constexpr = run_of(WORDS)
    a0, a1, a2, a3 = sums
    a0 = a0 * factor[None, :]
    a1 = a1 * factor[None, :]
    if PARTS == 4:
        x = gl.join(gl.join(a0, a2 * factor[None, :]), gl.join(a1, a3 * factor[None, :]))  # value 2 i + j at [i, j]
    else:
        x = gl.join(a0, a1)
    # row 8 (RUN y + x) + r is word RUN (8 y + r) + x, see `v_operand`
    x = x.reshape([WORDS // (8 * RUN), RUN, 8, N, PARTS]).permute([3, 0, 2, 1, 4]).reshape([N, WORDS * PARTS])
    head = gl.arange(0, N, layout=gl.SliceLayout(1, x.type.layout))
    channel = gl.arange(0, WORDS * PARTS, layout=gl.SliceLayout(0, x.type.layout))
    x = plus_offset(x, offset_ptr, channel, OFFSET).to(ptr.dtype.element_ty)
    gl.store(ptr + (head * (WORDS * PARTS))[:, None] + channel[None, :], x, mask=(head < GROUP)[:, None])


def launch(layer: LayerKV) -> tuple[int, int, int]:
    """Tokens per tile, registers per lane and programs per multiprocessor.

    4 KB of keys in a tile, less where accumulators need the room. At head_dim 128 a scheduler's 512 registers per lane
    hold 3 programs; of 16-bit pages, 8 on a multiprocessor read as fast as 12, leave fewer partial results, and have
    registers to spare: none goes to memory, which is 1%.
    """
    k, v = layer.k.tensor, layer.v.tensor
    wide = max(x.shape[3] * x.element_size() for x in (k, v))
    head_dim = max(k.shape[3], v.shape[3])
    tile = min(layer.block_size, 32 if wide <= 128 else 16)
    if head_dim <= 64:
        return tile, 128, 16
    if head_dim <= 128:
        return (tile, 224, 8) if min(k.element_size(), v.element_size()) == 2 else (tile, 168, 12)
    return tile, 255, 8


def fits(query: Tensor, layer: LayerKV) -> bool:
    """Whether this kernel serves the call; the portable one serves every other."""
    k, v = layer.k.tensor, layer.v.tensor
    group = query.shape[1] // k.shape[1]
    capability = (8, 9) if torch.float8_e4m3fn in (k.dtype, v.dtype) else (8, 0)
    return (
        query.is_cuda
        and cuda_capability(query.device) >= capability
        and not any(isinstance(pages, GroupPages) for pages in (layer.k, layer.v))
        and query.dtype != torch.float32
        and all(x.dtype != torch.float32 and x.shape[3] in (64, 128, 256) for x in (k, v))
        and group <= 16
        and max(group, 8) * v.shape[3] <= 2048  # accumulators: at most 64 registers of a lane
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in (k, v))
    )
