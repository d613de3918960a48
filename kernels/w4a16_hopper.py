"""4-bit weights times 16-bit activations on Hopper, for what Triton cannot say: packed words become operands inside
registers while bulk copies bring the next ones.

Two CUDA kernels: `w4a16_hopper_few.cu` (`mma.sync`, up to 16 tokens) and `w4a16_hopper_many.cu` (`wgmma`), compiled
when first used; `w4a16_hopper_tiles.py` chooses their launches. With few tokens group scales multiply fp32 sums and
nothing is rounded before the output; with many they multiply weights, both rounded to 16 bits, as a dequantized weight
is. Groups of 32, 64 or a multiple of 128 channels, zero points, act-order, fp16 and bf16. Meaning:
`packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_paged.kernels.cuda_kernel import CudaKernel, TensorMap, read_source
from hf_paged.kernels.gather_channels import gather_channels
from hf_paged.kernels.interleaved_rows import InterleavedRows
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.w4a16_hopper_tiles import MAX_PROGRAMS, SHAPES, STEP, HopperTiles

logger = logging.getLogger(__name__)

_SHARED_BYTES = 227 * 1024 - 1024  # of one program, less what the compiler takes
_MULTIPROCESSOR_BYTES = 228 * 1024  # with 1024 for each program
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_REGISTERS = {2: (232, 40), 3: (152, 40)}  # by warpgroups, of a thread that multiplies, produces


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a product of few tokens takes in of the kernels around it, see `folded_linear.py`; all off: nothing."""

    normed: bool = False  # rows lack the factor of their norm
    eps: float = 0.0  # of that norm
    gated: bool = False  # the output is silu(first half) * second half
    adds: int = 0  # 1: to a residual; 2: and makes the rows of the next norm
    offset: float = 0.0  # of that norm's weight
    ordered: bool = False  # what the next product reads lies in its order of channels, interleaved

    @property
    def parts(self) -> int:
        """Sums that become one output."""
        return 2 if self.gated else 1


class Beside(NamedTuple):
    """The tensors that `Ends` needs, in the order in which the kernel of few tokens takes them."""

    squares: Tensor | None = None  # [M, K / 16] fp32, with `normed`
    residual: Tensor | None = None  # [M, N], with `adds`
    norm: Tensor | None = None  # [N], with `adds` 2, as the next two
    rows: Tensor | None = None  # [M, N] or interleaved, written
    new_squares: Tensor | None = None  # [M, N / 16] fp32, written
    places: Tensor | None = None  # int32, of each channel of `rows` or of the gated output, with `ordered`


_NOTHING = Beside()


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
    interleaved: bool = False  # activations, for few tokens

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
    x: Tensor | InterleavedRows,
    weight: PackedWeight,
    bias: Tensor | None,
    locks: Tensor,
    tiles: HopperTiles,
    ends: Ends = Ends(),
    beside: Beside = _NOTHING,
) -> Tensor:
    """`[M, K]` fp16 or bf16 (contiguous, or interleaved in the weight's order) -> `[M, N]`, with gated `ends`
    `[M, N / 2]`, and with gated and ordered ones the data of interleaved rows. `locks`: int32 zeros, one per program
    and warpgroup.
    """
    (m, k), n = x.shape, weight.out_features
    interleaved = isinstance(x, InterleavedRows)
    x = x.data if isinstance(x, InterleavedRows) else x
    blocks, steps = tiles.blocks(m, n), -(-k // STEP)
    programs = min(tiles.programs, blocks * (min(steps, MAX_PROGRAMS) if tiles.many else steps))
    assert programs * tiles.warpgroups <= locks.numel(), (programs, tiles, locks.shape)
    assert tiles.cluster == 1 or (programs == blocks * tiles.cluster and tiles.cluster <= steps), (programs, tiles)
    if x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if weight.perm is not None and not interleaved:
        x = gather_channels(x, weight.perm)
    if ends.gated and ends.ordered:
        out = InterleavedRows.empty(m, n // 2, like=x).data
    else:
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
        interleaved=interleaved,
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
        "X_INTERLEAVED": int(variant.interleaved),
    }
    kernel = "w4a16_hopper_many" if tiles.many else "w4a16_hopper_few"
    files = ("hopper_instructions", "w4a16_hopper", "w4a16_hopper_ends", "w4a16_hopper_sums", kernel)
    return read_source(files, defines)


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
