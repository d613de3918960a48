"""`generate()` through Transformers' own decoding loops over a `PagedCache`.

Beam search, assisted and prompt-lookup decoding, returned hidden states and caches: whatever the engine cannot express
runs here, with every feature of the loop, one padded step at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_paged.config import EngineConfig
from hf_paged.packed_model import CACHE_KEYWORD
from hf_paged.paged_cache import PagedCache
from hf_paged.private_transformers import check_mode

Loop = Callable[..., Any]  # GenerationMixin._sample and its like, unbound


@dataclass(frozen=True, kw_only=True)
class ModeArguments:
    """Arguments of a decoding loop that Transformers drops when `custom_generate` is a callable."""

    streamer: Any = None
    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    synced_gpus: bool | None = None

    def given(self) -> dict[str, Any]:
        names = ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer", "synced_gpus")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def loop_of(model: PreTrainedModel, generation_config: GenerationConfig, arguments: ModeArguments) -> Loop:
    """The decoding loop that dense `generate` would run.

    Raises:
        ValueError: Transformers itself has no loop for this mode (contrastive search, group beams), or refuses the
            combination of arguments.
    """
    mode = generation_config.get_generation_mode(arguments.assistant_model)
    name = GENERATION_MODES_MAPPING[mode]
    loop: Loop | None = getattr(type(model), name, None)
    if loop is None:
        raise ValueError(f'cache_implementation="paged" cannot run {mode.value}: Transformers moved it to {name}')
    check_mode(model, mode, generation_config, arguments.given())
    return loop


def generate_with_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    loop: Loop,
    arguments: ModeArguments,
    cache_config: EngineConfig | None,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None,
    **prepared: Any,
) -> Any:
    """Run a decoding loop with what Transformers prepared for it.

    A cache that the user passed, or that is part of the result, keeps its blocks; any other gives them back.

    Args:
        cache_config: options of the `PagedCache` to bring; None runs with whatever cache there is, or none.

    Raises:
        ValueError: `cache_config.num_blocks` cannot hold the call.
    """
    extra = {**arguments.given(), "inputs_tensor": inputs_tensor}
    accepted = inspect.signature(loop).parameters
    known = {name: value for name, value in extra.items() if name in accepted and value is not None}
    cache = None
    if cache_config is not None and not isinstance(prepared.get(CACHE_KEYWORD), PagedCache):
        prompt = prepared.get("inputs_embeds")
        rows, columns = (input_ids if prompt is None else prompt).shape[:2]
        tokens = int(generation_config.max_length) + (columns if columns != input_ids.shape[1] else 0)
        prepared[CACHE_KEYWORD] = cache = _new_cache(model, cache_config, rows, tokens)
        cache.share_prompt(max(generation_config.num_beams, generation_config.num_return_sequences), columns)
    is_returned = False
    try:
        result = loop(model, input_ids, generation_config=generation_config, **known, **prepared)
        is_returned = bool(generation_config.return_dict_in_generate)
        return result
    finally:
        if cache is not None and not is_returned:
            cache.reset()


def _new_cache(model: PreTrainedModel, config: EngineConfig, rows: int, tokens: int) -> PagedCache:
    """A cache for `rows` rows (expanded for beams or returned sequences) of up to `tokens` tokens."""
    cache = PagedCache(
        model,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        skip_layers=config.skip_layers,
        kv_scales=config.kv_scales,
        kv_error_budget=config.kv_error_budget,
        kv_perplexity_budget=config.kv_perplexity_budget,
        num_blocks=config.num_blocks,
    )
    cache.reserve(rows, tokens)
    return cache
