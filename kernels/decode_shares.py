"""Shares of a decode step for a fixed number of programs.

The tiles of all sequences and KV heads stand in one line, (sequence, KV head, tile), and each program takes as many
neighbours of it as any other, or one more. Every program reads the same number of bytes whatever the lengths are,
nobody waits for a last wave, and the launch depends on Python bounds only, so a captured graph serves any lengths up to
its capacity. A share may begin and end inside a sequence's head: what it computes there is a partial result (slot 1 of
the program if it holds the first tile, else slot 0), and `decode_join.py` makes one of them.

Sequences of about one length (one long sequence, parallel samples, beams) are cut in fewer places: each head into
equal parts, or programs take some whole heads. No program then begins a second head in the middle of its share, and a
third fewer results are joined: 6% of a call where a head is one or two shares long.

Where there is less work than programs, those that get some lie evenly among the others: neighbours may share a
multiprocessor.

Gluon kernels call these functions too. `n` is `arange(0, SCAN)` in the caller's language, in a layout where that asks
for one; nothing else here has a shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(256)  # sequences looked at in one step
MANY = tl.constexpr(2**30)  # tiles, more than a sequence has


@triton.jit
def visible_tiles(seq_len, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """First token that the query sees, its tile, and how many tiles there are from it on."""
    first_token = tl.maximum(seq_len - window, 0) if WINDOW else seq_len * 0
    first_tile = first_token // TILE
    return first_token, first_tile, tl.cdiv(seq_len, TILE) - first_tile


@triton.jit
def survey(
    n, seq_lens_ptr, num_seqs, kv_heads, window, held, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr
):
    """Tiles of all sequences (of one head), how many have any, how their heads are cut, and programs that get a share.

    Into how many parts, and how many heads a program takes (one of the two is 1), for sequences of about one length:
    within a sixteenth of each other, none is missing in between, and seven of eight programs get something. Else 0, 1.
    """
    total = num_seqs * 0
    longest = total
    shortest = total + MANY
    living = total
    last = total
    for i in range(0, num_seqs, SCAN):
        seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        _, _, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(tiles > 0, tiles, MANY), 0))
        living += tl.sum((tiles > 0).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(tiles > 0, i + n + 1, 0), 0))
    heads = tl.maximum(living * kv_heads, 1)
    programs = tl.maximum(tl.minimum(held, tl.cdiv(total * kv_heads, LEAST)), 1)  # LEAST tiles for each at least
    parts = tl.maximum(tl.minimum(programs // heads, shortest), 1)
    each = tl.cdiv(heads, programs)
    alike = (living > 0) & (last == living) & ((longest - shortest) * 16 <= longest)
    alike = alike & (heads * parts * 8 >= programs * each * 7)
    most = tl.cdiv(longest, parts)  # tiles of a part; of short ones as few as have no more: fewer to join
    parts = tl.where(most <= 4, tl.cdiv(longest, most), parts)
    programs = tl.where(alike, tl.cdiv(heads * parts, each), programs)
    return total, living, tl.where(alike, parts, 0), tl.where(alike, each, 1), programs


@triton.jit
def share(
    n,  # [SCAN]
    seq_lens_ptr,  # [num_seqs] int32
    num_seqs,
    kv_heads,
    window,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """This program's number, `[begin, end)` of the line, the sequence where it begins, one head's tiles before that."""
    total, living, parts, each, programs = survey(
        n, seq_lens_ptr, num_seqs, kv_heads, window, tl.num_programs(0), WINDOW, TILE, LEAST
    )
    place = tl.program_id(0) * programs
    program = place // tl.num_programs(0)
    if parts > 0:
        begin, end, seq, before = _cut_share(seq_lens_ptr, program, kv_heads, window, living, parts, each, WINDOW, TILE)
    else:
        begin, end, seq, before = _equal_share(
            n, seq_lens_ptr, program, programs, num_seqs, kv_heads, window, total, WINDOW, TILE
        )
    end = tl.where(place % tl.num_programs(0) < programs, end, begin)  # else a neighbour has this number
    return program, begin, end, seq, before


@triton.jit
def next_piece(begin, end, seq, before, seq_lens_ptr, kv_heads, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """What of the share `[begin, end)` is computed next: tiles of one head.

    Its sequence, one head's tiles before that, the KV head, whether the tiles are its first ones and whether they are
    all it has, and the keys: first tile, tile after the last, first token that the query sees, tokens.
    """
    seq_len = tl.load(seq_lens_ptr + seq)
    first_token, first_tile, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
    while begin >= (before + tiles) * kv_heads:
        before += tiles
        seq += 1
        seq_len = tl.load(seq_lens_ptr + seq)
        first_token, first_tile, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
    offset = begin - before * kv_heads
    skipped = offset % tiles
    count = tl.minimum(tiles - skipped, end - begin)
    keys = (first_tile + skipped, first_tile + skipped + count, first_token, seq_len)
    return seq, before, offset // tiles, skipped == 0, count == tiles, keys


@triton.jit
def result_pointers(
    out_ptr, partial_ptr, lse_ptr, sinks_ptr, offset_ptr, program, seq, kv_head, kv_heads, first, whole,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Whether a piece is a whole head, and where its heads' rows of each tensor begin: a part has slot 1 or 0. The last
    is of the KV head."""
    row = (seq.to(tl.int64) * kv_heads + kv_head) * GROUP
    slot = (program * 2 + first.to(tl.int32)) * GROUP
    sink = (seq.to(tl.int64) * kv_heads * (SINKS // 2) + kv_head) * GROUP
    offset_ptr += kv_head * V_DIM
    return whole, out_ptr + row * V_DIM, partial_ptr + slot * V_DIM, lse_ptr + slot, sinks_ptr + sink, offset_ptr


@triton.jit
def value_offset(offset_ptr, kv_head, d, V_DIM: tl.constexpr, OFFSET: tl.constexpr):
    """Columns `d` of what was taken from a KV head's values before they were stored; zeros where nothing was."""
    if OFFSET:
        return tl.load(offset_ptr + kv_head * V_DIM + d, mask=d < V_DIM, other=0.0)
    return d.to(tl.float32) * 0.0


@triton.jit
def _cut_share(seq_lens_ptr, program, kv_heads, window, living, parts, each, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The share of a program, sequences cut alike, as `share` has it (counted from the sequence on where it begins)."""
    heads = living * kv_heads
    head = tl.minimum(program * each // parts, heads)
    next_head = tl.minimum((program + 1) * each // parts, heads)
    seq = tl.minimum(head // kv_heads, living - 1)
    next_seq = tl.minimum(next_head // kv_heads, living - 1)
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + seq), window, WINDOW, TILE)
    begin = (head - seq * kv_heads) * tiles + program * each % parts * tiles // parts
    end = tiles * 0
    for i in range(seq, next_seq):
        _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + i), window, WINDOW, TILE)
        end += tiles * kv_heads
    _, _, tiles = visible_tiles(tl.load(seq_lens_ptr + next_seq), window, WINDOW, TILE)
    end += (next_head - next_seq * kv_heads) * tiles
    if next_head < heads:
        end += (program + 1) * each % parts * tiles // parts
    return begin, end, seq, begin * 0


@triton.jit
def _equal_share(
    n, seq_lens_ptr, program, programs, num_seqs, kv_heads, window, total, WINDOW: tl.constexpr, TILE: tl.constexpr
):
    units = total * kv_heads
    least = units // programs
    begin = program * least + tl.minimum(program, units % programs)
    end = begin + least + (program < units % programs).to(tl.int32)
    seq = num_seqs * 0
    before = seq
    base = seq
    for i in range(0, num_seqs, SCAN):
        seq_len = tl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        _, _, tiles = visible_tiles(seq_len, window, WINDOW, TILE)
        ends = base + tl.cumsum(tiles, 0)
        passed = (ends * kv_heads <= begin) & (i + n < num_seqs)
        seq += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        base += tl.sum(tiles, 0)
    return begin, end, seq, before
