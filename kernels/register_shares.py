"""A program's equal share of a decode step for the register kernels: `decode_shares.py` in Gluon, for one warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SCAN = gl.constexpr(256)  # sequences looked at in one step


@gluon.jit
def visible_tiles(seq_len, window, WINDOW: gl.constexpr, TILE: gl.constexpr):
    """First visible token, its tile, and how many tiles there are from it on."""
    first_token = seq_len * 0
    if WINDOW:
        first_token = gl.maximum(seq_len - window, 0)
    first_tile = first_token // TILE
    return first_token, first_tile, (seq_len + TILE - 1) // TILE - first_tile


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share(seq_lens_ptr, num_seqs, kv_heads, window, WINDOW: gl.constexpr, TILE: gl.constexpr, LEAST: gl.constexpr):
    """This program's tiles `[begin, end)` of all, the sequence `begin` lies in, and the tiles (of one head) before it.

    `decode_shares.share` says the same in Triton.
    """
    L: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [1], [0])
    n = gl.arange(0, SCAN, layout=L)
    units = gl.to_tensor(0)
    for i in range(0, num_seqs, SCAN):
        seq_len = gl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        units += gl.sum(visible_tiles(seq_len, window, WINDOW, TILE)[2], 0)
    units *= kv_heads
    program = gl.program_id(0)
    programs = gl.maximum(gl.minimum(gl.num_programs(0), (units + (LEAST - 1)) // LEAST), 1)
    least = units // programs
    begin = gl.minimum(program * least + gl.minimum(program, units % programs), units)
    end = gl.minimum(begin + least + (program < units % programs).to(gl.int32), units)
    seq = 0
    before = 0
    base = 0
    for i in range(0, num_seqs, SCAN):
        seq_len = gl.load(seq_lens_ptr + i + n, mask=i + n < num_seqs, other=0)
        tiles = visible_tiles(seq_len, window, WINDOW, TILE)[2]
        ends = base + gl.associative_scan(tiles, 0, _add)
        passed = (ends * kv_heads <= begin) & (i + n < num_seqs)
        seq += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        base += gl.sum(tiles, 0)
    return begin, end, seq, before
