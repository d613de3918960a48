"""4-bit weights times 16-bit activations on Hopper, for what Triton cannot say: packed words become operands inside
registers while bulk copies bring the next ones.

Two CUDA kernels: `w4a16_hopper_few.cu` (`mma.sync`, up to 16 tokens) and `w4a16_hopper_many.cu` (`wgmma`). This file
chooses the launch by costs measured on an H200, compiles it when first used and launches it. With few tokens group
scales multiply fp32 sums and nothing is rounded before the output; with many they multiply weights, both rounded to
16 bits, as a dequantized weight is. Groups of 32, 64 or a multiple of 128 channels, zero points, act-order, fp16 and
bf16. Meaning: `packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.cuda_kernel import CudaKernel, TensorMap
from hf_paged.kernels.gather_channels import gather_channels
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.kernels.packed_weight import PackedWeight

logger = logging.getLogger(__name__)

STEP = 128  # channels of a unit
MAX_FEW_ROWS = 16
MAX_PROGRAMS = 16  # of a tile of many tokens that they share evenly: bits of its counter
# clusters of so many programs that run at once on 132 multiprocessors, by the programs that fit one of these
_AT_ONCE = {1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}, 2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 8: 30}}
_SHARED_BYTES = 227 * 1024 - 1024  # of one program, less what the compiler takes
_MULTIPROCESSOR_BYTES = 228 * 1024  # with 1024 for each program
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_REGISTERS = {2: (232, 40), 3: (152, 40)}  # by warpgroups, of a thread that multiplies, produces


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
class Ends:
    """What a product of few tokens takes in of the kernels around it, see `folded_linear.py`; all off: nothing."""

    normed: bool = False  # rows lack the factor of their norm
    eps: float = 0.0  # of that norm
    gated: bool = False  # the output is silu(first half) * second half
    adds: int = 0  # 1: to a residual; 2: and makes the rows of the next norm
    offset: float = 0.0  # of that norm's weight
    ordered: bool = False  # what the next product reads lies in its order of channels

    @property
    def parts(self) -> int:
        """Sums that become one output."""
        return 2 if self.gated else 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is fixed when a kernel is compiled."""

    tiles: HopperTiles  # with `programs` 0
    half: bool  # fp16, else bf16
    groups: int = 1  # of a unit
    zeros: bool = False
    scales: torch.dtype = torch.float16
    middle: int = 8
    ends: Ends = Ends()

    @property
    def stage_bytes(self) -> int:
        scale_bytes = self.scales.itemsize + int(self.zeros)
        return self.tiles.block_m * 256 + self.tiles.rows * (64 + self.groups * scale_bytes) + 16

    @property
    def sum_bytes(self) -> int:
        """Beside the ring: what a thread tells its warpgroup, factors of norms, and with few tokens the sums that a
        program makes for its cluster (with many they are where the ring was).
        """
        tiles, parts = self.tiles, self.ends.parts
        if tiles.many or tiles.cluster == 1:
            return 256
        pieces = tiles.rows * tiles.block_m // 128 // parts  # of the tile, 512 bytes for each part
        return 256 + -(-pieces // tiles.cluster) * tiles.cluster * parts * 512

    @property
    def stages(self) -> int:
        here = _SHARED_BYTES if self.tiles.resident == 1 else _MULTIPROCESSOR_BYTES // self.tiles.resident - 1024
        return min((here - self.sum_bytes) // self.stage_bytes, self.tiles.most_stages)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.sum_bytes


@dataclass(frozen=True, kw_only=True)
class TileShape:
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

    @property
    def clusters(self) -> Iterable[int]:
        return _AT_ONCE[1]

    def launches(self, m: int, n: int, k: int, multiprocessors: int) -> Iterator[tuple[float, HopperTiles]]:
        blocks, steps = self.tiles.blocks(m, n), -(-k // STEP)
        most = min(multiprocessors, blocks * min(steps, MAX_PROGRAMS))
        for programs in {most, most // blocks * blocks, blocks // -(-blocks // most)} - {0}:
            if blocks % programs == 0:
                end = self.whole
            else:
                end = self.uneven if programs % blocks else self.even
            yield -(-blocks * steps // programs) * self.unit + end, replace(self.tiles, programs=programs)
        for tiles in cluster_launches(self.tiles, blocks, steps, multiprocessors):
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

    @property
    def clusters(self) -> Iterable[int]:
        return _AT_ONCE[self.tiles.resident] if self.clustered else ()

    def launches(self, m: int, n: int, k: int, multiprocessors: int) -> Iterator[tuple[float, HopperTiles]]:
        if m > self.tiles.block_m:
            return
        blocks, steps = self.tiles.blocks(m, n), -(-k // STEP)
        launches = cluster_launches if self.clustered else split_launches
        for tiles in launches(self.tiles, blocks, steps, multiprocessors):
            units = -(-blocks * steps // tiles.programs)
            yield self.start + self.spread * blocks * steps / multiprocessors + self.unit * units, tiles


def cluster_launches(tiles: HopperTiles, blocks: int, steps: int, multiprocessors: int) -> Iterator[HopperTiles]:
    """Of all clusters at once: with one more than fit, a product took half as long again."""
    for cluster, at_once in _AT_ONCE[tiles.resident].items():
        if cluster <= steps and blocks <= at_once * multiprocessors // 132:
            yield replace(tiles, cluster=cluster, programs=blocks * cluster)


def split_launches(tiles: HopperTiles, blocks: int, steps: int, multiprocessors: int) -> Iterator[HopperTiles]:
    """As many programs for each tile, whole tiles for each program, or one program for each place."""
    most = multiprocessors * tiles.resident
    if blocks <= most:
        yield replace(tiles, programs=blocks * min(most // blocks, steps))
    else:
        yield replace(tiles, programs=blocks // -(-blocks // most))
    if blocks * steps > most:
        yield replace(tiles, programs=most)


def _few(block_m: int, rows: int, *costs: float, resident: int = 1, clustered: bool = True) -> FewShape:
    start, spread, unit = costs
    tiles = HopperTiles(block_m=block_m, rows=rows, resident=resident)
    return FewShape(tiles=tiles, clustered=clustered, start=start, spread=spread, unit=unit)


def _many(block_m: int, rows: int, burst: int, *costs: float, buffers: int = 1) -> TileShape:
    tiles = HopperTiles(block_m=block_m, rows=rows, burst=burst, buffers=buffers, warpgroups=3 if rows == 192 else 2)
    return TileShape(tiles=tiles, **dict(zip(("unit", "whole", "pair", "cluster", "even", "uneven"), costs)))


SHAPES: tuple[FewShape | TileShape, ...] = (
    _few(8, 128, 1.84, 0.070, 0.444, resident=2),
    _few(8, 256, 2.20, 0.140, 0.713, resident=2),
    _few(8, 256, 2.63, 0.188, 0.323),
    _few(8, 384, 2.61, 0.211, 0.521),
    _few(8, 512, 2.60, 0.399, 0.612),
    _few(8, 256, 6.05, 0.235, 0.506, resident=2, clustered=False),
    _few(16, 256, 2.79, 0.129, 0.452),
    _few(16, 384, 3.76, 0.422, 0.441),
    _few(16, 512, 3.77, 0.402, 0.714),
    _few(16, 256, 8.23, 0.161, 0.713, resident=2, clustered=False),
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


def fits_hopper(x: Tensor, weight: PackedWeight) -> bool:
    """Whether GPU, shape and alignment suit."""
    group, k = weight.group_size, weight.in_features
    return (
        x.is_cuda
        and _is_usable(x.device.index)
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.field_bits == 4
        and (group >= k or group % STEP == 0 or group in (32, 64))
        and weight.out_features % 16 == 0
        and k % 8 == 0
        and all(
            part is None or (part.is_contiguous() and part.data_ptr() % 16 == 0)
            for part in (weight.packed, weight.scales, weight.zeros, weight.perm)
        )
    )


def w4a16_hopper(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    locks: Tensor,
    tiles: HopperTiles,
    ends: Ends = Ends(),
    beside: Sequence[Tensor | None] = (None,) * 6,
) -> Tensor:
    """`[M, K]` fp16 or bf16 (contiguous) -> `[M, N]`. `locks`: int32 zeros, one per program and
    warpgroup. `beside`: what `ends` reads and writes, as the kernel of few tokens takes it.
    """
    (m, k), n = x.shape, weight.out_features
    blocks, steps = tiles.blocks(m, n), -(-k // STEP)
    programs = min(tiles.programs, blocks * (min(steps, MAX_PROGRAMS) if tiles.many else steps))
    assert programs * tiles.warpgroups <= locks.numel(), (programs, tiles, locks.shape)
    assert tiles.cluster == 1 or (programs == blocks * tiles.cluster and tiles.cluster <= steps), (programs, tiles)
    if x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if weight.perm is not None:
        x = gather_channels(x, weight.perm)
    out = torch.empty((m, n // ends.parts), dtype=x.dtype, device=x.device)
    # of each program two: of the tile that it ends and of the one that it begins; a cluster's stay in shared memory
    parts = 0 if blocks % programs == 0 or tiles.cluster > 1 else 2 * programs
    partial = torch.empty(parts * tiles.rows * tiles.block_m, dtype=torch.float32, device=x.device)
    variant = Variant(
        tiles=replace(tiles, programs=0),
        half=x.dtype == torch.float16,
        groups=1 if weight.group_size >= min(STEP, k) else STEP // weight.group_size,
        zeros=weight.zeros is not None,
        scales=weight.scales.dtype,
        middle=weight.middle,
        ends=ends,
    )
    arguments = [
        TensorMap(x, tiles.block_m) if tiles.many else x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        bias,
        out,
        partial,
        locks,
        *(() if tiles.many else beside),
        m,
        n,
        k,
        weight.group_size,
        weight.scales.shape[0],
    ]
    with torch.cuda.device(x.device):
        # weights are read before the kernel before has ended; in a captured graph none of them is written
        overlap = torch.cuda.is_current_stream_capturing()
        _kernel(variant, x.device.index).launch(
            programs, tiles.threads, arguments, overlap=overlap, cluster=tiles.cluster
        )
    return out


@cache
def _is_usable(device: int) -> bool:
    """A Hopper GPU, and a compiler that makes one of the kernels."""
    if cuda_capability(device) != (9, 0):
        return False
    try:
        with torch.cuda.device(device):
            _kernel(Variant(tiles=SHAPES[0].tiles, half=False), device)
    except RuntimeError as error:
        logger.warning("4-bit weights run through the portable kernel, up to three times slower: %s", error)
        return False
    return True


@cache
def _kernel(variant: Variant, device: int) -> CudaKernel:
    """Of the current device, which is `device`."""
    return CudaKernel(source(variant), "w4a16_hopper", "sm_90a", variant.shared_bytes)


def source(variant: Variant) -> str:
    """The CUDA source with the variant's definitions."""
    tiles = variant.tiles
    registers, produce_registers = _REGISTERS[tiles.warpgroups]
    defines = {
        "BM": tiles.block_m,
        "ROWS": tiles.rows,
        "STAGES": variant.stages,
        "WARPGROUPS": tiles.warpgroups,
        "HALF": int(variant.half),
        "GROUPS": variant.groups,
        "SCALE": _SCALES[variant.scales],
        "HAS_ZEROS": int(variant.zeros),
        "MIDDLE": variant.middle,
        "REGISTERS": registers,
        "PRODUCE_REGISTERS": produce_registers,
        "BURST": tiles.burst,
        "BUFFERS": tiles.buffers,
        "WGMMA": _wgmma(tiles.block_m, variant.half),
        "CLUSTER": tiles.cluster,
        "RESIDENT": tiles.resident,
        "NORMED": int(variant.ends.normed),
        "EPS": f"{variant.ends.eps:e}f",
        "GATED": int(variant.ends.gated),
        "ADDS": variant.ends.adds,
        "OFFSET": f"{variant.ends.offset:e}f",
        "ORDERED": int(variant.ends.ordered),
    }
    here = Path(__file__)
    parts = ("", "_ends", "_sums", "_many" if tiles.many else "_few")
    files = (here.with_name(f"{here.stem}{part}.cu") for part in parts)
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + "".join(
        file.read_text() for file in files
    )


def _wgmma(n: int, half: bool) -> str:
    """Body of an instruction's wrapper: 64 outputs by `n` tokens by 16 channels, the left operand in registers."""
    kind, count = "f16" if half else "bf16", n // 2
    sums = ",".join(f"%{i}" for i in range(count))
    bound = ",".join(f'"+f"(d[{i}])' for i in range(count))
    left = ",".join(f"%{count + i}" for i in range(4))
    return (
        f'{{ asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {{{left}}}, '
        f'%{count + 4}, 1, 1, 1, 0;" : {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); }}'
    )
