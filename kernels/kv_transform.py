"""What lies between a model's keys and values and the pages that hold them: offset, factor and rotation.

    stored K = R ((K - z) / s)        query = R (q * s)
    stored V = R (V - w)              output = R (sum of p * stored V) + w

z and s (K smoothing) and w are static, one number per KV head and channel, applied after RoPE; s is a power of two, so
that dividing and multiplying by it rounds nothing. R is a Hadamard rotation, its own inverse. All of it is exact
algebra: q . K = q.z + query . stored K, and q.z, the same for every key of a row, cancels in the softmax, if it is
taken from the row's attention sinks too; the probabilities of a row sum to one, which gives w back. The second does not
hold with sinks, nor the first under a softcap: such layers take no such offset (`kv_calibration.py` sees to it).

The rotation acts on blocks of channels, the largest power of two that divides the head dimension, at most
`MAX_BLOCK`: head dimension 96 is three blocks of 32. It spreads one large channel over its block, which 4-bit codes
need and 8-bit codes do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BLOCK = 128  # a head of 256 channels is two blocks: a kernel's tile of rows stays in registers


@dataclass(frozen=True, kw_only=True, eq=False)
class KVTransform:
    """The transform of one attention layer. Results are fp32 (fp64 for fp64) unless stated."""

    k_offset: Tensor  # [kv_heads, head_dim] fp32
    k_factor: Tensor  # [kv_heads, head_dim] fp32, powers of two
    v_offset: Tensor | None  # [kv_heads, v_head_dim] fp32; None: nothing is added to the output
    rotates_k: bool
    rotates_v: bool
    sink_offset: Tensor | None = None  # [kv_heads, head_dim] fp32, R (z / s); None: z is 0, and sinks stay as they are

    def stored_key(self, key: Tensor) -> Tensor:
        """What pages hold of `key` `[..., kv_heads, head_dim]`."""
        rows = (_compute(key) - self.k_offset) / self.k_factor
        return hadamard(rows) if self.rotates_k else rows

    def stored_value(self, value: Tensor) -> Tensor:
        """What pages hold of `value` `[..., kv_heads, v_head_dim]`."""
        rows = _compute(value) if self.v_offset is None else _compute(value) - self.v_offset
        return hadamard(rows) if self.rotates_v else rows

    def query(self, query: Tensor) -> Tensor:
        """The query `[T, heads, head_dim]` that stored keys are to meet, in the dtype of `query`."""
        rows = _compute(query).unflatten(1, (len(self.k_factor), -1)) * self.k_factor.unsqueeze(1)
        return (hadamard(rows) if self.rotates_k else rows).flatten(1, 2).to(query.dtype)

    def sinks(self, sinks: Tensor | None, query: Tensor, scale: float) -> Tensor | None:
        """Attention sinks beside scores that lack q.z: `[T, heads]` fp32 for `[heads]`, or as they are.

        Args:
            query: of `query`, `[T, heads, head_dim]`; query . R (z / s) = q.z.
            scale: of the scores.
        """
        if sinks is None or self.sink_offset is None:
            return sinks
        rows = _compute(query).unflatten(1, (len(self.sink_offset), -1))
        return sinks - scale * (rows * self.sink_offset.unsqueeze(1)).sum(-1).flatten(1)

    def output(self, out: Tensor) -> Tensor:
        """Attention's output `[T, heads, v_head_dim]` over the values, from that over stored values; dtype of `out`."""
        if self.v_offset is None and not self.rotates_v:
            return out
        rows = hadamard(_compute(out)) if self.rotates_v else _compute(out)
        if self.v_offset is not None:
            rows = (rows.unflatten(1, (len(self.v_offset), -1)) + self.v_offset.unsqueeze(1)).flatten(1, 2)
        return rows.to(out.dtype)

    def key(self, stored: Tensor) -> Tensor:
        """The keys `[..., kv_heads, head_dim]` that `stored` stands for: `stored_key` undone."""
        return (hadamard(stored) if self.rotates_k else stored) * self.k_factor + self.k_offset

    def value(self, stored: Tensor) -> Tensor:
        """The values `[..., kv_heads, v_head_dim]` that `stored` stands for: `stored_value` undone."""
        rows = hadamard(stored) if self.rotates_v else stored
        return rows if self.v_offset is None else rows + self.v_offset

    def to(self, device: torch.device | str) -> KVTransform:
        """The same on another device."""
        return KVTransform(
            k_offset=self.k_offset.to(device),
            k_factor=self.k_factor.to(device),
            v_offset=None if self.v_offset is None else self.v_offset.to(device),
            rotates_k=self.rotates_k,
            rotates_v=self.rotates_v,
            sink_offset=None if self.sink_offset is None else self.sink_offset.to(device),
        )


def rotation_block(head_dim: int) -> int:
    """Channels that are rotated together."""
    return min(head_dim & -head_dim, MAX_BLOCK)


def hadamard(x: Tensor) -> Tensor:
    """`x` `[..., head_dim]` with each block of channels rotated by the Hadamard matrix of its size over its root.

    By butterflies: sums in an order that a kernel can follow, so that codes are the same on every device.
    """
    block = rotation_block(x.shape[-1])
    if block == 1:
        return x
    rows = x.unflatten(-1, (-1, block))
    for _ in range(block.bit_length() - 1):  # each stage makes the lowest bit of the channel the highest
        even, odd = rows[..., 0::2], rows[..., 1::2]
        rows = torch.cat((even + odd, even - odd), -1)
    return (rows * block**-0.5).flatten(-2)


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
