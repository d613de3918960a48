"""Weight-only GEMM for few rows: packed 2-, 4- and 8-bit weights times fp16 or bf16 activations, read once.

The weights are the left operand, so their registers feed the matrix instruction directly and only the small activation
tile goes through shared memory. Codes become floats by an and-or with a magic exponent and one exact subtraction; group
scales multiply fp32 partial sums (`SCALE_WEIGHTS` off) or, for many rows, the weights. K is split over programs; the last
one to finish adds the partial sums in a fixed order, so a result does not depend on timing. Meaning:
`packed_weight.packed_linear_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(words, zero, magic, j: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """Slice j of a tile, [BLOCK_N, 16] words -> [BLOCK_N, 32] centred weights."""
    if BITS == 8 and dtype == tl.bfloat16:  # bf16 holds 8 bits: centre in fp32, then the difference is exact
        low = (words >> (8 * j)) & 0xFF
        high = (words >> (8 * j + 16)) & 0xFF
        value = tl.join(low, high).reshape(BLOCK_N, 32) | 0x4B000000
        return (value.to(tl.float32, bitcast=True) - zero).to(tl.bfloat16)
    pair = ((words >> (BITS * j)) & (((1 << BITS) - 1) * 0x00010001)) | magic
    value = tl.join((pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)).reshape(BLOCK_N, 32)
    return value.to(dtype, bitcast=True) - zero


@triton.jit
def _zero(zeros, offset, in_range, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """The zero point as `_weights` subtracts it: magic exponent included."""
    if BITS == 8 and dtype == tl.bfloat16:
        if HAS_ZEROS:
            return (tl.load(zeros + offset, mask=in_range, other=0).to(tl.float32) + 8388608.0)[:, None]
        return tl.full((1, 1), 8388608.0 + MIDDLE, tl.float32)
    if HAS_ZEROS:
        code = tl.load(zeros + offset, mask=in_range, other=0).to(tl.int16)
        return (code | (0x4300 if dtype == tl.bfloat16 else 0x6400)).to(dtype, bitcast=True)[:, None]
    return tl.full((1, 1), (128 if dtype == tl.bfloat16 else 1024) + MIDDLE, dtype)


@triton.jit
def w4a16_kernel(
    x,  # [M, K] fp16 or bf16
    packed,  # [experts,] [N / 64, K / TILE_K, 64, 16] int32
    scales,  # [experts,] [groups, N]
    zeros,  # [experts,] [groups, N] uint8
    perm,  # [K] int32, with HAS_PERM
    bias,  # [N], with HAS_BIAS
    expert_ids,  # [rows] int, with TOP_K: row r is token r // TOP_K through expert_ids[r]
    out,  # [M or rows, N], dtype of x
    partial,  # [rows or 1, SPLIT_K, M, N] fp32, with SPLIT_K > 1
    locks,  # [tiles] int32, zero before and after, with SPLIT_K > 1
    M, N, K, num_tiles, groups, magic,
    BITS: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, SPLIT_K: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TILE_K: tl.constexpr = 512 // BITS
    INNER: tl.constexpr = min(GROUP, TILE_K) if GROUP > 0 else TILE_K
    dtype: tl.constexpr = x.dtype.element_ty
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if TOP_K > 0:
        expert = tl.load(expert_ids + pid_m).to(tl.int64)
        if expert >= NUM_EXPERTS:
            return
        x += (pid_m // TOP_K).to(tl.int64) * K
        packed += expert * tl.cdiv(N, 64) * num_tiles * 1024
        scales += expert * groups * N
        zeros += expert * groups * N
        out += pid_m.to(tl.int64) * N
        partial += pid_m.to(tl.int64) * SPLIT_K * N
    else:
        m += pid_m * BLOCK_M
    in_n = n < N
    in_m = m[None, :] < M
    row = (n // 64).to(tl.int64) * num_tiles * 1024 + (n % 64) * 16
    words_at = packed + row[:, None] + tl.arange(0, 16)[None, :]
    # padding rows of the last block re-read row 0 of the weight: always mapped, never stored
    words_at = tl.where(n[:, None] < tl.cdiv(N, 64) * 64, words_at, packed + tl.arange(0, 16)[None, :])
    x_at = x + m[None, :].to(tl.int64) * K
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    tiles_per_split = tl.cdiv(num_tiles, SPLIT_K)
    for tile in range(pid_k * tiles_per_split, min(num_tiles, (pid_k + 1) * tiles_per_split)):
        words = tl.load(words_at + tile * 1024)
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
            w = _weights(words, zero, magic, j, BITS, BLOCK_N, dtype)
            if SCALE_WEIGHTS:
                accumulator = tl.dot(w * scale.to(dtype)[:, None], xt, accumulator)
            else:
                partial_sum = tl.dot(w, xt, partial_sum)
                if ((j + 1) * 32) % INNER == 0:
                    accumulator += partial_sum * scale.to(tl.float32)[:, None]
                    partial_sum = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)

    at_out = m[None, :].to(tl.int64) * N + n[:, None]
    keep = in_m & in_n[:, None]
    if SPLIT_K > 1:
        tl.store(partial + pid_k.to(tl.int64) * M * N + at_out, accumulator, mask=keep)
        tl.debug_barrier()
        lock = locks + pid_m * tl.num_programs(0) + pid_n
        if tl.atomic_add(lock, 1, sem="acq_rel") < SPLIT_K - 1:
            return
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for split in range(SPLIT_K):
            accumulator += tl.load(partial + split.to(tl.int64) * M * N + at_out, mask=keep, other=0.0, cache_modifier=".cg")
        tl.store(lock, 0)
    if HAS_BIAS:
        accumulator += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at_out, accumulator.to(dtype), mask=keep)
