"""Rows of few tokens whose channels lie in another order, the tokens of a channel side by side.

For act-order: a channel that changes places is one store of 16 bytes, where in rows it is one of 2 for each token, all
over the L2. `w4a16_hopper_few.cu` reads them as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TOGETHER = 8  # tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class InterleavedRows:
    """`[M, K]` as eights of tokens."""

    data: Tensor  # [ceil(M / 8), K, 8] fp16 or bf16; what stands for tokens from M on means nothing
    tokens: int

    @classmethod
    def empty(cls, tokens: int, channels: int, like: Tensor) -> InterleavedRows:
        """`[tokens, channels]` of the dtype and device of `like`, to be written."""
        return cls(data=like.new_empty((-(-tokens // TOGETHER), channels, TOGETHER)), tokens=tokens)

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.data.shape[1]

    @classmethod
    def of(cls, rows: Tensor, places: Tensor | None = None) -> InterleavedRows:
        """Channel i of `rows` `[M, K]` comes to lie at `places[i]` (`[K]` int32)."""
        tokens, channels = rows.shape
        padded = rows.new_zeros((-(-tokens // TOGETHER) * TOGETHER, channels))
        padded[:tokens, slice(None) if places is None else places.long()] = rows
        return cls(data=padded.unflatten(0, (-1, TOGETHER)).transpose(1, 2).contiguous(), tokens=tokens)

    @property
    def rows(self) -> Tensor:
        """`[M, K]`."""
        return self.data.transpose(1, 2).flatten(0, 1)[: self.tokens]
