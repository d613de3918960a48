"""Few rows times e4m3 weights with any grid of scales: weights read once, activations in 16 bits, fp32 sums.

The weight-only counterpart of `torch._scaled_mm`, for block scales, for activations that stay in 16 bits and for GPUs
without FP8 units. Like `w4a16`, weights are the left operand and K is split. Beyond `MAX_FUSED_ROWS` the dequantize
kernel and cuBLAS take over. Meaning: `fp8_linear_reference` without quantized activations, and `dequantize_fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.split_k import finish
from hf_paged.kernels.w4a16_tiles import Tiles

BLOCK_K = 128


@triton.jit(do_not_specialize=["M", "scale_stride", "scale_rows", "scale_columns"])
def fp8_gemm_kernel(
    x,  # [M, K] fp16 or bf16
    codes,  # [N, K] float8_e4m3fn
    scales,  # [N / scale_rows, K / scale_columns] (rounded up)
    bias,  # [N], with HAS_BIAS
    out,  # [M, N], dtype of x
    partial,  # [SPLIT_K, M, N] fp32, with SPLIT_K > 1
    locks,  # [blocks] int32, with SPLIT_K > 1
    M,
    N,
    K,
    scale_stride,
    scale_rows,
    scale_columns,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_n, pid_k, pid_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_n, in_m = n < N, m[None, :] < M
    codes_at = codes + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x + m[None, :].to(tl.int64) * K + k[:, None]
    scale_at = scales + (n // scale_rows) * scale_stride
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    per_split = tl.cdiv(steps, SPLIT_K)
    for step in range(pid_k * per_split, min(steps, (pid_k + 1) * per_split)):
        begin = step * BLOCK_K
        in_k = k < K - begin
        w = tl.load(codes_at + begin, mask=in_n[:, None] & in_k[None, :], other=0.0)
        xt = tl.load(x_at + begin, mask=in_k[:, None] & in_m, other=0.0)
        scale = tl.load(scale_at + begin // scale_columns, mask=in_n, other=0.0).to(tl.float32)
        accumulator += tl.dot(w.to(x.dtype.element_ty), xt) * scale[:, None]
    at_out = m[None, :].to(tl.int64) * N + n[:, None]
    keep = in_m & in_n[:, None]
    lock = locks + pid_m * tl.num_programs(0) + pid_n
    finish(out, at_out, accumulator, partial, lock, bias, n, keep, in_n, pid_k, M, N, SPLIT_K, HAS_BIAS)


@on_device
def fp8_gemm(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None, locks: Tensor, tiles: Tiles
) -> Tensor:
    """`[M, K]` fp16 or bf16 -> `[M, N]`. `scales` `[N / block[0], K / block[1]]`, block[1] % 128 == 0 or >= K."""
    (n, k), m = codes.shape, x.shape[0]
    assert block[1] % BLOCK_K == 0 or block[1] >= k, block
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, tiles.block_n), tiles.split_k, triton.cdiv(m, tiles.block_m))
    partial = out
    if tiles.split_k > 1:
        assert grid[0] * grid[2] <= locks.numel(), (grid, locks.shape)
        partial = torch.empty((tiles.split_k, m, n), dtype=torch.float32, device=x.device)
    fp8_gemm_kernel[grid](
        x,
        codes,
        scales,
        x if bias is None else bias,
        out,
        partial,
        locks,
        m,
        n,
        k,
        scales.stride(0),
        block[0],
        max(block[1], 1),
        HAS_BIAS=bias is not None,
        SPLIT_K=tiles.split_k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=BLOCK_K,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["scale_stride", "scale_rows", "scale_columns"])
def fp8_dequantize_kernel(
    codes,  # [N, K] float8_e4m3fn
    scales,  # [N / scale_rows, K / scale_columns]
    out,  # [N, K]
    K,
    scale_stride,
    scale_rows,
    scale_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.load(scales + (row // scale_rows) * scale_stride + k // scale_columns, mask=k < K, other=0.0)
    tl.store(out + row * K + k, (code * scale.to(tl.float32)).to(out.dtype.element_ty), mask=k < K)


@on_device
def fp8_dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`[N, K]` in `dtype`, the fp32 product rounded once."""
    n, k = codes.shape
    out = torch.empty((n, k), dtype=dtype, device=codes.device)
    size = 2048
    fp8_dequantize_kernel[(n, triton.cdiv(k, size))](  # rows first: only that dimension takes more than 65,535
        codes, scales, out, k, scales.stride(0), block[0], max(block[1], 1), BLOCK=size, num_warps=4
    )
    return out
