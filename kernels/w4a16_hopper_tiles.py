"""Launches of the Hopper kernels of 4-bit weights, and which of them costs least, by costs measured on an H200.

A tile of tokens and outputs is what a program computes at a time, a step of it is a unit. Programs share the units of
all tiles: whole tiles each, one tile as a cluster, or any part of the row of units, and what they then add through
memory is an end that costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

STEP = 128  # channels of a unit
MAX_FEW_ROWS = 16
MAX_PROGRAMS = 16  # of a tile of many tokens that they share evenly: bits of its counter
# clusters of so many programs that run at once on 132 multiprocessors, by the programs that fit one of these
AT_ONCE = {1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}, 2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 8: 30}}


@dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """One launch: tiles of `block_m` tokens by `rows` outputs, whose units `programs` share evenly."""

    block_m: int
    rows: int
    warpgroups: int = 2  # that multiply
    burst: int = 0  # products of 16 channels between two of unpacking; 0: the kernel of few tokens
    buffers: int = 1  # of unpacked operands
    most_stages: int = 12
    programs: int = 0
    resident: int = 1  # programs that fit one multiprocessor
    cluster: int = 1  # programs of a tile that add through each other's shared memory

    @property
    def many(self) -> bool:
        return self.burst > 0

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.many else 64)

    @property
    def pairs(self) -> bool:
        """Whether a warpgroup's outputs are pairs of 64."""
        return self.rows % (128 * self.warpgroups) == 0

    def blocks(self, m: int, n: int) -> int:
        """Tiles of a product."""
        return -(-n // self.rows) * -(-m // self.block_m)


@dataclass(frozen=True, kw_only=True)
class ManyShape:
    """A tile of many tokens and what it costs in microseconds, fitted to an H200's times of 15 weight shapes.

    The ends are launch, first load, store, and the sum over the programs of a tile: none where each has whole tiles,
    through shared memory where they are a cluster, through the L2 where all tiles have as many, else by the last one.
    """

    tiles: HopperTiles
    unit: float
    whole: float
    pair: float  # a cluster of two
    cluster: float  # of more
    even: float
    uneven: float

    def launches(self, m: int, n: int, k: int, multiprocessors: int) -> Iterator[tuple[float, HopperTiles]]:
        blocks, steps = self.tiles.blocks(m, n), -(-k // STEP)
        most = min(multiprocessors, blocks * min(steps, MAX_PROGRAMS))
        for programs in {most, most // blocks * blocks, blocks // -(-blocks // most)} - {0}:
            if blocks % programs == 0:
                end = self.whole
            else:
                end = self.uneven if programs % blocks else self.even
            yield -(-blocks * steps // programs) * self.unit + end, replace(self.tiles, programs=programs)
        for tiles in _cluster_launches(self.tiles, blocks, steps, multiprocessors):
            end = self.pair if tiles.cluster == 2 else self.cluster
            yield -(-steps // tiles.cluster) * self.unit + end, tiles


@dataclass(frozen=True, kw_only=True)
class FewShape:
    """A tile of few tokens. The programs of a tile are a cluster, or split its channels as they come.

    Microseconds are start + spread * (units of a multiprocessor) + unit * (units of a program), fitted to an H200's
    times of 15 weight shapes: all share the bandwidth, a program has its units one after the other. Where a cluster's
    programs have a multiprocessor each that is right within 6%; else the hardware may put two on one.
    """

    tiles: HopperTiles
    clustered: bool
    start: float
    spread: float
    unit: float

    def launches(self, m: int, n: int, k: int, multiprocessors: int) -> Iterator[tuple[float, HopperTiles]]:
        if self.tiles.block_m != (8 if m <= 8 else MAX_FEW_ROWS):
            return
        blocks, steps = self.tiles.blocks(m, n), -(-k // STEP)
        launches = _cluster_launches if self.clustered else _split_launches
        for tiles in launches(self.tiles, blocks, steps, multiprocessors):
            units = -(-blocks * steps // tiles.programs)
            yield self.start + self.spread * blocks * steps / multiprocessors + self.unit * units, tiles


def _cluster_launches(tiles: HopperTiles, blocks: int, steps: int, multiprocessors: int) -> Iterator[HopperTiles]:
    """Of all clusters at once: with one more than fit, a product took half as long again."""
    for cluster, at_once in AT_ONCE[tiles.resident].items():
        if cluster <= steps and blocks <= at_once * multiprocessors // 132:
            yield replace(tiles, cluster=cluster, programs=blocks * cluster)


def _split_launches(tiles: HopperTiles, blocks: int, steps: int, multiprocessors: int) -> Iterator[HopperTiles]:
    """As many programs for each tile, whole tiles for each program, or one program for each place."""
    most = multiprocessors * tiles.resident
    if blocks <= most:
        yield replace(tiles, programs=blocks * min(most // blocks, steps))
    else:
        yield replace(tiles, programs=blocks // -(-blocks // most))
    if blocks * steps > most:
        yield replace(tiles, programs=most)


def _few(
    block_m: int, rows: int, *costs: float, warpgroups: int = 2, resident: int = 1, clustered: bool = True
) -> FewShape:
    start, spread, unit = costs
    tiles = HopperTiles(block_m=block_m, rows=rows, warpgroups=warpgroups, resident=resident)
    return FewShape(tiles=tiles, clustered=clustered, start=start, spread=spread, unit=unit)


def _many(block_m: int, rows: int, burst: int, *costs: float, buffers: int = 1) -> ManyShape:
    tiles = HopperTiles(block_m=block_m, rows=rows, burst=burst, buffers=buffers, warpgroups=3 if rows == 192 else 2)
    return ManyShape(tiles=tiles, **dict(zip(("unit", "whole", "pair", "cluster", "even", "uneven"), costs)))


SHAPES: tuple[FewShape | ManyShape, ...] = (
    _few(8, 128, 1.84, 0.070, 0.444, resident=2),
    _few(8, 256, 2.20, 0.140, 0.713, resident=2),
    _few(8, 256, 2.63, 0.188, 0.323),
    _few(8, 384, 2.61, 0.211, 0.521),
    _few(8, 512, 2.60, 0.399, 0.612),
    _few(8, 256, 6.05, 0.235, 0.506, resident=2, clustered=False),
    _few(16, 256, 2.79, 0.129, 0.452),
    _few(16, 384, 3.50, 0.422, 0.440, warpgroups=3),
    _few(16, 512, 3.77, 0.402, 0.714),
    _few(16, 256, 6.12, 0.260, 0.667, resident=2, clustered=False),
    _few(16, 512, 9.10, 0.794, 0.298, clustered=False),
    _many(32, 128, 8, 0.43, 3.2, 3.6, 2.9, 4.8, 6.0),
    _many(32, 192, 8, 0.56, 3.4, 4.8, 3.6, 5.7, 7.3),
    _many(32, 256, 8, 0.64, 3.1, 5.4, 4.2, 6.3, 9.8),
    _many(32, 384, 4, 0.95, 1.0, 5.3, 5.0, 7.6, 11.5),
    _many(64, 128, 8, 0.515, 1.8, 3.5, 3.4, 5.3, 6.8),
    _many(64, 192, 8, 0.79, 2.7, 3.5, 3.4, 5.9, 8.0),
    _many(64, 256, 8, 0.86, 3.2, 4.4, 5.0, 7.7, 12.2),
    _many(64, 384, 2, 1.31, 1.0, 5.7, 6.0, 8.9, 14.2),
    _many(96, 128, 4, 0.624, 2.7, 3.9, 4.4, 6.3, 8.1),
    _many(96, 192, 4, 0.855, 4.2, 5.0, 5.0, 7.5, 9.6),
    _many(128, 128, 4, 0.736, 2.5, 4.2, 5.5, 7.3, 9.0),
    _many(128, 192, 8, 1.05, 3.5, 5.8, 6.0, 9.2, 11.3),
    _many(128, 256, 2, 1.36, 2.6, 5.3, 7.0, 9.9, 14.1, buffers=2),
    _many(256, 128, 4, 1.34, 2.3, 4.8, 7.0, 10.2, 13.5),
)


def hopper_launches(m: int, n: int, k: int, multiprocessors: int) -> Iterator[tuple[float, HopperTiles]]:
    """Every launch for this product with its cost in microseconds."""
    for shape in SHAPES:
        if shape.tiles.many == (m > MAX_FEW_ROWS):
            yield from shape.launches(m, n, k, multiprocessors)


@cache
def choose_hopper_tiles(m: int, n: int, k: int, multiprocessors: int, gated: bool = False) -> HopperTiles:
    """The launch that costs least by `SHAPES`; of `gated` outputs each warpgroup needs pairs of 64."""
    launches = hopper_launches(m, n, k, multiprocessors)
    return min((item for item in launches if not gated or item[1].pairs), key=lambda item: item[0])[1]


def hopper_rows(in_features: int) -> int:
    """Of more rows cuBLAS on a dequantized weight is faster (`eval/weights_bench.py`)."""
    return 4096 if in_features > 4096 else 2048
