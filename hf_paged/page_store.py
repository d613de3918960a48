"""The bytes of a `PagedCache`: one pool of blocks, and each layer's pages from the moment it first writes.

Nothing is known in advance: a layer's shape is that of the first keys it stores, so tensor parallelism (local heads)
and latent attention (one latent head) need no special case. The store grows by doubling unless its size was fixed,
layer by layer, so that at most one layer exists twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.block_pool import BlockPool
from hf_paged.config import EngineConfig
from hf_paged.kernels.layout import LayerKV
from hf_paged.kv_cache import KVCache
from hf_paged.kv_protection import plan_layers
from hf_paged.kv_scales import KVScales
from hf_paged.layer_probe import LayerSpec


class PageStore:
    """Blocks and their bytes, shared by a cache and its copies. A layer's pages are made when it first writes.

    Args:
        config: block_size, num_blocks and what `plan_layers` reads; `num_blocks` None lets the store grow.
        scales: how to smooth, None: not at all.
    """

    def __init__(self, config: EngineConfig, scales: KVScales | None = None) -> None:
        self.config = config
        self._scales = scales
        self.pool = BlockPool(config.num_blocks or 2)
        self.enough = 0  # blocks that the call at hand can use at most: growth by doubling stops there
        self._layers: dict[int, KVCache] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated in all layers."""
        return sum(layer.num_bytes for layer in self._layers.values())

    def layer(self, layer_idx: int) -> LayerKV:
        return self._layers[layer_idx].layers[layer_idx]

    def prepare_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> LayerKV:
        """The pages of a layer that stores `key` and `value`, [batch, kv_heads, q_len, head_dim] each.

        Raises:
            ValueError: the layer stores another shape or dtype already.
        """
        spec = LayerSpec(
            layer_idx=layer_idx,
            name=f"layer {layer_idx}",
            num_heads=key.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            v_head_dim=value.shape[3],
            window=None,
            softcap=None,
            has_sinks=False,
            dtype=key.dtype,
            device=key.device,
        )
        store = self._layers.get(layer_idx)
        if store is None:
            formats = plan_layers([spec], self.config, self._scales).formats
            size = {"num_blocks": self.pool.num_blocks, "block_size": self.config.block_size}
            self._layers[layer_idx] = store = KVCache([spec], formats, **size)
        elif store.specs[0] != spec:
            raise ValueError(f"this cache stores {store.specs[0]}; the model now writes {spec}")
        return self.layer(layer_idx)

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Stop doubling at what `num_rows` rows of `num_tokens` tokens can use.

        Raises:
            ValueError: the pool is of a fixed size and smaller than that.
        """
        config = self.config
        enough = num_rows * (-(-num_tokens // config.block_size)) + 1
        if config.num_blocks is not None and enough > config.num_blocks:
            raise ValueError(
                f"num_blocks={config.num_blocks} is too small: {num_rows} rows of up to {num_tokens} tokens need "
                f"{enough} blocks of {config.block_size} tokens, the null block included"
            )
        self.enough = max(self.enough, enough)

    def ensure_free(self, count: int) -> None:
        """Have `count` free blocks, growing if that is allowed.

        Raises:
            ValueError: the pool is of a fixed size and too small.
        """
        missing = count - self.pool.num_free
        if missing <= 0:
            return
        if self.config.num_blocks is not None:
            raise ValueError(
                f"the KV cache is full: num_blocks={self.config.num_blocks} blocks of {self.config.block_size} tokens, "
                f"{missing} more are needed; allowed: a larger num_blocks, or None to let the cache grow"
            )
        now = self.pool.num_blocks
        size = max(now + missing, min(2 * now, self.enough))
        for layer in self._layers.values():  # before the pool: where one finds no memory, no block is promised
            layer.grow(max(size, layer.num_blocks))
        self.pool.grow(size)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination), in every layer."""
        table = torch.tensor(copies, dtype=torch.long)
        for layer in self._layers.values():
            table = table.to(layer.specs[0].device)
            layer.copy_blocks(table)
