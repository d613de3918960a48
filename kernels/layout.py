"""What a kernel sees: the pages of one layer and the shape of one step.

Pages are HND, `[num_blocks, kv_heads, block_size, head_dim]`. Dimension 0 may be strided (all pages of a block share
one byte row, see `kv_cache.py`); the inner three dimensions are contiguous. Block 0 is the null block: no live token is
ever stored there, and it holds zeros, so that it may be read under a mask. K and V carry their own format, so an 8-bit
K beside a 16-bit V is a plain combination of two values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class PlainPages:
    """Pages that hold values as they are (fp32, fp16 or bf16)."""

    data: Tensor  # [num_blocks, kv_heads, block_size, head_dim]

    @property
    def tensor(self) -> Tensor:
        return self.data


@dataclass(frozen=True, kw_only=True)
class ScaledPages:
    """Pages of 8-bit codes; value = code * scale, one scale per token and KV head."""

    codes: Tensor  # [num_blocks, kv_heads, block_size, head_dim], int8 or float8_e4m3fn
    scale: Tensor  # [num_blocks, kv_heads, block_size], fp16

    @property
    def tensor(self) -> Tensor:
        return self.codes

    @property
    def code_max(self) -> float:
        return INT8_MAX if self.codes.dtype == torch.int8 else FP8_MAX


Pages = PlainPages | ScaledPages


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """The pages of one attention layer. `v` may have another head_dim than `k`."""

    k: Pages
    v: Pages

    @property
    def block_size(self) -> int:
        return self.k.tensor.shape[2]


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The shape of one step for the layers of one KV group.

    Sequences with exactly one query token come first; `num_decodes` counts them. `max_seqlen_q` and `max_seq_len` are
    Python bounds that size the launch (a captured graph uses its capacity); the tensors decide what is read.
    """

    cu_seqlens_q: Tensor  # [num_seqs + 1] int32, query token offsets
    seq_lens: Tensor  # [num_seqs] int32, keys per sequence once this step's tokens are written
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset; -1 = do not write
    num_decodes: int
    max_seqlen_q: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
