"""Triton kernel of a linear with 16-bit weights and few rows: a decode step's product at the speed of memory.

The weight is read once, in tiles of whole rows by `BLOCK_K` columns that go through a software pipeline; a program owns
`BLOCK_N` outputs, so nothing is reduced between programs. One row is multiplied elementwise and summed, more rows go
through the matrix unit. `torch.nn.functional.linear` defines the result; sums are fp32 here too, in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

MAX_ROWS = 16
_MIN_DOT_ROWS = 16  # of a matrix instruction


@dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """A launch."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _few_rows_linear(
    out_ptr,  # [M, N]
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    M,
    N,
    K,
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # 1, or at least 16
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = n < N
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    if ROWS == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        m = tl.arange(0, ROWS)
        x_at = x_ptr + m[:, None] * x_stride + k[None, :]
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = k < K - first
        if EVEN_N and EVEN_K:
            weight = tl.load(weight_at + first, eviction_policy="evict_first")
        else:
            weight = tl.load(
                weight_at + first, mask=n_mask[:, None] & k_mask[None, :], other=0.0, eviction_policy="evict_first"
            )
        if ROWS == 1:
            if EVEN_K:
                x = tl.load(x_ptr + first + k)
            else:
                x = tl.load(x_ptr + first + k, mask=k_mask, other=0.0)
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            x = tl.load(x_at + first, mask=(m < M)[:, None] & k_mask[None, :], other=0.0)
            sums = tl.dot(x, weight.T, sums)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if ROWS == 1:
        total = tl.sum(acc, 1)
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + n, total.to(DTYPE), mask=n_mask)
    else:
        if BIAS:
            sums += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + m[:, None] * N + n[None, :]
        tl.store(out, sums.to(DTYPE), mask=(m < M)[:, None] & n_mask[None, :])


@on_device
def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewRowsConfig | None = None) -> Tensor:
    """`linear(x, weight, bias)` of at most `MAX_ROWS` rows.

    Args:
        x: `[M, K]`, contiguous channels, fp16 or bf16.
        weight: `[N, K]`, contiguous channels.
        bias: `[N]` or None.
    """
    (rows, k), n = x.shape, weight.shape[0]
    assert 1 <= rows <= MAX_ROWS and weight.shape[1] == k and x.stride(1) == weight.stride(1) == 1, (
        x.shape,
        weight.shape,
    )
    config = config or choose_config(rows, n, k)
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    _few_rows_linear[(triton.cdiv(n, config.block_n),)](
        out,
        x,
        weight,
        x if bias is None else bias,
        rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        BIAS=bias is not None,
        ROWS=1 if rows == 1 else _MIN_DOT_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN_N=n % config.block_n == 0,
        EVEN_K=k % config.block_k == 0,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **overlap(out),
    )
    return out


def choose_config(rows: int, n: int, k: int) -> FewRowsConfig:
    """The best of a sweep on an H200 over the products of Llama-2-7B, within 3% on each."""
    if rows == 1 and k % 1024 == 0:
        return FewRowsConfig(block_n=4, block_k=1024, num_warps=2, num_stages=1)
    if rows == 1:
        return FewRowsConfig(block_n=16, block_k=256, num_warps=4, num_stages=5)
    if n <= 8192:  # few programs: each needs more bytes in flight
        return FewRowsConfig(block_n=32, block_k=256, num_warps=4, num_stages=5)
    return FewRowsConfig(block_n=32, block_k=128, num_warps=2, num_stages=4 if n < 16384 else 3)
