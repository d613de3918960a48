"""`PagedCache`: pages as a Transformers cache, for beam search, assisted decoding and custom loops.

    cache = PagedCache(model, kv_cache_dtype="int8")
    out = model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True)
    more = model.generate(**longer, past_key_values=out.past_key_values)     # multi-turn: only new tokens are computed

`generate()` and any model whose attention implementation is "hf_paged" attend to the pages directly. Under every other
implementation (a custom loop on a model as it was loaded) `update` returns keys and values read back from the pages:
right for any attention and any mask, and what is attended to is still what is stored, but each step then costs a copy
of the whole history. `reorder_cache`, `crop`, `batch_repeat_interleave`, `batch_select_indices` and `copy.deepcopy` are
operations on block tables with copy-on-write. Stored values carry no gradient. A cache and its copies share blocks and
belong to one thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_paged.attention import AttentionCall
from hf_paged.cache_pages import CachePages, tag
from hf_paged.config import AUTO_QUALITY, EngineConfig, refuse
from hf_paged.kv_mix import cache_storage
from hf_paged.page_store import PageStore


class _KVLength(int):
    """A key length that tells our mask function which cache reported it, before the first layer writes."""

    cache: CachePages


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`, and the attention context of the keys it returns."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # windows are applied by attention; the cache reports absolute columns
    supports_early_init = False

    def __init__(self, pages: CachePages, layer_idx: int) -> None:
        super().__init__()
        self._pages = pages
        self._layer_idx = layer_idx

    @property
    def batch_size(self) -> int:
        return self._pages.num_rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pages are made at the first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = self._pages.update(self._layer_idx, key_states, value_states)
        return tag(key, self) if self._pages.is_read_by_attention else key, value

    def attend(self, call: AttentionCall) -> Tensor:
        return self._pages.attend(self._layer_idx, call)

    def get_seq_length(self) -> int:
        return self._pages.seen.get(self._layer_idx, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = _KVLength(self.get_seq_length() + query_length)
        if self._pages.attends:
            length.cache = self._pages
        return length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """A Transformers cache whose keys and values live in pages.

    Args:
        model: the model that will use the cache, or its config. Another of the same shapes can use it, too: it is exact
            for any, and smoothed for this one.
        block_size: tokens per block.
        kv_cache_dtype: "auto" (the model's dtype), "fp8", "int8", "int4", "k=int8,v=int4", or
            "auto-quality".
        skip_layers: layers that keep the model's dtype.
        kv_scales: smoothing before quantization: "auto" calibrates the model (a config alone has nothing to run, and
            nothing is smoothed), "off", or a file that `hf-paged calibrate` wrote.
        kv_error_budget: relative error of a layer's output over which it is stored finer; "auto" or "off".
        kv_perplexity_budget: of "auto-quality".
        num_blocks: size of the pool, the null block included; None lets it grow.

    Raises:
        OSError: `kv_scales` is a file that is not there.
        ValueError: an option is out of range, or `skip_layers` names a layer that does not exist.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        block_size: int = 32,
        kv_cache_dtype: str = "auto",
        skip_layers: Sequence[int] = (),
        kv_scales: str = "auto",
        kv_error_budget: float | Literal["auto", "off"] = "auto",
        kv_perplexity_budget: float = EngineConfig.kv_perplexity_budget,
        num_blocks: int | None = None,
    ) -> None:
        config = model.config if isinstance(model, PreTrainedModel) else model
        if not isinstance(config, PreTrainedConfig):
            refuse("model", model, "a Transformers model or its config")
        text = config.get_text_config(decoder=True)
        options = EngineConfig(
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            skip_layers=tuple(skip_layers),
            kv_scales=kv_scales,
            kv_error_budget=kv_error_budget,
            kv_perplexity_budget=kv_perplexity_budget,
            num_blocks=num_blocks,
        )
        if max(options.skip_layers, default=0) >= text.num_hidden_layers:
            refuse("skip_layers", options.skip_layers, f"layers 0..{text.num_hidden_layers - 1} of this model")
        # Latent attention (MLA) stores what it expands only later: its attention cannot read pages.
        attends = getattr(text, "kv_lora_rank", None) is None
        scales = None
        if isinstance(model, PreTrainedModel) and attends:
            options, scales = cache_storage(model, options)
        elif options.kv_cache_dtype == AUTO_QUALITY:
            refuse("kv_cache_dtype", AUTO_QUALITY, "a format: there is no model here that could be measured")
        elif options.kv_scales not in ("auto", "off"):
            refuse("kv_scales", options.kv_scales, '"auto" or "off": there is no model here that a file could be of')
        self._attach(CachePages(PageStore(options, scales), attends=attends), text.num_hidden_layers)

    def _attach(self, pages: CachePages, num_layers: int) -> None:
        super().__init__(layers=[PagedLayer(pages, i) for i in range(num_layers)])
        self._pages = pages
        weakref.finalize(self, pages.free).atexit = False

    def __repr__(self) -> str:
        pages = self._pages
        return (
            f"PagedCache({len(self.layers)} layers, {pages.num_rows} rows, {pages.columns} columns, "
            f"{pages.store.config.kv_cache_dtype}, {self.num_bytes} bytes)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        other = PagedCache.__new__(PagedCache)
        other._attach(self._pages.fork(), len(self.layers))
        memo[id(self)] = other
        return other

    def __copy__(self) -> PagedCache:
        return self.__deepcopy__({})

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for pages, shared with the copies of this cache."""
        return self._pages.store.num_bytes

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Say that at most `num_rows` rows of `num_tokens` tokens will be stored, so that growth does not overshoot.

        Raises:
            ValueError: a pool of a fixed size cannot hold them.
        """
        self._pages.store.reserve(num_rows, num_tokens)

    def share_prompt(self, copies: int, columns: int) -> None:
        """Say that each `copies` consecutive rows have the same first `columns` columns, which are then stored once."""
        self._pages.share_prompt(copies, columns)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._pages.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(self._pages.num_rows)
        self._pages.select(rows[torch.as_tensor(indices).cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pages.select([row for row in range(self._pages.num_rows) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns.

        Raises:
            ValueError: a positive number, whose meaning changed between Transformers releases.
        """
        count = int(tokens_to_remove)
        if count > 0:
            raise ValueError(f"crop({count}): pass a negative number, the columns to remove")
        self._pages.crop(-count)

    def reset(self) -> None:
        """Forget every row; the pages stay allocated."""
        self._pages.free()
