"""The device function by which a tile of queries meets the keys and values of its own blocks as they came."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.tiles import softmax_step


@triton.jit
def own_block_tiles(
    acc,
    total,
    top,
    q,  # [ROWS, K_BLOCK], in DOT
    scale,
    softcap,
    position,  # [ROWS] of the queries
    first_key,  # where the first query's block begins
    last_key,  # position of the last query
    first_token,  # of the step, at position 0 of the sequence if there were any
    k_ptr,  # [T, kv_heads, K_DIM], from this KV head on
    v_ptr,  # [T, kv_heads, V_DIM]
    k_stride,
    v_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Take the keys up to each query, from its block's begin on, into its running attention."""
    n = tl.arange(0, TILE)
    dk = tl.arange(0, K_BLOCK)
    dv = tl.arange(0, V_BLOCK)
    unscaled = tl.zeros([TILE], tl.float32)
    unit = tl.full([q.shape[0]], 1.0, tl.float32) * scale
    block = position // BLOCK_SIZE
    for begin in tl.range(first_key, last_key + 1, TILE, num_stages=1):  # few tiles, in the room that codes had
        key = begin + n
        live = key <= last_key
        token = (first_token + key).to(tl.int64)
        k_at = k_ptr + token[:, None] * k_stride + dk[None, :]
        v_at = v_ptr + token[:, None] * v_stride + dv[None, :]
        k = tl.load(k_at, mask=live[:, None] & (dk < K_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=live[:, None] & (dv < V_DIM)[None, :], other=0.0)
        keep = (key[None, :] <= position[:, None]) & ((key // BLOCK_SIZE)[None, :] == block[:, None])
        acc, total, top, _ = softmax_step(
            acc, total, top, 1.0, q, unit, k, unscaled, v, unscaled, keep, softcap,
            True, SOFTCAP, False, False, DOT, DOT, False,
        )  # fmt: skip
    return acc, total, top
