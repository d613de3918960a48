"""Sampling on the GPU: temperature, top-k, top-p, min-p, noise and argmax in one kernel, without a sort.

The definition is `sample_reference.sample_by_sort`; this is its `sample`, one program per row and all rows at once:
read the row for its largest logit, read it for the best noisy token, read it to verify that top-p keeps that token.
A row without top-k takes three reads of its logits, 19 times in 20 at top_p = 0.95. top-k adds a bisection over the bit
patterns of the distance, at most 31 reads, fewer as soon as exactly k tokens are near enough. Logits are read in their
own dtype and stay in the L2 cache between the reads. What is random is bit-identical to the definition; exp and log are
the GPU's, so a token may differ where two scores, or a weight sum and top_p, agree to about 1e-6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.sample_reference import RowSampling

BLOCK = 4096  # 8 logits a thread: 16-byte loads in bf16, and registers for two programs on an SM
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _key(stream, position):
    x = stream.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    bits = _mix32(_mix32(token.to(tl.uint32) ^ key.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    word = bits.to(tl.int32, bitcast=True).to(tl.float32)
    u = tl.minimum((tl.where(word < 0, word + 4294967296.0, word) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604645e-8)
    w = 1 - u  # -log1p(-u) without cancellation: the rounding of w is undone by u / (1 - w)
    return -tl.log(tl.where(w < 1, -tl.log(w) * u / tl.maximum(1 - w, 5.9604645e-8), u))


@triton.jit
def _distance(logits, token, vocab_size, nearest, inverse):
    """Distances, as in the definition, of token ids in one row; inf past the end of the row."""
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    d = tl.where(x == nearest, 0.0, (nearest - x) * inverse)
    return tl.where(token < vocab_size, d, float("inf"))


@triton.jit
def _nearest(logits, vocab_size, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(x == x, x, float("-inf")))
    return tl.max(best)


@triton.jit
def _count(logits, vocab_size, nearest, inverse, reach, BLOCK: tl.constexpr):
    """How many tokens are within `reach`, the bits of a finite distance. Bits of positive floats are ordered."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        d = _distance(logits, start + lane, vocab_size, nearest, inverse)
        count += (d.to(tl.int32, bitcast=True) <= reach).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _kth(logits, vocab_size, nearest, inverse, k, BLOCK: tl.constexpr):
    """Bits of a distance that has the k nearest tokens, and those that tie with the k-th, within it."""
    low = k * 0
    high = low + INF_BITS
    while low < high:
        middle = low + (high - low) // 2
        count = _count(logits, vocab_size, nearest, inverse, middle, BLOCK)
        high = tl.where(count >= k, middle, high)
        low = tl.where(count > k, low, tl.where(count == k, middle, middle + 1))
    return high


@triton.jit
def _guess(logits, vocab_size, nearest, inverse, is_random, key, reach, BLOCK: tl.constexpr):
    """The token within `reach` with the largest score, the lowest id on a tie."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + lane
        d = _distance(logits, token, vocab_size, nearest, inverse)
        score = tl.where(is_random, _gumbel(key, token), 0.0) - d
        better = (score > best) & (d.to(tl.int32, bitcast=True) <= reach)
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    return tl.min(tl.where(best == tl.max(best), best_token, 0x7FFFFFFF))


@triton.jit
def _weigh(logits, vocab_size, nearest, inverse, reach, guessed, BLOCK: tl.constexpr):
    """Total weight of the tokens within `reach`, and of those strictly nearer than bits `guessed`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    nearer = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        d = _distance(logits, start + lane, vocab_size, nearest, inverse)
        bits = d.to(tl.int32, bitcast=True)
        weight = (tl.exp(-d) * 1099511627776.0).to(tl.int64)
        total += tl.where(bits <= reach, weight, 0)
        nearer += tl.where(bits < guessed, weight, 0)
    return tl.sum(total), tl.sum(nearer)


@triton.jit
def sample_kernel(
    token_ids,  # [n] int64, written
    logits,  # [n, vocab_size], last dimension contiguous
    rows,  # [n] int64
    positions,  # [n] int64
    temperature,  # [rows] fp32
    top_p,  # [rows] fp32
    max_distance,  # [rows] fp32
    top_k,  # [rows] int64
    streams,  # [rows] int64
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    logits += i * logits_stride
    heat = tl.load(temperature + row)
    mass = tl.load(top_p + row)
    k = tl.load(top_k + row)
    key = _key(tl.load(streams + row), tl.load(positions + i))

    nearest = _nearest(logits, vocab_size, BLOCK)
    inverse = tl.math.div_rn(1.0, tl.where(heat > 0, heat, 1.0))
    kth = INF_BITS
    if (k > 0) & (k < vocab_size) & (heat > 0):
        kth = _kth(logits, vocab_size, nearest, inverse, k.to(tl.int32), BLOCK)
    reach = tl.minimum(kth, tl.load(max_distance + row).to(tl.int32, bitcast=True))
    token = _guess(logits, vocab_size, nearest, inverse, heat > 0, key, reach, BLOCK)
    verified = (mass >= 1) | (heat <= 0)
    while not verified:
        guessed = _distance(logits, token, vocab_size, nearest, inverse).to(tl.int32, bitcast=True)
        total, nearer = _weigh(logits, vocab_size, nearest, inverse, kth, guessed, BLOCK)
        verified = (nearer == 0) | (nearer.to(tl.float64) < total.to(tl.float64) * mass.to(tl.float64))
        if not verified:
            token = _guess(logits, vocab_size, nearest, inverse, True, key, guessed - 1, BLOCK)
    tl.store(token_ids + i, token.to(tl.int64))


@on_device
def sample(logits: Tensor, params: RowSampling, rows: Tensor, positions: Tensor) -> Tensor:
    """Sampled token ids `[n]` int64 of logits `[n, V]` (any float dtype). Never synchronizes.

    `rows` `[n]` int64 says which settings of `params` each logit row follows, `positions` `[n]` int64 which place of
    its sequence the token takes.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    sample_kernel[(num_rows,)](
        token_ids,
        logits,
        rows,
        positions,
        params.temperature,
        params.top_p,
        params.max_distance,
        params.top_k,
        params.stream,
        logits.stride(0),
        vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )
    return token_ids
