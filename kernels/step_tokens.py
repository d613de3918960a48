"""Triton kernels at the two ends of a step: the tokens that go in, and the likeliest ones that come out.

A token that an earlier step sampled is known to the device only, in `last_token`, by the row of its request. torch
takes three kernels for one end and two for the other, of two to ten microseconds each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

_BLOCK = 8192  # logits that a program holds: 16 a thread


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
def _likeliest(
    out_ptr,  # [n] int64
    last_ptr,  # [rows] int64
    logits_ptr,  # [n, V], rows stride apart
    rows_ptr,  # [n] int64
    stride,
    V,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    i = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = lane
    for first in tl.range(0, V, BLOCK, num_stages=4):
        x = tl.load(logits_ptr + i * stride + first + lane, mask=first + lane < V, other=float("-inf")).to(tl.float32)
        token = tl.where(x > best, first + lane, token)
        best = tl.maximum(best, x)
    likeliest = tl.min(tl.where(best == tl.max(best), token, V - 1)).to(tl.int64)
    tl.store(out_ptr + i, likeliest)
    tl.store(last_ptr + tl.load(rows_ptr + i), likeliest)


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
def likeliest_tokens(logits: Tensor, rows: Tensor, last_token: Tensor) -> Tensor:
    """The argmax `[n]` int64 of logits `[n, V]`, the lowest id on a tie, also written to `last_token[rows]`."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    _likeliest[(n,)](
        out, last_token, logits, rows, logits.stride(0), vocab_size, BLOCK=block, num_warps=16, **overlap(out)
    )
    return out
