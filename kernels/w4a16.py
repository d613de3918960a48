"""Weight-only GEMM for few rows: packed 2-, 4- and 8-bit weights times fp16 or bf16 activations, read once.

The weights are the left operand, so their registers feed the matrix instruction directly and only the small activation
tile goes through shared memory. Codes become floats by an and-or with a magic exponent and one exact subtraction;
group scales multiply fp32 partial sums (`SCALE_WEIGHTS` off) or, for many rows, the weights. K is split over programs;
the last one to finish adds the partial sums in a fixed order, so a result does not depend on timing. Meaning:
`packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.split_k import finish
from hf_paged.kernels.w4a16_tiles import Tiles


@triton.jit
def in_channel_order(words, ROWS: tl.constexpr):
    """[ROWS, 16] words as stored -> by channel, in registers (`packed_weight.py` has the order)."""
    return words.reshape(ROWS, 4, 4).permute(0, 2, 1).reshape(ROWS, 16)


@triton.jit
def _weights(
    words, zero, j: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr
):
    """Slice j of a tile: [BLOCK_N, 16] words -> [BLOCK_N, 32] centred weights."""
    if BITS == 8 and dtype == tl.bfloat16:  # bf16 holds 8 bits: centre in fp32, then the difference is exact
        low = (words >> (8 * j)) & 0xFF
        high = (words >> (8 * j + 16)) & 0xFF
        wide = tl.join(low, high).reshape(BLOCK_N, 32) | 0x4B000000
        value = (wide.to(tl.float32, bitcast=True) - zero).to(tl.bfloat16)
    else:
        MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
        MAGIC: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        field = words >> (BITS * j)
        if PTX:  # one and-or (the compiler makes two of it: only one immediate fits) and one packed zero * -1 + code
            HALVES: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
            MINUS_ONE: tl.constexpr = 0xBF80BF80 if dtype == tl.bfloat16 else 0xBC00BC00
            pair = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $1, $2, $3, 0xEA; fma.rn." + HALVES + " $0, $4, $5, t; }",
                "=r,r,n,r,r,r",
                [field, MASK, MAGIC, zero, MINUS_ONE],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            pair = (field & MASK) | MAGIC
        low, high = (pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)
        value = tl.join(low, high).reshape(BLOCK_N, 32).to(dtype, bitcast=True)
        if not PTX:
            value -= (zero & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return value


@triton.jit
def _zero(
    zeros, offset, in_range, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr
):
    """The zero point with the magic exponent of `_weights`, in both halves of a word (in fp32 for 8 bits in bf16).

    [BLOCK_N, 1], or [1, 1] when it is constant.
    """
    if BITS == 8 and dtype == tl.bfloat16:
        if HAS_ZEROS:
            zero = (tl.load(zeros + offset, mask=in_range, other=0).to(tl.float32) + 8388608.0)[:, None]
        else:
            zero = tl.full((1, 1), 8388608.0 + MIDDLE, tl.float32)
    else:
        MAGIC: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        if HAS_ZEROS:
            zero = ((tl.load(zeros + offset, mask=in_range, other=0).to(tl.int32) | MAGIC) * 0x00010001)[:, None]
        else:
            zero = tl.full((1, 1), (MAGIC | MIDDLE) * 0x00010001, tl.int32)
    return zero


@triton.jit(do_not_specialize=["M", "num_tiles", "groups"])  # one kernel for all batch sizes of a launch shape
def w4a16_kernel(
    x,  # [M, K] fp16 or bf16
    packed,  # [experts,] [N / 64, K / TILE_K, 64, 16] int32
    scales,  # [experts,] [groups, N]
    zeros,  # [experts,] [groups, N] uint8
    perm,  # [experts,] [K] int32, with HAS_PERM
    bias,  # [N], with HAS_BIAS
    expert_ids,  # [rows] int, with TOP_K: row r is token r // TOP_K through expert_ids[r]
    out,  # [M or rows, N], dtype of x
    partial,  # [SPLIT_K, M, N] fp32, with SPLIT_K > 1
    locks,  # [tiles] int32, zero before and after, with SPLIT_K > 1
    M,
    N,
    K,
    num_tiles,
    groups,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TILE_K: tl.constexpr = 512 // BITS
    INNER: tl.constexpr = min(GROUP, TILE_K) if GROUP > 0 else TILE_K
    dtype: tl.constexpr = x.dtype.element_ty
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if TOP_K > 0:
        expert = tl.load(expert_ids + pid_m).to(tl.int64)
        x += (pid_m // TOP_K).to(tl.int64) * K
        packed += expert * tl.cdiv(N, 64) * num_tiles * 1024
        scales += expert * groups * N
        zeros += expert * groups * N
        perm += expert * K
        out += pid_m.to(tl.int64) * N
    else:
        m += pid_m * BLOCK_M
    in_n = n < N
    in_m = m[None, :] < M
    row = (n // 64).to(tl.int64) * num_tiles * 1024 + (n % 64) * 16
    if not EVEN_N:  # rows beyond the last tile re-read row 0: always mapped, never stored
        row = tl.where(n < tl.cdiv(N, 64) * 64, row, 0)
    words_at = packed + row[:, None] + tl.arange(0, 16)[None, :]
    x_at = x + m[None, :].to(tl.int64) * K
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    tiles_per_split = tl.cdiv(num_tiles, SPLIT_K)
    for tile in range(pid_k * tiles_per_split, min(num_tiles, (pid_k + 1) * tiles_per_split)):
        words = in_channel_order(tl.load(words_at + tile * 1024), BLOCK_N)
        partial_sum = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for j in tl.static_range(16 // BITS):
            if (j * 32) % INNER == 0:
                group = (tile * TILE_K + j * 32) // GROUP if GROUP > 0 else 0
                group = min(group, groups - 1)  # only padding channels lie beyond the last group
                offset = group * N + n
                zero = _zero(zeros, offset, in_n, MIDDLE, HAS_ZEROS, BITS, dtype)
                scale = tl.load(scales + offset, mask=in_n, other=0.0)
            k = tile * TILE_K + j * 32 + tl.arange(0, 32)
            at = tl.load(perm + k, mask=k < K, other=0) if HAS_PERM else k
            xt = tl.load(x_at + at[:, None], mask=(k[:, None] < K) & in_m, other=0.0)
            w = _weights(words, zero, j, BITS, BLOCK_N, dtype, PTX)
            if SCALE_WEIGHTS:
                accumulator = tl.dot(w * scale.to(dtype)[:, None], xt, accumulator)
            else:
                partial_sum = tl.dot(w, xt, partial_sum)
                if ((j + 1) * 32) % INNER == 0:
                    accumulator += partial_sum * scale.to(tl.float32)[:, None]
                    partial_sum = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)

    at_out = m[None, :].to(tl.int64) * N + n[:, None]
    keep = in_m & in_n[:, None]
    block = pid_m * tl.num_programs(0) + pid_n
    finish(out, at_out, accumulator, partial, locks + block, bias, n, keep, in_n, pid_k, M, N, SPLIT_K, HAS_BIAS)


@on_device
def w4a16(x: Tensor, weight: PackedWeight, bias: Tensor | None, locks: Tensor, tiles: Tiles) -> Tensor:
    """`[M, K]` fp16 or bf16 (contiguous) -> `[M, N]`. `locks`: int32 zeros, one per block of the output."""
    m, n = x.shape[0], weight.out_features
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, tiles.block_n), tiles.split_k, triton.cdiv(m, tiles.block_m))
    partial = out
    if tiles.split_k > 1:
        assert grid[0] * grid[2] <= locks.numel(), (grid, locks.shape)
        partial = torch.empty((tiles.split_k, m, n), dtype=torch.float32, device=x.device)
    _launch(grid, x, weight, bias, x, out, partial, locks, m, 0, tiles)
    return out


@on_device
def w4a16_experts(x: Tensor, weight: PackedWeight, expert_ids: Tensor, top_k: int, tiles: Tiles) -> Tensor:
    """`[rows / top_k, K]` through one expert per row -> `[rows, N]`: row r is token r // top_k with expert
    `expert_ids[r]`.
    """
    rows, n = expert_ids.numel(), weight.out_features
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, tiles.block_n), 1, rows)
    _launch(grid, x, weight, None, expert_ids, out, out, expert_ids, 1, top_k, tiles)
    return out


def _launch(
    grid: tuple[int, int, int],
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    expert_ids: Tensor,
    out: Tensor,
    partial: Tensor,
    locks: Tensor,
    m: int,
    top_k: int,
    tiles: Tiles,
) -> None:
    n, k = weight.out_features, weight.in_features
    step = 512 // weight.field_bits
    whole = weight.group_size >= k
    assert whole or weight.group_size % step == 0 or step % weight.group_size == 0, weight.group_size
    w4a16_kernel[grid](
        x,
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if weight.perm is None else weight.perm,
        x if bias is None else bias,
        expert_ids,
        out,
        partial,
        locks,
        m,
        n,
        k,
        weight.packed.shape[-3],
        weight.scales.shape[-2],
        BITS=weight.field_bits,
        MIDDLE=weight.middle,
        GROUP=0 if whole else weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        HAS_PERM=weight.perm is not None,
        HAS_BIAS=bias is not None,
        TOP_K=top_k,
        SPLIT_K=1 if top_k else tiles.split_k,
        EVEN_N=n % tiles.block_n == 0,
        SCALE_WEIGHTS=tiles.scale_weights,
        PTX=x.is_cuda and torch.version.hip is None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
