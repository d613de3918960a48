"""A program's share of a decode step for the register kernels: `decode_shares.py` in Gluon, for one warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SCAN = gl.constexpr(256)  # sequences looked at in one step
MANY = gl.constexpr(2**30)  # tiles, more than a sequence has


@gluon.jit
def visible_tiles(seq_len, window, WINDOW: gl.constexpr, TILE: gl.constexpr):
    """First visible token, its tile, and how many tiles there are from it on."""
    first_token = seq_len * 0
    if WINDOW:
        first_token = gl.maximum(seq_len - window, 0)
    first_tile = first_token // TILE
    return first_token, first_tile, (seq_len + TILE - 1) // TILE - first_tile


@gluon.jit
def _tiles_of(seq_lens_ptr, seq, window, WINDOW: gl.constexpr, TILE: gl.constexpr):
    return visible_tiles(gl.load(seq_lens_ptr + seq), window, WINDOW, TILE)[2]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW: gl.constexpr, TILE: gl.constexpr, LEAST: gl.constexpr):
    """This program's number, tiles `[begin, end)` of all, the sequence `begin` lies in, one head's tiles before it.

    `decode_shares.share` says the same in Triton, and why.
    """
    total, living, parts, each, programs = _survey(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW, TILE, LEAST)
    place = gl.program_id(0) * programs
    program = place // gl.num_programs(0)
    if parts > 0:
        begin, end, seq, before = _cut_share(seq_lens_ptr, program, kv_heads, window, living, parts, each, WINDOW, TILE)
    else:
        begin, end, seq, before = _equal_share(
            seq_lens_ptr, program, programs, num_seqs, kv_heads, window, total, WINDOW, TILE
        )
    end = gl.where(place % gl.num_programs(0) < programs, end, begin)
    return program, begin, end, seq, before


@gluon.jit
def _survey(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW: gl.constexpr, TILE: gl.constexpr, LEAST: gl.constexpr):
    """`decode_shares.survey`."""
    L: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [1], [0])
    n = gl.arange(0, SCAN, layout=L)
    total = gl.to_tensor(0)
    longest = gl.to_tensor(0)
    shortest = gl.to_tensor(MANY)
    living = gl.to_tensor(0)
    last = gl.to_tensor(0)
    for i in range(0, num_seqs, SCAN):
        seq_len = gl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        tiles = visible_tiles(seq_len, window, WINDOW, TILE)[2]
        total += gl.sum(tiles, 0)
        longest = gl.maximum(longest, gl.max(tiles, 0))
        shortest = gl.minimum(shortest, gl.min(gl.where(tiles > 0, tiles, MANY), 0))
        living += gl.sum((tiles > 0).to(gl.int32), 0)
        last = gl.maximum(last, gl.max(gl.where(tiles > 0, i + n + 1, 0), 0))
    heads = gl.maximum(living * kv_heads, 1)
    programs = gl.maximum(gl.minimum(gl.num_programs(0), (total * kv_heads + (LEAST - 1)) // LEAST), 1)
    parts = gl.maximum(gl.minimum(programs // heads, shortest), 1)
    each = (heads + programs - 1) // programs
    alike = (living > 0) & (last == living) & ((longest - shortest) * 16 <= longest)
    alike = alike & (heads * parts * 8 >= programs * each * 5)
    programs = gl.where(alike, (heads * parts + each - 1) // each, programs)
    return total, living, gl.where(alike, parts, 0), gl.where(alike, each, 1), programs


@gluon.jit
def _cut_share(seq_lens_ptr, program, kv_heads, window, living, parts, each, WINDOW: gl.constexpr, TILE: gl.constexpr):
    heads = living * kv_heads
    head = gl.minimum(program * each // parts, heads)
    next_head = gl.minimum((program + 1) * each // parts, heads)
    seq = gl.minimum(head // kv_heads, living - 1)
    next_seq = gl.minimum(next_head // kv_heads, living - 1)
    tiles = _tiles_of(seq_lens_ptr, seq, window, WINDOW, TILE)
    begin = (head - seq * kv_heads) * tiles + program * each % parts * tiles // parts
    end = gl.to_tensor(0)
    for i in range(seq, next_seq):
        end += _tiles_of(seq_lens_ptr, i, window, WINDOW, TILE) * kv_heads
    tiles = _tiles_of(seq_lens_ptr, next_seq, window, WINDOW, TILE)
    end += (next_head - next_seq * kv_heads) * tiles
    if next_head < heads:
        end += (program + 1) * each % parts * tiles // parts
    return begin, end, seq, seq * 0


@gluon.jit
def _equal_share(
    seq_lens_ptr, program, programs, num_seqs, kv_heads, window, total, WINDOW: gl.constexpr, TILE: gl.constexpr
):
    L: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [1], [0])
    n = gl.arange(0, SCAN, layout=L)
    units = total * kv_heads
    least = units // programs
    begin = program * least + gl.minimum(program, units % programs)
    end = begin + least + (program < units % programs).to(gl.int32)
    seq = gl.to_tensor(0)
    before = gl.to_tensor(0)
    base = gl.to_tensor(0)
    for i in range(0, num_seqs, SCAN):
        seq_len = gl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        tiles = visible_tiles(seq_len, window, WINDOW, TILE)[2]
        ends = base + gl.associative_scan(tiles, 0, _add)
        passed = (ends * kv_heads <= begin) & (i + n < num_seqs)
        seq += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        base += gl.sum(tiles, 0)
    return begin, end, seq, before
