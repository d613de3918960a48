"""Shares of a decode step for a fixed number of programs, and the joining of sequences that were shared.

The tiles of all sequences and KV heads stand in one line, (sequence, KV head, tile), and each program takes as many
neighbours of it as any other, or one more. Every program reads the same number of bytes whatever the lengths are,
nobody waits for a last wave, and the launch depends on Python bounds only, so a captured graph serves any lengths up to
its capacity. A share may begin and end inside a sequence's head: what it computes there is a partial result (slot 1 of
the program if it holds the first tile, else slot 0), and `join_kernel` makes one of them.

Sequences of about one length (one long sequence, parallel samples, beams) are cut in fewer places: each head into
equal parts, or programs take some whole heads. No program then begins a second head in the middle of its share, and a
third fewer results are joined: 6% of a call where a head is one or two shares long.

Many heads of sequences that are alike need no sharing: with WHOLE a launch has one program for each head of a sequence,
and if no sequence is much longer than the mean, each takes its own; later ones start while earlier ones end, so neither
the beginning nor the end of a program is ever waited for. Otherwise the first `held` programs share.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SCAN = tl.constexpr(256)  # sequences looked at in one step
ALIKE = tl.constexpr(4)  # times the mean that a sequence may be long and still be one program's
MANY = tl.constexpr(2**30)  # tiles, more than a sequence has


@triton.jit
def visible_tiles(seq_len, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First token that the query sees, its tile, and how many tiles there are from it on."""
    first_token = tl.maximum(seq_len - window, 0) if WINDOW else seq_len * 0
    first_tile = first_token // TILE
    return first_token, first_tile, tl.cdiv(seq_len, TILE) - first_tile


@triton.jit
def working_programs(units, num_programs, LEAST: tl.constexpr):
    """Programs that get a share: of at least LEAST tiles, so that little work is not cut to pieces."""
    return tl.maximum(tl.minimum(num_programs, tl.cdiv(units, LEAST)), 1)


@triton.jit
def survey(seq_lens_ptr, num_seqs, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Tiles of all sequences, of the longest and of the shortest; sequences with any, and up to the last with any."""
    n = tl.arange(0, SCAN)
    total = tl.zeros([], tl.int32)
    longest = tl.zeros([], tl.int32)
    shortest = tl.zeros([], tl.int32) + MANY
    living = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    for i in range(0, num_seqs, SCAN):
        seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        _, _, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(tiles > 0, tiles, MANY), 0))
        living += tl.sum((tiles > 0).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(tiles > 0, i + n + 1, 0), 0))
    return total, longest, shortest, living, last


@triton.jit
def cuts(total, longest, shortest, living, last, kv_heads, held, LEAST: tl.constexpr):
    """Parts of each head, and heads of each program (one of them is 1), for sequences of about one length; else 0, 1.

    They are within a sixteenth of each other, none is missing in between, and most programs get something.
    """
    heads = tl.maximum(living * kv_heads, 1)
    programs = working_programs(total * kv_heads, held, LEAST)
    parts = tl.maximum(tl.minimum(programs // heads, shortest), 1)
    each = tl.cdiv(heads, programs)
    alike = (living > 0) & (last == living) & ((longest - shortest) * 16 <= longest)
    alike = alike & (heads * parts * 8 >= programs * each * 5)
    return tl.where(alike, parts, 0), tl.where(alike, each, 1)


@triton.jit
def _cut_share(seq_lens_ptr, kv_heads, window, living, parts, each, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The share of a program under `cuts`, as `share` has it (counted from the sequence on where it begins)."""
    head = tl.minimum(tl.program_id(0) * each // parts, living * kv_heads)
    part = tl.program_id(0) * each % parts
    next_head = tl.minimum((tl.program_id(0) + 1) * each // parts, living * kv_heads)
    next_part = (tl.program_id(0) + 1) * each % parts
    seq = tl.minimum(head // kv_heads, living - 1)
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + seq), window, WINDOW, TILE)
    begin = (head - seq * kv_heads) * tiles + part * tiles // parts
    end = tiles * 0
    next_seq = tl.minimum(next_head // kv_heads, living - 1)
    for i in range(seq, next_seq):
        _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + i), window, WINDOW, TILE)
        end += tiles * kv_heads
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + next_seq), window, WINDOW, TILE)
    end += (next_head - next_seq * kv_heads) * tiles
    if next_head < living * kv_heads:
        end += next_part * tiles // parts
    return begin, end, seq, begin * 0


