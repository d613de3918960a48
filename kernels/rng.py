"""Random numbers by counting: the noise of a token is a hash of (seed, position, token id) and of nothing else.

There is no generator state, so what a request draws does not depend on its row, on the rest of the batch, on how its
prompt was chunked, or on a preemption in between. One splitmix64 step makes a 64-bit key of a seed and a position; two
murmur3 finalizers, one per half of the key, make 32 bits of a key and a token id. `sample.py` computes the same bits on
the GPU. Not for cryptography.

Sources: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014); Appleby, MurmurHash3 (fmix32).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the counter's stride in splitmix64
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX32 = (0x85EBCA6B, 0xC2B2AE35)


def signed(value: int, bits: int) -> int:
    """The two's complement reading of the low `bits` bits of `value`: torch has no unsigned arithmetic."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def stream_of(seed: int) -> int:
    """The int64 that names a seed's stream. Neighbouring seeds give unrelated streams."""
    return signed(_mix64(_mix64(seed)), 64)


def derive_seed(seed: int, index: int) -> int:
    """A seed in [0, 2^63) for the `index`-th request of an engine, or the `index`-th sequence of a request.

    Unlike `seed + index` it is never the seed that a caller gave another request.
    """
    return _mix64(_mix64(seed) + (index + 1) * GOLDEN) & ((1 << 63) - 1)


def _mix64(x: int) -> int:
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * MIX64[0]) & mask
    x = ((x ^ (x >> 27)) * MIX64[1]) & mask
    return x ^ (x >> 31)


def keys(stream: Tensor, position: Tensor) -> Tensor:
    """Keys `[n]` int64 of streams `[n]` int64 at positions `[n]` int64."""
    x = stream + (position + 1) * signed(GOLDEN, 64)  # int64 arithmetic wraps
    x = (x ^ _shift_right(x, 30, 64)) * signed(MIX64[0], 64)
    x = (x ^ _shift_right(x, 27, 64)) * signed(MIX64[1], 64)
    return x ^ _shift_right(x, 31, 64)


def random_bits(key: Tensor, num_tokens: int) -> Tensor:
    """Random bits `[n, num_tokens]` int32 of keys `[n]` int64: a word per token id, all 2^32 words equally likely."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=key.device)
    low = key.to(torch.int32).unsqueeze(-1)  # keeps the low word
    high = (key >> 32).to(torch.int32).unsqueeze(-1)
    return _mix32(_mix32(token ^ low) ^ high)


def _mix32(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 16, 32)) * signed(MIX32[0], 32)
    x = (x ^ _shift_right(x, 13, 32)) * signed(MIX32[1], 32)
    return x ^ _shift_right(x, 16, 32)


def _shift_right(x: Tensor, shift: int, bits: int) -> Tensor:
    return (x >> shift) & ((1 << (bits - shift)) - 1)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 and finite, of random int32 words: -log(-log(1 - u)), u uniform in (0, 1).

    The largest noise decides a sample and comes from the smallest u, which a word resolves to 2^-33. At the other end
    u stops at 1 - 2^-24, the last fp32 below 1. So the noise lies in [-2.82, 22.88].
    """
    word = bits.float()  # the word as unsigned; small words, the ones that matter, stay exact
    u = (torch.where(word < 0, word + 2.0**32, word) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp_(max=1 - 2.0**-24)))
