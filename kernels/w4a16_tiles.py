"""Launch shapes of the packed-weight kernel, by rows and weight shape.

Few rows are bound by memory: enough programs must be in flight to cover its latency, so K is split until about four
programs per multiprocessor exist. Many rows are bound by the matrix unit: larger blocks, weights scaled once, no
split.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One launch. `scale_weights`: scale the weights (rounded to 16 bits) instead of fp32 partial sums."""

    block_m: int
    block_n: int
    split_k: int
    scale_weights: bool
    num_warps: int
    num_stages: int


def choose_tiles(
    m: int, n: int, num_tiles: int, multiprocessors: int, *, tile_k: int = 128, shared_memory: int = 232448
) -> Tiles:
    """Tiles for `[m, K] x [K, n]` with `num_tiles` tiles of `tile_k` channels along K.

    `shared_memory` is what a program may use, in bytes (an H200's here): it bounds the tiles that are under way.
    """
    if m <= 32:
        block_m = 8 if m <= 8 else 16 if m <= 16 else 32
        block_n = 128 if n >= 128 * multiprocessors // 4 else 64
        return Tiles(
            block_m=block_m,
            block_n=block_n,
            split_k=_split(m, block_m, n, block_n, num_tiles, 4 * multiprocessors),
            scale_weights=False,
            num_warps=4,
            num_stages=_stages(5, block_m, block_n, tile_k, shared_memory),
        )
    block_m = 64 if m <= 64 else 128
    return Tiles(
        block_m=block_m,
        block_n=128,
        split_k=_split(m, block_m, n, 128, num_tiles, multiprocessors),
        scale_weights=True,
        num_warps=4 if block_m == 64 else 8,
        num_stages=_stages(4, block_m, 128, tile_k, shared_memory),
    )


def _stages(wanted: int, block_m: int, block_n: int, tile_k: int, shared_memory: int) -> int:
    """Tiles under way: activations of 2 bytes, and weights of at most a byte, that fit in shared memory."""
    return max(min(wanted, shared_memory // (tile_k * (2 * block_m + block_n))), 1)


def _split(m: int, block_m: int, n: int, block_n: int, num_tiles: int, programs: int) -> int:
    """Split K until `programs` programs exist, leaving each at least four tiles; a power of two."""
    blocks = -(-n // block_n) * -(-m // block_m)
    split = 1
    while blocks * split * 2 <= programs and num_tiles >= split * 2 * 4:
        split *= 2
    return split
