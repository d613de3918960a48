"""Joining what the programs of a decode step computed of sequences that they shared (`decode_shares.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hf_paged.kernels.decode_shares import SCAN, survey, value_offset, visible_tiles


@triton.jit(do_not_specialize=["num_seqs", "window", "held"])
def join_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [held, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [held, 2, GROUP] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [num_seqs, heads] where SINKS is 2
    offset_ptr,  # [kv_heads, V_DIM] fp32, added to heads that have a key
    num_seqs, window, held,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: GROUP or 1
    H_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    TILE: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Heads of one KV head of one sequence: join their partial results, if there are any; zeros for an empty one."""
    if OVERLAP:  # what follows may start; it waits
        gdc_launch_dependents()
    first_head = tl.program_id(0) * HEADS
    seq = tl.program_id(1)
    heads = tl.num_programs(0) * HEADS
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    offset = value_offset(offset_ptr, first_head // GROUP, d, V_DIM, OFFSET)
    tiles, first, last = programs_of(
        seq, first_head // GROUP, seq_lens_ptr, num_seqs, heads // GROUP, window, held, WINDOW, TILE, LEAST
    )
    if OVERLAP:  # every program, whatever it has to do: what follows this kernel follows the other one too
        gdc_wait()
    h = tl.arange(0, H_BLOCK)
    out = out_ptr + (seq.to(tl.int64) * heads + first_head + h)[:, None] * V_DIM + d[None, :]
    mask = (h < HEADS)[:, None] & (d < V_DIM)[None, :]
    if tiles == 0:  # a padded row of a captured graph
        tl.store(out, tl.zeros([H_BLOCK, COLUMNS], out_ptr.dtype.element_ty), mask=mask)
        return
    if first == last:
        return
    top = tl.full([H_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([H_BLOCK], tl.float32)
    if SINKS:
        at = seq.to(tl.int64) * heads * (SINKS - 1) + first_head + h
        top = tl.load(sinks_ptr + at, mask=h < HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    result, _ = joined(partial_ptr, lse_ptr, first, last, first_head % GROUP, top, total, d, GROUP, HEADS, V_DIM, STEP)
    tl.store(out, (result + offset[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def programs_of(
    seq, kv_head, seq_lens_ptr, num_seqs, kv_heads, window, held,
    WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Tiles of one KV head of a sequence, and the first and the last program that have some of them."""
    n = tl.arange(0, SCAN)
    total, _living, parts, _each, programs = survey(
        n, seq_lens_ptr, num_seqs, kv_heads, window, held, WINDOW, TILE, LEAST
    )
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + seq), window, WINDOW, TILE)
    if parts > 0:
        first = (seq * kv_heads + kv_head) * parts
        last = first + parts - 1
    else:
        begin = kv_head * tiles
        for i in range(0, seq, SCAN):
            seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < seq, other=0)
            begin += tl.sum(visible_tiles(seq_len, window, WINDOW, TILE)[2], 0) * kv_heads
        first = _program_of(begin, total * kv_heads, programs)
        last = _program_of(begin + tiles - 1, total * kv_heads, programs)
    return tiles, first, last


@triton.jit
def _program_of(unit, units, programs):
    """The program whose share holds `unit`: the first `units % programs` ones have one more than the others."""
    least = units // programs
    more = (units % programs) * (least + 1)
    return tl.where(unit < more, unit // (least + 1), units % programs + (unit - more) // tl.maximum(least, 1))


@triton.jit
def joined(
    partial_ptr, lse_ptr, first, last, first_head, top, total, d,
    GROUP: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Columns `d` of the results of programs `first..last`, after whatever `top` and `total` `[H_BLOCK]` stand for, and
    their base-2 log-sum-exps.
    """
    s = tl.arange(0, STEP)
    h = tl.arange(0, top.shape[0])
    acc = tl.zeros([top.shape[0], d.shape[0]], tl.float32)
    for p in range(first, last + 1, STEP):
        live = (p + s <= last)[:, None] & (h < HEADS)[None, :]
        slot = (((p + s) * 2 + (p + s == first).to(tl.int32)) * GROUP + first_head)[:, None] + h[None, :]
        lse = tl.load(lse_ptr + slot, mask=live, other=float("-inf"))
        part = tl.load(
            partial_ptr + slot[:, :, None] * V_DIM + d[None, None, :],
            mask=live[:, :, None] & (d < V_DIM)[None, None, :],
            other=0.0,
        )
        new_top = tl.where(h < HEADS, tl.maximum(top, tl.max(lse, 0)), 0.0)
        weight = tl.exp2(lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    total = tl.where(h < HEADS, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)