@triton.jit
def _whole_head(seq_lens_ptr, kv_heads, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The share of a program that takes one head of one sequence, as `share` has it (counted from that sequence on)."""
    seq = tl.program_id(0) // kv_heads
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + seq), window, WINDOW, TILE)
    begin = tl.program_id(0) % kv_heads * tiles
    return begin, begin + tiles, seq, tiles * 0


@triton.jit
def share(
    seq_lens_ptr,  # [num_seqs] int32
    num_seqs,
    kv_heads,
    window,
    held,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """This program's `[begin, end)` of the line, the sequence where it begins, and one head's tiles before that."""
    total, longest, shortest, living, last = survey(seq_lens_ptr, num_seqs, window, WINDOW, TILE)
    parts, each = cuts(total, longest, shortest, living, last, kv_heads, held, LEAST)
    if parts > 0:
        begin, end, seq, before = _cut_share(seq_lens_ptr, kv_heads, window, living, parts, each, WINDOW, TILE)
    else:
        begin, end, seq, before = _equal_share(
            seq_lens_ptr, num_seqs, kv_heads, window, total, held, WINDOW, TILE, LEAST
        )
    if WHOLE:  # noqa: SIM102 (a constant of the compiler, then a value of the device)
        if longest * num_seqs <= ALIKE * total:
            begin, end, seq, before = _whole_head(seq_lens_ptr, kv_heads, window, WINDOW, TILE)
    return begin, end, seq, before


@triton.jit
def _equal_share(
    seq_lens_ptr, num_seqs, kv_heads, window, total, held, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr
):
    n = tl.arange(0, SCAN)
    units = total * kv_heads
    program = tl.program_id(0)
    programs = working_programs(units, held, LEAST)
    least = units // programs
    begin = tl.minimum(program * least + tl.minimum(program, units % programs), units)
    end = tl.minimum(begin + least + (program < units % programs).to(tl.int32), units)
    seq = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    base = tl.zeros([], tl.int32)
    for i in range(0, num_seqs, SCAN):
        seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        _, _, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        ends = base + tl.cumsum(tiles, 0)
        passed = (ends * kv_heads <= begin) & (i + n < num_seqs)
        seq += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        base += tl.sum(tiles, 0)
    return begin, end, seq, before


@triton.jit
def _program_of(unit, units, programs):
    """The program whose share holds `unit`: the first `units % programs` ones have one more than the others."""
    least = units // programs
    more = (units % programs) * (least + 1)
    return tl.where(unit < more, unit // (least + 1), units % programs + (unit - more) // least)


@triton.jit(do_not_specialize=["num_seqs", "window", "held"])
def join_kernel(
    out_ptr,  # [num_seqs, heads, V_DIM]
    partial_ptr,  # [held, 2, GROUP, V_DIM] fp32
    lse_ptr,  # [held, 2, GROUP] fp32, base 2
    seq_lens_ptr,  # [num_seqs] int32
    sinks_ptr,  # [heads], or [num_seqs, heads] where SINKS is 2
    num_seqs,
    window,
    held,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # of a program: GROUP or 1
    H_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Heads of one KV head of one sequence: join their partial results, if there are any; zeros for an empty one."""
    if OVERLAP:  # what follows may start; it waits
        gdc_launch_dependents()
    first_head = tl.program_id(0) * HEADS
    seq = tl.program_id(1)
    heads = tl.num_programs(0) * HEADS
    kv_heads = heads // GROUP
    n = tl.arange(0, SCAN)
    total, longest, shortest, living, last_living = survey(seq_lens_ptr, num_seqs, window, WINDOW, TILE)
    units = total * kv_heads
    before = tl.zeros([], tl.int32)
    for i in range(0, seq, SCAN):
        seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < seq, other=0)
        _, _, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        before += tl.sum(tiles, 0)
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + seq), window, WINDOW, TILE)
    if OVERLAP:  # every program, whatever it has to do: what follows this kernel follows the other one too
        gdc_wait()
    h = tl.arange(0, H_BLOCK)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    out = out_ptr + (seq.to(tl.int64) * heads + first_head + h)[:, None] * V_DIM + d[None, :]
    mask = (h < HEADS)[:, None] & (d < V_DIM)[None, :]
    if tiles == 0:  # a padded row of a captured graph
        tl.store(out, tl.zeros([H_BLOCK, COLUMNS], out_ptr.dtype.element_ty), mask=mask)
        return
    if WHOLE:  # noqa: SIM102 (as above)
        if longest * num_seqs <= ALIKE * total:
            return
    parts, _ = cuts(total, longest, shortest, living, last_living, kv_heads, held, LEAST)
    if parts > 0:
        first = (seq * kv_heads + first_head // GROUP) * parts
        last = first + parts - 1
    else:
        begin = before * kv_heads + first_head // GROUP * tiles
        programs = working_programs(units, held, LEAST)
        first = _program_of(begin, units, programs)
        last = _program_of(begin + tiles - 1, units, programs)
    if first == last:
        return

    s = tl.arange(0, STEP)
    acc = tl.zeros([H_BLOCK, COLUMNS], tl.float32)
    top = tl.full([H_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([H_BLOCK], tl.float32)
    if SINKS:
        at = seq * heads * (SINKS - 1) + first_head + h
        top = tl.load(sinks_ptr + at, mask=h < HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    for p in range(first, last + 1, STEP):
        live = (p + s <= last)[:, None]
        slot = (((p + s) * 2 + (p + s == first).to(tl.int32)) * GROUP + first_head % GROUP)[:, None] + h[None, :]
        lse = tl.load(lse_ptr + slot, mask=live & (h < HEADS)[None, :], other=float("-inf"))
        part = tl.load(
            partial_ptr + slot[:, :, None] * V_DIM + d[None, None, :],
            mask=live[:, :, None] & mask[None, :, :],
            other=0.0,
        )
        new_top = tl.where(h < HEADS, tl.maximum(top, tl.max(lse, 0)), 0.0)
        weight = tl.exp2(lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    total = tl.where(h < HEADS, total, 1.0)
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
