"""Plain torch for layers that keep current blocks: the place of a query's own block among keys and values read back."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.kernels.layout import AttentionMetadata, LayerKV


def current_of_decodes(meta: AttentionMetadata, layer: LayerKV) -> Tensor | None:
    """`[num_decodes, 2]` int64, where each row's own block starts and its slot; None: the layer keeps none."""
    if layer.recent is None:
        return None
    assert meta.current is not None
    return torch.stack((meta.current.starts, meta.current.slots), 1)[: meta.num_decodes].long()


def put_current_blocks(k: Tensor, v: Tensor, recent: LayerKV, current: Tensor, unused: Tensor) -> None:
    """Overwrite what was read back of each row's own block, in `k` and `v` `[B, kv_heads, keys, head_dim]`.

    Args:
        current: `[B, 2]` of `current_of_decodes`.
        unused: [n] int64 slots, counted over `[B, keys]`, that stay zero.
    """
    rows, blocks = torch.arange(len(k), device=k.device), current[:, 0] // recent.block_size
    for x, pages in ((k, recent.k), (v, recent.v)):
        x.unflatten(2, (-1, recent.block_size))[rows, :, blocks] = pages.tensor[current[:, 1]].to(x.dtype)
        x.transpose(0, 1).flatten(1, 2).index_fill_(1, unused, 0.0)


def with_own_block(coded: Tensor, own: Tensor, start: int) -> Tensor:
    """`coded` `[kv_heads, 1, keys, head_dim]` with `own` `[n, kv_heads, head_dim]` from key `start` on."""
    result = coded.clone()
    result[:, :, start : start + len(own)] = own.transpose(0, 1).unsqueeze(1)
    return result
