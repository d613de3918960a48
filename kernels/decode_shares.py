"""Shares of a decode step for a fixed number of programs.

The tiles of all sequences and KV heads stand in one line, (sequence, KV head, tile), and each program takes as many
neighbours of it as any other, or one more. Every program reads the same number of bytes whatever the lengths are,
nobody waits for a last wave, and the launch depends on Python bounds only, so a captured graph serves any lengths up to
its capacity. A share may begin and end inside a sequence's head: what it computes there is a partial result (slot 1 of
the program if it holds the first tile, else slot 0), and `decode_join.py` makes one of them.

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
def survey(
    seq_lens_ptr, num_seqs, kv_heads, window, held, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr
):
    """Tiles of all sequences (of one head), of the longest one, how many have any, and how their heads are cut.

    Into how many parts, and how many heads a program takes (one of the two is 1), for sequences of about one length:
    within a sixteenth of each other, none is missing in between, and five of eight programs get something. Else 0, 1.
    """
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
    heads = tl.maximum(living * kv_heads, 1)
    programs = working_programs(total * kv_heads, held, LEAST)
    parts = tl.maximum(tl.minimum(programs // heads, shortest), 1)
    each = tl.cdiv(heads, programs)
    alike = (living > 0) & (last == living) & ((longest - shortest) * 16 <= longest)
    alike = alike & (heads * parts * 8 >= programs * each * 5)
    return total, longest, living, tl.where(alike, parts, 0), tl.where(alike, each, 1)


@triton.jit
def _cut_share(seq_lens_ptr, kv_heads, window, living, parts, each, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The share of a program, sequences cut alike, as `share` has it (counted from the sequence on where it begins)."""
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
    total, longest, living, parts, each = survey(seq_lens_ptr, num_seqs, kv_heads, window, held, WINDOW, TILE, LEAST)
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
