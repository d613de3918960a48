"""Triton kernel for RMSNorm and for the step between two sub-layers: post-norm, residual add, norm, in one pass.

A program holds whole rows in registers: the row is read once, whatever is computed of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap
from hf_paged.kernels.reference_fused import RMSNorm

MAX_SIZE = 32768  # elements of a row: 16 warps with 64 fp32 registers each


@triton.jit
def normalise(x, weight, eps, N, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Rows `x` `[ROWS, BLOCK]` fp32, zero beyond N, by `weight` `[1, BLOCK]`."""
    return weigh(x * tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None], weight, OFFSET, CAST_FIRST, DTYPE)


@triton.jit
def weigh(h, weight, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Normalised values times the weight, rounded to DTYPE where the model does, held as fp32."""
    if CAST_FIRST:
        h = h.to(DTYPE).to(tl.float32)
    return (h * (weight.to(tl.float32) + OFFSET)).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,  # [num_rows, N], rows x_stride apart
    residual_ptr,  # [num_rows, N]
    post_ptr,  # [N]
    weight_ptr,  # [N]
    sum_ptr,  # [num_rows, N]
    out_ptr,  # [num_rows, N]
    order_ptr,  # [N] int32, with ORDER
    num_rows,
    x_stride,
    post_eps,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    POST_OFFSET: tl.constexpr,
    POST_CAST_FIRST: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ORDER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (d < N)
    at = row[:, None] * N + d
    # all loads first: none of them waits for the reduction
    x = tl.load(x_ptr + row[:, None] * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + d, mask=d < N, other=0.0)
    if ORDER:
        order = tl.load(order_ptr + d, mask=d < N, other=0)
    if POST:
        post = tl.load(post_ptr + d, mask=d < N, other=0.0)
        x = normalise(x, post, post_eps, N, POST_OFFSET, POST_CAST_FIRST, DTYPE)
    if ADD:
        x = (residual + x).to(DTYPE).to(tl.float32)
        tl.store(sum_ptr + at, x.to(DTYPE), mask=mask)
    if NORM:
        y = normalise(x, weight, eps, N, OFFSET, CAST_FIRST, DTYPE).to(DTYPE)
        if ORDER:
            # one dimension: with two the compiler keeps each row in a warp, at thousands of instructions
            at_source = tl.reshape(tl.arange(0, ROWS)[:, None] * BLOCK + order, (ROWS * BLOCK,))
            y = tl.reshape(tl.gather(tl.reshape(y, (ROWS * BLOCK,)), at_source, 0), (ROWS, BLOCK))
        tl.store(out_ptr + at, y, mask=mask)


@on_device
def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """`reference_fused.rms_norm` on a GPU; N at most `MAX_SIZE`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, norm, None, out, out)
    return out


@on_device
def add_rms_norm(
    delta: Tensor, residual: Tensor, norm: RMSNorm | None, post: RMSNorm | None
) -> tuple[Tensor, Tensor | None]:
    """`reference_fused.add_rms_norm` on a GPU; N at most `MAX_SIZE`."""
    total = torch.empty(delta.shape, dtype=delta.dtype, device=delta.device)
    out = None if norm is None else torch.empty_like(total)
    _launch(delta, residual.contiguous(), norm, post, total, total if out is None else out)
    return total, out


def _launch(
    x: Tensor, residual: Tensor | None, norm: RMSNorm | None, post: RMSNorm | None, total: Tensor, out: Tensor
) -> None:
    n = x.shape[-1]
    assert n <= MAX_SIZE, n
    rows = x.reshape(-1, n)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    block = triton.next_power_of_2(n)
    rows_per_program = max(1, 1024 // block)
    _rms_norm[(triton.cdiv(rows.shape[0], rows_per_program),)](
        rows,
        rows if residual is None else residual,
        rows if post is None else post.weight,
        rows if norm is None else norm.weight,
        total,
        out,
        rows if norm is None or norm.order is None else norm.order,
        rows.shape[0],
        rows.stride(0),
        0.0 if post is None else post.eps,
        0.0 if norm is None else norm.eps,
        N=n,
        BLOCK=block,
        ROWS=rows_per_program,
        POST=post is not None,
        POST_OFFSET=0.0 if post is None else post.offset,
        POST_CAST_FIRST=post is not None and post.cast_first,
        ADD=residual is not None,
        NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset,
        CAST_FIRST=norm is not None and norm.cast_first,
        ORDER=norm is not None and norm.order is not None,
        num_warps=min(max(block * rows_per_program // 256, 1), 16),  # 8 elements a thread: one 16-byte load
        **overlap(rows),
    )
