"""4-bit weights times 16-bit activations on Hopper, for what Triton cannot say: packed words become operands inside
registers while bulk copies bring the next ones.

Two CUDA kernels, `w4a16_hopper_few.cu` and `w4a16_hopper_many.cu`. This file chooses the launch by costs measured on
an H200, compiles it when first used and launches it. In tiles of up to 64 tokens group scales multiply fp32 sums and
nothing is rounded before the output; in the tile of 128 tokens they multiply weights, both rounded to 16 bits, as a
dequantized weight is. Groups of 32, 64 or a multiple of 128 channels, zero points, act-order, fp16 and bf16. Meaning:
`packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.cuda_kernel import CudaKernel, nvrtc
from hf_paged.kernels.gather_channels import gather_channels
from hf_paged.kernels.packed_weight import PackedWeight

logger = logging.getLogger(__name__)

STEP = 128  # channels of a unit
MAX_HOPPER_ROWS = 256  # above, cuBLAS on dequantized weights is faster (`eval/weights_bench.py`)
MAX_GATHERED = 0  # tokens that are gathered by `perm` in the kernel: 1.4 microseconds each, a kernel before it 0.5
_SHARED_BYTES = 227 * 1024 - 1024  # of one program, less what the compiler takes
_MOST_STAGES = 12
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_REGISTERS = {2: (232, 40), 4: (112, 32)}  # of a thread that multiplies, produces, by warpgroups that multiply
# clusters of so many programs that an H200 holds: a cluster lies within one of its 7 or 8 groups of multiprocessors
_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}


@dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """One launch. A tile is `block_m` tokens by `rows` outputs.

    Few tokens: `split` programs, a cluster, share the channels of a tile. Many: `programs` share the units of all.
    """

    block_m: int
    rows: int
    warpgroups: int  # that multiply
    split: int = 1
    many: bool = False
    exact: bool = True  # scales multiply fp32 sums
    programs: int = 0

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is fixed when a kernel is compiled."""

    tiles: HopperTiles  # with `programs` 0
    half: bool  # fp16, else bf16
    groups: int = 1  # of a unit
    zeros: bool = False
    perm: bool = False
    scales: torch.dtype = torch.float16
    middle: int = 8

    @property
    def stage_bytes(self) -> int:
        scale_bytes = self.scales.itemsize + int(self.zeros)
        return self.tiles.block_m * 256 + self.tiles.rows * (64 + self.groups * scale_bytes) + 16

    @property
    def stages(self) -> int:
        return min(_SHARED_BYTES // self.stage_bytes, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """A tile and what it costs, fitted to an H200's times of 6 weight shapes (within 18%, most within 5%)."""

    tiles: HopperTiles
    unit: float  # microseconds
    end: float  # launch, first load, sum and store


SHAPES = (
    TileShape(tiles=HopperTiles(block_m=8, rows=512, warpgroups=4), unit=0.887, end=5.2),
    TileShape(tiles=HopperTiles(block_m=8, rows=256, warpgroups=2), unit=0.537, end=2.5),
    TileShape(tiles=HopperTiles(block_m=8, rows=128, warpgroups=2), unit=0.364, end=1.9),
    TileShape(tiles=HopperTiles(block_m=16, rows=512, warpgroups=4), unit=1.137, end=4.6),
    TileShape(tiles=HopperTiles(block_m=16, rows=256, warpgroups=2), unit=0.644, end=2.8),
    TileShape(tiles=HopperTiles(block_m=16, rows=128, warpgroups=2), unit=0.400, end=2.2),
    TileShape(tiles=HopperTiles(block_m=32, rows=256, warpgroups=2), unit=0.857, end=3.8),
    TileShape(tiles=HopperTiles(block_m=32, rows=128, warpgroups=2), unit=0.524, end=3.1),
    TileShape(tiles=HopperTiles(block_m=32, rows=256, warpgroups=2, many=True), unit=0.93, end=7.8),
    TileShape(tiles=HopperTiles(block_m=64, rows=256, warpgroups=2, many=True), unit=1.167, end=11.6),
    TileShape(tiles=HopperTiles(block_m=128, rows=256, warpgroups=2, many=True, exact=False), unit=2.055, end=19.5),
)


@cache
def choose_hopper_tiles(m: int, n: int, k: int, multiprocessors: int) -> HopperTiles:
    """The launch that costs least by `SHAPES`, over tiles and splits."""
    steps = -(-k // STEP)
    found: list[tuple[float, HopperTiles]] = []
    for shape in SHAPES:
        blocks_m = -(-m // shape.tiles.block_m)
        blocks = -(-n // shape.tiles.rows) * blocks_m
        if shape.tiles.many:
            if blocks_m > 4:  # `lock_count` has room for four
                continue
            whole = multiprocessors // blocks * blocks  # then no program works on two tiles
            programs = min(whole if whole > 0.96 * multiprocessors else multiprocessors, blocks * steps)
            cost = blocks * steps / programs * shape.unit + shape.end
            found.append((cost, replace(shape.tiles, programs=programs)))
            continue
        for split, clusters in _CLUSTERS.items():
            clusters = min(clusters, multiprocessors // split)
            if split <= steps and (split == 1 or blocks <= clusters):
                waves = -(-blocks // max(clusters, 1))
                cost = waves * (-(-steps // split) * shape.unit + shape.end)
                found.append((cost, replace(shape.tiles, split=split)))
    return min(found, key=lambda item: item[0])[1]


def fits_hopper(x: Tensor, weight: PackedWeight) -> bool:
    """Whether GPU, shape and alignment suit."""
    group, k = weight.group_size, weight.in_features
    return (
        x.is_cuda
        and torch.version.hip is None
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


def w4a16_hopper(x: Tensor, weight: PackedWeight, bias: Tensor | None, locks: Tensor, tiles: HopperTiles) -> Tensor:
    """`[M, K]` fp16 or bf16 (contiguous) -> `[M, N]`. `locks`: int32 zeros, one per 64 outputs and block of tokens."""
    if x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    perm = weight.perm
    if perm is not None and (tiles.many or x.shape[0] > MAX_GATHERED):
        x, perm = gather_channels(x, perm), None
    (m, k), n = x.shape, weight.out_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    variant = Variant(
        tiles=replace(tiles, programs=0),
        half=x.dtype == torch.float16,
        groups=1 if weight.group_size >= min(STEP, k) else STEP // weight.group_size,
        zeros=weight.zeros is not None,
        perm=perm is not None,
        scales=weight.scales.dtype,
        middle=weight.middle,
    )
    blocks_m = -(-m // tiles.block_m)
    blocks = -(-n // tiles.rows) * blocks_m
    programs, partial = blocks * tiles.split, out
    if tiles.many:
        programs = min(tiles.programs, blocks * -(-k // STEP))  # the count of a tile's parts knows no idle program
        if blocks % programs:  # programs share tiles: each has a place for its first and its last
            assert -(-n // 64) * blocks_m <= locks.numel(), (m, n, locks.shape)
            partial = torch.empty(programs * 2 * tiles.rows * tiles.block_m, dtype=torch.float32, device=x.device)
    arguments = [
        x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if perm is None else perm,
        bias,
        out,
        partial,
        locks,
        m,
        n,
        k,
        weight.group_size,
        weight.scales.shape[0],
    ]
    with torch.cuda.device(x.device):
        # weights are read before the kernel before has ended; in a captured graph none of them is written
        overlap = torch.cuda.is_current_stream_capturing()
        kernel = _kernel(variant, x.device.index)
        kernel.launch(programs, tiles.threads, arguments, cluster=tiles.split, overlap=overlap)
    return out


@cache
def _is_usable(device: int) -> bool:
    """A Hopper GPU, and the compiler."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        nvrtc()
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
        "SPLIT": tiles.split,
        "HALF": int(variant.half),
        "GROUPS": variant.groups,
        "SCALE": _SCALES[variant.scales],
        "HAS_ZEROS": int(variant.zeros),
        "HAS_PERM": int(variant.perm),
        "MIDDLE": variant.middle,
        "REGISTERS": registers,
        "PRODUCE_REGISTERS": produce_registers,
        "EXACT": int(tiles.exact),
        "WGMMA": _wgmma(tiles.block_m, variant.half),
    }
    here = Path(__file__)
    files = (here.with_suffix(".cu"), here.with_name(f"w4a16_hopper_{'many' if tiles.many else 'few'}.cu"))
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
        f'{{ asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {{{left}}}, %{count + 4}, "
        f'p, 1, 1, 0;}}" : {bound} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate)); }}'
    )
