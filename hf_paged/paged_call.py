"""A prepared call of paged `generate()`: which driver runs it, and its `cache_config`.

Two drivers, one store: the engine for greedy and sampled decoding, and Transformers' own loops over a `PagedCache` for
all that the engine cannot express. Both run on a *view* of the model, so the model, its config and every other call on
it are untouched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from hf_paged.config import EngineConfig
from hf_paged.loop_generation import ModeArguments, generate_with_loop, loop_of
from hf_paged.packed_model import CACHE_KEYWORD
from hf_paged.paged_cache import PagedCache

logger = logging.getLogger(__name__)

_STORE_OPTIONS = (
    "block_size",
    "kv_cache_dtype",
    "skip_layers",
    "kv_scales",
    "kv_error_budget",
    "kv_perplexity_budget",
    "num_blocks",
)
_ENGINE_OPTIONS = (
    "kv_recent_block",
    "enable_prefix_caching",
    "swap_space",
    "max_num_batched_tokens",
    "cuda_graphs",
    "async_scheduling",
    "fuse",
)
CACHE_OPTIONS = _STORE_OPTIONS + _ENGINE_OPTIONS

# What the engine understands of the keywords that Transformers prepares for a forward.
_ENGINE_KEYWORDS = frozenset({"attention_mask", "position_ids", "logits_to_keep", "use_cache", CACHE_KEYWORD})


def engine_config(options: Any) -> EngineConfig:
    """The `EngineConfig` of a `cache_config`, which is left as it is.

    Raises:
        ValueError: not a mapping, an unknown key, or a value that is out of range.
    """
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(f"cache_config must be a dict, not {type(options).__name__}")
    unknown = [name for name in options if name not in CACHE_OPTIONS]
    if unknown:
        raise ValueError(f"unknown cache_config keys {unknown}; allowed: {', '.join(CACHE_OPTIONS)}")
    return EngineConfig(**options)


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The callable that Transformers runs as `custom_generate` once it has prepared a call."""

    view: PreTrainedModel
    cache_config: EngineConfig
    arguments: ModeArguments

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Choose the driver and run it; returns what dense `generate` returns."""
        generation_config.cache_implementation = None  # assistants inherit this config and bring caches of their own
        loop = loop_of(model, generation_config, self.arguments)
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)  # rows for each prompt
        mask = model_kwargs.get("attention_mask")
        if model_kwargs.get("inputs_embeds") is None:
            embeddings: Any = model.get_input_embeddings()
            _check_prompts(input_ids, mask, embeddings.weight.shape[0], copies)
        driver, reason = driver_for(self.view, generation_config, self.arguments, model_kwargs)
        # Attention weights come from the model's own attention; under it a PagedCache reads its pages back.
        own_attention = driver == "dense" or generation_config.output_attentions
        if mask is not None and not own_attention:
            _check_padding(mask, copies)
        if self.cache_config.kv_recent_block and driver != "engine":
            raise ValueError(
                f"kv_recent_block=True is for calls that the engine runs, and this one runs in a {driver} ({reason}); "
                "allowed: False"
            )
        logger.info("paged generate: %s (%s)", driver, reason)
        if driver != "engine" and (idle := _engine_options(self.cache_config)):
            logger.warning(
                "%s only steers the engine, and this call runs in a %s (%s)", ", ".join(idle), driver, reason
            )
        if self.arguments.streamer is not None:
            self.arguments.streamer.put(input_ids.cpu())
        if driver == "engine":
            from hf_paged.engine_generation import generate_with_engine

            return generate_with_engine(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=self.arguments.streamer,
                attention_mask=mask,
                cache_config=self.cache_config,
            )
        return generate_with_loop(
            model if own_attention else self.view,
            input_ids,
            loop=loop,
            arguments=self.arguments,
            cache_config=None if driver == "dense" else self.cache_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            inputs_tensor=inputs_tensor,
            **model_kwargs,
        )


def driver_for(
    view: PreTrainedModel,
    generation_config: GenerationConfig,
    arguments: ModeArguments,
    model_kwargs: Mapping[str, Any],
) -> tuple[str, str]:
    """The one place where the driver is chosen: ("engine" | "loop" | "dense", why)."""
    mode = generation_config.get_generation_mode(arguments.assistant_model)
    cache = model_kwargs.get(CACHE_KEYWORD)
    if not generation_config.use_cache:
        logger.warning('use_cache=False with cache_implementation="paged": there is no cache, paged or other')
        return "dense", "use_cache=False"
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return "loop", mode.value
    if isinstance(cache, PagedCache):
        return "loop", "a PagedCache was given"
    if generation_config.return_dict_in_generate:
        return "loop", "return_dict_in_generate returns the cache"
    if generation_config.is_assistant or arguments.synced_gpus:
        return "loop", "assistant" if generation_config.is_assistant else "synced_gpus"
    if generation_config.prefill_chunk_size is not None:
        return "loop", "prefill_chunk_size"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "loop", "attentions or hidden states are returned"
    if len({p.device for p in view.parameters() if p.device.type == "cuda"}) > 1:
        return "loop", "the model lies on several GPUs"
    if not _counts_tokens(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")):
        return "loop", "position_ids are not those of the tokens"
    other = sorted(k for k, v in model_kwargs.items() if v is not None and k not in _ENGINE_KEYWORDS)
    if other:
        return "loop", f"the forward takes {', '.join(other)}"
    return "engine", mode.value


def _counts_tokens(position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether the positions are those that the engine gives: 0, 1, ... from the first token that is no padding."""
    if position_ids is None:
        return True
    real = torch.ones_like(position_ids) if attention_mask is None else attention_mask
    if position_ids.shape != real.shape:
        return False
    real = real.bool()
    return torch.equal(position_ids[real], (real.cumsum(-1) - 1)[real])


def _engine_options(config: EngineConfig) -> list[str]:
    """The options that were given and do not matter to a loop."""
    default = EngineConfig()
    return [name for name in _ENGINE_OPTIONS if getattr(config, name) != getattr(default, name)]


def _check_prompts(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, copies: int) -> None:
    """Refuse prompts that no model can answer: no integers, without a token, or with ids that have no embedding.

    Each prompt lies in `copies` consecutive rows; messages count prompts, as the caller does.
    """
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids are {input_ids.dtype}; allowed: token ids in an integer dtype")
    if not len(input_ids):
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)} hold no row; at least one prompt is needed")
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None and attention_mask.shape == input_ids.shape:
        real = attention_mask.bool()
    unknown = ((input_ids < 0) | (input_ids >= vocab_size)) & real
    empty, bad = torch.stack([~real.any(-1), unknown.any(-1)]).tolist()
    if True in empty:
        rows = _rows(empty, copies)
        raise ValueError(f"rows {rows} hold no token (or mask all of them): a prompt needs at least one")
    if True in bad:
        raise ValueError(f"rows {_rows(bad, copies)} hold token ids outside 0..{vocab_size - 1}")


def _check_padding(mask: Tensor, copies: int) -> None:
    """Refuse a 2-D mask of anything but left padding."""
    real = mask.bool()
    holes: list[bool] = (real[..., :-1] & ~real[..., 1:]).any(-1).tolist() if mask.ndim == 2 else []
    if True in holes:
        raise ValueError(
            f"attention_mask masks tokens after real ones in rows {_rows(holes, copies)}; pages hold no padding, only "
            'left padding can be left out: tokenize with padding_side="left"'
        )


def _rows(flags: list[bool], copies: int) -> list[int]:
    return sorted({row // copies for row, flag in enumerate(flags) if flag})
