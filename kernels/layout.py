"""What a kernel sees: the pages of one layer and the shape of one step.

Pages are HND, `[num_blocks, kv_heads, block_size, head_dim]`. Dimension 0 may be strided (all pages of a block share
one byte row, see `kv_cache.py`); the inner three dimensions are contiguous. Block 0 is the null block: no live token is
ever stored there, and it holds zeros, so that it may be read under a mask. K and V carry their own format, so an 8-bit
K beside a 16-bit V is a plain combination of two values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels.kv_transform import KVTransform

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest finite float8_e4m3fn
UINT4_MAX = 15.0
FP16_MAX = 65504.0
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # torch's stubs lack it. Names the format, of no tensor
GROUP_SIZE = 64  # most channels that share a scale and a zero in 4-bit pages


@dataclass(frozen=True, kw_only=True)
class PlainPages:
    """Pages that hold values as they are (fp32, fp16 or bf16)."""

    data: Tensor  # [num_blocks, kv_heads, block_size, head_dim]

    @property
    def tensor(self) -> Tensor:
        return self.data

    @property
    def head_dim(self) -> int:
        return self.data.shape[3]


@dataclass(frozen=True, kw_only=True)
class ScaledPages:
    """Pages of 8-bit codes; value = code * scale, one scale per token and KV head."""

    codes: Tensor  # [num_blocks, kv_heads, block_size, head_dim], int8 or float8_e4m3fn
    scale: Tensor  # [num_blocks, kv_heads, block_size], fp16

    @property
    def tensor(self) -> Tensor:
        return self.codes

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3]

    @property
    def code_max(self) -> float:
        return INT8_MAX if self.codes.dtype == torch.int8 else FP8_MAX


@dataclass(frozen=True, kw_only=True)
class GroupPages:
    """Pages of 4-bit codes; value = code * scale + zero, one scale and zero per token, KV head and group of channels.

    Byte i holds channel i (low bits) and channel i + head_dim / 2 (high bits): with two groups a mask tells them apart,
    so what a lane loads in one piece is an operand of either group, and no group needs a shift of its own.
    """

    codes: Tensor  # [num_blocks, kv_heads, block_size, head_dim / 2] uint8
    scale: Tensor  # [num_blocks, kv_heads, block_size, groups, 2] fp16: scale, zero

    @property
    def tensor(self) -> Tensor:
        return self.codes

    @property
    def head_dim(self) -> int:
        return 2 * self.codes.shape[3]


def num_groups(head_dim: int) -> int:
    """Groups of a row of 4-bit codes: the fewest equal ones of at most 64 channels whose number is a power of two.

    64 -> 1, 80 -> 2 of 40, 96 -> 2 of 48, 128 -> 2, 192 -> 4 of 48, 256 -> 4. Equal groups, since a ragged last one
    would cost every kernel a case of its own, and a smaller group only makes its codes finer.

    Raises:
        ValueError: the channels cannot be packed in pairs and cut so.
    """
    groups = 1
    while head_dim > GROUP_SIZE * groups:
        groups *= 2
    if head_dim % max(groups, 2):
        allowed = f"a multiple of {max(groups, 2)}"
        raise ValueError(f"int4 keys and values of head_dim {head_dim} are not supported; allowed: {allowed}")
    return groups


Pages = PlainPages | ScaledPages | GroupPages


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """The pages of one attention layer. `v` may have another head_dim than `k`.

    `transform` says how what the pages hold follows from keys and values; None: they are the same. Whoever writes or
    attends applies it; the kernels below see stored rows only.

    `recent` keeps the block that a sequence is filling as it came, beside its codes: plain pages
    `[num_slots, kv_heads, block_size, head_dim]`, one slot per running sequence, slot 0 for none. A query then reads
    the keys and values of its own block as they came, all before it as codes. None: codes only.
    """

    k: Pages
    v: Pages
    transform: KVTransform | None = None
    recent: LayerKV | None = None

    @property
    def block_size(self) -> int:
        return self.k.tensor.shape[2]

    @cached_property
    def plain_pair(self) -> PlainPages | None:
        """K and V as pages of `2 * kv_heads` heads, where they are plain, alike and neighbours in their blocks."""
        if not (isinstance(self.k, PlainPages) and isinstance(self.v, PlainPages)):
            return None
        k, v = self.k.data, self.v.data
        alike = (k.shape, k.stride(), k.dtype) == (v.shape, v.stride(), v.dtype)
        if not alike or k.shape[0] == 0 or v.data_ptr() - k.data_ptr() != k[0].numel() * k.element_size():
            return None
        num_blocks, kv_heads, *rest = k.shape
        if k.stride(0) < 2 * k.stride(1) * kv_heads:
            return None  # V's first block lies where K's second one does: two tensors, one after the other
        return PlainPages(data=k.as_strided((num_blocks, 2 * kv_heads, *rest), k.stride()))


@dataclass(frozen=True, kw_only=True)
class RecentRows:
    """What the tokens of a step leave in `LayerKV.recent`: stored rows that were not quantized."""

    key: Tensor  # [num_tokens, kv_heads, head_dim], contiguous, in the dtype of `recent`
    value: Tensor  # [num_tokens, kv_heads, v_head_dim]
    slot_mapping: Tensor  # `CurrentBlocks.slot_mapping`


@dataclass(frozen=True, kw_only=True)
class CurrentBlocks:
    """Where the sequences of a step have the block of their last token, for layers that keep it as it came."""

    starts: Tensor  # [num_seqs] int32, tokens before that block
    slots: Tensor  # [num_seqs] int32, of `LayerKV.recent`; 0: there is no token
    slot_mapping: Tensor  # [num_tokens] int64, slot * block_size + offset; -1: of an earlier block

    def of(self, rows: Tensor, tokens: Tensor) -> CurrentBlocks:
        """Those of some sequences, and of their last `tokens`; both int64."""
        return CurrentBlocks(starts=self.starts[rows], slots=self.slots[rows], slot_mapping=self.slot_mapping[tokens])


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The shape of one step for the layers of one KV group.

    Sequences with exactly one query token come first; `num_decodes` counts them. `max_seqlen_q` and `max_seq_len` are
    Python bounds that size the launch (a captured graph uses its capacity); the tensors decide what is read.

    With `current`, sequences of several query tokens begin these at a block's start: what they need of their own blocks
    is the step's own.
    """

    cu_seqlens_q: Tensor  # [num_seqs + 1] int32, query token offsets
    seq_lens: Tensor  # [num_seqs] int32, keys per sequence once this step's tokens are written
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset; -1 = do not write
    num_decodes: int
    max_seqlen_q: int
    max_seq_len: int
    current: CurrentBlocks | None = None  # None: no layer keeps any
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # worked out once for all layers

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
