"""Triton kernels at the two ends of a step: the tokens that go in, their embeddings, and the likeliest that come out.

A token that an earlier step sampled is known to the device only, in `last_token`, by the row of its request. torch
takes three kernels for one end and two for the other, of two to ten microseconds each; its lookup of up to 16 tokens
takes one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

_BLOCK = 4096  # logits of a program: 16 a thread
_CHANNELS = 1024  # of an embedding, of a program


@triton.jit(do_not_specialize=["count"])
def _input_tokens(
    out_ptr,  # [T] int64
    ids_ptr,  # [T] int64
    rows_ptr,  # [T] int64
    last_ptr,  # [rows] int64
    count,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + t, mask=t < count, other=0)
    last = tl.load(last_ptr + tl.load(rows_ptr + t, mask=t < count, other=0), mask=t < count, other=0)
    tl.store(out_ptr + t, tl.where(ids >= 0, ids, last), mask=t < count)


@triton.jit
def _embedding(
    out_ptr,  # [T, K]
    ids_ptr,  # [T] int64
    weight_ptr,  # [V, K]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    tl.store(out_ptr + token * K + k, tl.load(weight_ptr + row * K + k, mask=k < K, other=0.0), mask=k < K)


@triton.jit
def _likeliest_parts(
    best_ptr,  # [n, parts] fp32
    token_ptr,  # [n, parts] int32
    logits_ptr,  # [n, V], rows stride apart
    stride,
    V,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The likeliest token of each `BLOCK` of a row; what is no number is not likely."""
    begin(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x)
    at = row * tl.num_programs(1) + part
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, tl.min(tl.where(x == best, token, V - 1)))


@triton.jit
def _likeliest(
    out_ptr,  # [n] int64
    last_ptr,  # [rows] int64
    best_ptr,  # [n, parts] fp32
    token_ptr,  # [n, parts] int32
    rows_ptr,  # [n] int64
    parts,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(token_ptr + row * parts + part, mask=part < parts, other=2147483647)
    likeliest = tl.min(tl.where(best == tl.max(best), token, 2147483647)).to(tl.int64)
    tl.store(out_ptr + row, likeliest)
    tl.store(last_ptr + tl.load(rows_ptr + row), likeliest)


@on_device
def input_tokens(input_ids: Tensor, token_rows: Tensor, last_token: Tensor) -> Tensor:
    """`input_ids` `[T]` int64, where negative the row's `last_token`; `token_rows` `[T]` int64."""
    out = torch.empty_like(input_ids)
    block = 256
    _input_tokens[(triton.cdiv(len(input_ids), block),)](
        out, input_ids, token_rows, last_token, len(input_ids), BLOCK=block, num_warps=4, **overlap(out)
    )
    return out


@on_device
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """`fused_ops.embedding` on a GPU."""
    assert ids.dtype == torch.int64, ids.dtype  # offsets are as wide as ids
    k = weight.shape[1]
    out = torch.empty((*ids.shape, k), dtype=weight.dtype, device=weight.device)
    _embedding[(ids.numel(), triton.cdiv(k, _CHANNELS))](
        out, ids.contiguous(), weight, K=k, BLOCK=_CHANNELS, num_warps=4, **overlap(out)
    )
    return out


@on_device
def likeliest_tokens(logits: Tensor, rows: Tensor, last_token: Tensor) -> Tensor:
    """The argmax `[n]` int64 of logits `[n, V]`, the lowest id on a tie, also written to `last_token[rows]`."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    parts = triton.cdiv(vocab_size, block)  # programs of a row: one alone reads 128,256 logits for 10 microseconds
    best = torch.empty((n, parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((n, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    options = overlap(logits)
    _likeliest_parts[(n, parts)](best, token, logits, logits.stride(0), vocab_size, BLOCK=block, num_warps=8, **options)
    _likeliest[(n,)](
        out, last_token, best, token, rows, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1, **options
    )
    return out
