"""4-bit weights times 16-bit activations on Hopper, for what Triton cannot say; `w4a16_hopper.cu` has the kernels.

Few tokens (up to 32): packed words go from shared memory to the operands of `mma.sync` in registers and group scales
multiply fp32 sums, so nothing is rounded before the output. Many tokens: warpgroups of their own unpack and scale
weights into shared memory (rounded to 16 bits, the scale too) where `wgmma` reads them, every weight unpacked once per
128 or 256 tokens. This file chooses the variant, compiles it when first used and launches it. Groups of 32, 64 or a
multiple of 128 channels, zero points, act-order, fp16 and bf16. Meaning: `packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.cuda_kernel import CudaKernel, nvrtc
from hf_paged.kernels.packed_weight import PackedWeight

logger = logging.getLogger(__name__)

STEP = 128  # channels of one step of the ring
MAX_HOPPER_ROWS = 0  # above, cuBLAS on dequantized weights is faster (`eval/weights_bench.py`)
MAX_GATHERED = 16  # most tokens that it gathers by `perm` itself
_SHARED_BYTES = 227 * 1024 - 1024  # of one program, less what the compiler takes
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_ENTRY_REGISTERS = {2: 255, 3: 168, 4: 128, 5: 96}  # a thread's share, by warpgroups of a program


@dataclass(frozen=True, kw_only=True)
class HopperTiles:
    """One launch. A program makes `block_m` tokens by `rows` outputs; `split` programs share the channels of a tile."""

    block_m: int
    rows: int
    split: int
    warpgroups: int  # that multiply
    unpackers: int = 0  # warpgroups that unpack
    wgmma_n: int = 0  # outputs of one instruction
    buffers: int = 0  # of unpacked weights, 64 channels each
    resident: int = 1  # programs of a multiprocessor

    @property
    def many(self) -> bool:
        return self.unpackers > 0

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + self.unpackers + 1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is fixed when a kernel is compiled."""

    tiles: HopperTiles
    half: bool  # fp16, else bf16
    groups: int = 1  # of a step
    zeros: bool = False
    perm: bool = False
    scales: torch.dtype = torch.float16
    middle: int = 8

    @property
    def stage_bytes(self) -> int:
        scale_bytes = self.scales.itemsize + int(self.zeros)
        return self.tiles.block_m * 256 + self.tiles.rows * (64 + self.groups * scale_bytes) + 16

    @property
    def buffer_bytes(self) -> int:
        return self.tiles.buffers * (self.tiles.rows * 128 + 16)

    @property
    def stages(self) -> int:
        return min((_SHARED_BYTES // self.tiles.resident - self.buffer_bytes) // self.stage_bytes, 12)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.buffer_bytes


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """A tile shape and what one step of it costs a multiprocessor, in cycles, measured on an H200."""

    tiles: HopperTiles
    step: int
    end: int  # launch, first load, sum and store of a program


SHAPES = (
    TileShape(tiles=HopperTiles(block_m=8, rows=256, split=1, warpgroups=4), step=850, end=6000),
    TileShape(tiles=HopperTiles(block_m=16, rows=256, split=1, warpgroups=4), step=950, end=6000),
    TileShape(tiles=HopperTiles(block_m=32, rows=256, split=1, warpgroups=4), step=1250, end=6000),
    TileShape(
        tiles=HopperTiles(block_m=64, rows=256, split=1, warpgroups=1, unpackers=2, wgmma_n=128, buffers=2),
        step=1700,
        end=7000,
    ),
    TileShape(
        tiles=HopperTiles(block_m=64, rows=128, split=1, warpgroups=1, unpackers=2, wgmma_n=128, buffers=3),
        step=900,
        end=6500,
    ),
    TileShape(
        tiles=HopperTiles(block_m=128, rows=192, split=1, warpgroups=2, unpackers=1, wgmma_n=192, buffers=2),
        step=1850,
        end=7500,
    ),
    TileShape(
        tiles=HopperTiles(block_m=128, rows=128, split=1, warpgroups=2, unpackers=1, wgmma_n=128, buffers=3),
        step=1300,
        end=7000,
    ),
    TileShape(
        tiles=HopperTiles(block_m=256, rows=128, split=1, warpgroups=2, unpackers=1, wgmma_n=128, buffers=2),
        step=2400,
        end=8000,
    ),
)


@cache
def choose_hopper_tiles(m: int, n: int, k: int, multiprocessors: int) -> HopperTiles:
    """The cheapest of all tile shapes and splits by the measured cost of a step and the waves that they take."""
    best, least = None, 0.0
    for shape in SHAPES:
        tiles = shape.tiles
        if not tiles.many and m > tiles.block_m:
            continue
        blocks, steps = -(-n // tiles.rows) * -(-m // tiles.block_m), -(-k // STEP)
        for split in (1, 2, 4, 8):
            clusters = multiprocessors * tiles.resident // split
            if split > 1 and (blocks > clusters or split > steps):
                continue
            waves = -(-blocks // clusters)
            cost = waves * (-(-steps // split) * shape.step + shape.end)
            if best is None or cost < least:
                best, least = replace(tiles, split=split), cost
    assert best is not None
    return best


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
    )


def w4a16_hopper(x: Tensor, weight: PackedWeight, bias: Tensor | None, tiles: HopperTiles) -> Tensor:
    """`[M, K]` fp16 or bf16 (contiguous) -> `[M, N]`."""
    if x.data_ptr() % 16:
        x = x.clone()
    perm = weight.perm
    if perm is not None and (tiles.many or tiles.block_m > MAX_GATHERED):
        x, perm = x.index_select(1, perm), None
    (m, k), n = x.shape, weight.out_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    variant = Variant(
        tiles=tiles,
        half=x.dtype == torch.float16,
        groups=1 if weight.group_size >= min(STEP, k) else STEP // weight.group_size,
        zeros=weight.zeros is not None,
        perm=perm is not None,
        scales=weight.scales.dtype,
        middle=weight.middle,
    )
    blocks = -(-n // tiles.rows) * -(-m // tiles.block_m)
    _kernel(variant, x.device.index).launch(
        blocks * tiles.split,
        tiles.threads,
        [
            x,
            weight.packed,
            weight.scales,
            weight.scales if weight.zeros is None else weight.zeros,
            x if perm is None else perm,
            bias,
            out,
            m,
            n,
            k,
            weight.group_size,
            weight.scales.shape[0],
        ],
        cluster=tiles.split,
        # weights are read before the kernel before has ended; in a captured graph none of them is written
        overlap=torch.cuda.is_current_stream_capturing(),
    )
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
    with torch.cuda.device(device):
        return CudaKernel(source(variant), "w4a16_hopper", "sm_90a", variant.shared_bytes)


def source(variant: Variant) -> str:
    """The CUDA source with the variant's definitions."""
    tiles = variant.tiles
    multiply, unpack, produce = _registers(tiles)
    wgmma_n = tiles.wgmma_n or 64
    defines = {
        "MANY": int(tiles.many),
        "BM": tiles.block_m,
        "ROWS": tiles.rows,
        "STAGES": variant.stages,
        "SPLIT": tiles.split,
        "HALF": int(variant.half),
        "GROUPS": variant.groups,
        "HAS_ZEROS": int(variant.zeros),
        "HAS_PERM": int(variant.perm),
        "SCALE": _SCALES[variant.scales],
        "MIDDLE": variant.middle,
        "WARPGROUPS": tiles.warpgroups,
        "UNPACKERS": tiles.unpackers,
        "RESIDENT": tiles.resident,
        "BUFFERS": tiles.buffers,
        "REGISTERS": multiply,
        "UNPACK_REGISTERS": unpack,
        "PRODUCE_REGISTERS": produce,
        "UNPACK_UP": int(unpack > _ENTRY_REGISTERS[tiles.threads // 128]),
        "WGMMA_N": wgmma_n,
        "WGMMA": _wgmma(wgmma_n, variant.half),
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + Path(__file__).with_suffix(".cu").read_text()


def _registers(tiles: HopperTiles) -> tuple[int, int, int]:
    """Of a thread that multiplies, unpacks, produces: what they start with, moved to where accumulators are."""
    warpgroups = tiles.threads // 128
    entry = _ENTRY_REGISTERS[warpgroups]
    if tiles.resident > 1 or warpgroups == 2:
        return 0, 0, 0
    produce = 40 if entry >= 128 else 32
    unpack = 0 if not tiles.many else 120 if entry >= 128 else 72
    left = warpgroups * entry - produce - tiles.unpackers * unpack
    return min(left // tiles.warpgroups // 8 * 8, 232), unpack, produce


def _wgmma(n: int, half: bool) -> str:
    """Body of the wrapper of one instruction: 64 tokens by `n` outputs by 16 channels, both operands shared."""
    kind, count = "f16" if half else "bf16", n // 2
    sums = ",".join(f"%{i}" for i in range(count))
    bound = ",".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f'{{ asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, %{count}, %{count + 1}, "
        f'p, 1, 1, 0, 0;}}" : {bound} : "l"(a), "l"(b), "r"(accumulate)); }}'
    )
