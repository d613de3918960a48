"""`model.generate(..., cache_implementation="paged")`: what a call asks for, and who runs it.

Transformers prepares everything (inputs, processors, criteria, expansion) and hands over through its public
`custom_generate=<callable>`. Two drivers, one store: the engine for greedy and sampled decoding, and Transformers' own
loops over a `PagedCache` for all that the engine cannot express. Both run on a *view* of the model, so the model, its
config and every other call on it are untouched. What cannot be done raises before any work.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_paged.config import EngineConfig
from hf_paged.loop_generation import ModeArguments, loop_of, new_cache, run_loop
from hf_paged.paged_cache import PagedCache
from hf_paged.served_models import paged_view, takes_keywords

logger = logging.getLogger(__name__)

CACHE_NAME = "paged"
_STORE_OPTIONS = ("block_size", "kv_cache_dtype", "skip_layers", "num_blocks")
_ENGINE_OPTIONS = (
    "enable_prefix_caching",
    "swap_space",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cuda_graphs",
    "async_scheduling",
    "fuse",
)
CACHE_OPTIONS = _STORE_OPTIONS + _ENGINE_OPTIONS

# What the engine understands of the keywords that Transformers prepares for a forward.
_ENGINE_KEYWORDS = frozenset({"attention_mask", "position_ids", "logits_to_keep", "past_key_values", "use_cache"})


# ---- the hook on GenerationMixin.generate ----------------------------------------------------------------------------


def wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GenerationMixin.generate` that serves paged calls and passes every other call on as it came."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        call = dict(signature.bind_partial(self, *args).arguments, **kwargs)
        if not _asks_for_pages(self, call):
            return original(self, *args, **kwargs)
        del call["self"]
        return _generate_paged(self, original, call)

    return generate


def _asks_for_pages(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    paged = isinstance(call.get("past_key_values"), PagedCache) or call.get("custom_generate") is generate
    return paged or _effective(model, call, "cache_implementation") == CACHE_NAME


def _effective(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """The value `generate` will use: keyword, then `generation_config`, then `model.generation_config`."""
    if name in call:
        return call[name]
    given = getattr(call.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given


def _withdraw(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """Take an option out of a call, wherever it comes from, without touching what belongs to the user."""
    value = _effective(model, call, name)
    call.pop(name, None)
    config = call.get("generation_config")
    if getattr(config, name, None) is not None:
        call["generation_config"] = config = copy.copy(config)
        setattr(config, name, None)
    if getattr(model.generation_config, name, None) is not None:
        call[name] = None
    return value


def _generate_paged(model: PreTrainedModel, original: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Check the call, keep what Transformers would drop, and let it prepare the rest."""
    cache = call.get("past_key_values")
    if call.get("custom_generate") not in (None, generate):
        raise ValueError('custom_generate and cache_implementation="paged" exclude each other')
    if cache is not None and not isinstance(cache, PagedCache):
        raise ValueError(
            f'past_key_values is a {type(cache).__name__}; with cache_implementation="paged" it must be a PagedCache'
        )
    if _effective(model, call, "token_healing"):
        raise ValueError("token_healing is not available in paged generation; call model.heal_tokens() on the inputs")
    _withdraw(model, call, "cache_implementation")
    options = _withdraw(model, call, "cache_config")
    if cache is not None and options:
        raise ValueError("cache_config was given with a PagedCache, which has its options already")
    config = engine_config(options)
    view = paged_view(model)
    stop_strings = _withdraw(model, call, "stop_strings")
    if stop_strings is not None:
        call["stopping_criteria"] = _with_stop_strings(stop_strings, call)
    arguments = ModeArguments(
        streamer=call.get("streamer"),
        assistant_model=call.get("assistant_model"),
        tokenizer=call.get("tokenizer"),
        assistant_tokenizer=call.get("assistant_tokenizer"),
        synced_gpus=call.get("synced_gpus"),
    )
    call["custom_generate"] = functools.partial(_decode, view=view, cache_config=config, arguments=arguments)
    return original(model, **call)


def _with_stop_strings(stop_strings: Any, call: dict[str, Any]) -> StoppingCriteriaList:
    if call.get("tokenizer") is None:
        raise ValueError("stop_strings need the model's tokenizer: pass tokenizer= to generate()")
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=call["tokenizer"])
    return StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])


def engine_config(options: Any) -> EngineConfig:
    """The `EngineConfig` of a `cache_config`, which is left as it is.

    Raises:
        ValueError: not a mapping, an unknown key, or a value that is out of range.
    """
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(f"cache_config must be a dict, not {type(options).__name__}")
    unknown = sorted(set(options) - set(CACHE_OPTIONS))
    if unknown:
        raise ValueError(f"unknown cache_config keys {unknown}; allowed: {', '.join(CACHE_OPTIONS)}")
    return EngineConfig(**options)


# ---- the callable that Transformers runs -----------------------------------------------------------------------------


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Paged generation without the hook: `model.generate(..., custom_generate=hf_paged.generate)`.

    Options come from `generation_config.cache_config`. Without the hook Transformers keeps `streamer`, `tokenizer` and
    `assistant_model` from every custom function; with it (`hf_paged.register()`) this is the same as
    `cache_implementation="paged"`.
    """
    return _decode(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        inputs_tensor,
        view=paged_view(model),
        cache_config=engine_config(generation_config.cache_config),
        arguments=ModeArguments(),
        **model_kwargs,
    )


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None = None,
    *,
    view: PreTrainedModel,
    cache_config: EngineConfig,
    arguments: ModeArguments,
    **model_kwargs: Any,
) -> Any:
    """Choose the driver of a prepared call and run it."""
    generation_config.cache_implementation = None  # assistants inherit this config and bring caches of their own
    loop = loop_of(model, generation_config, arguments)
    _check_prompts(input_ids, model_kwargs.get("attention_mask"))
    driver, reason = _driver_for(view, generation_config, arguments, model_kwargs)
    logger.info("paged generate: %s (%s)%s", driver, reason, _without_effect(driver, cache_config))
    if driver == "engine":
        from hf_paged.engine_generation import generate_with_engine

        return generate_with_engine(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=arguments.streamer,
            attention_mask=model_kwargs.get("attention_mask"),
            cache_config=cache_config,
        )
    run = functools.partial(
        run_loop,
        loop,
        input_ids=input_ids,
        arguments=arguments,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        inputs_tensor=inputs_tensor,
    )
    if driver == "dense":
        return run(model, **model_kwargs)
    # Attention weights come from the model's own attention; under it a PagedCache reads its pages back.
    runner = model if generation_config.output_attentions else view
    if isinstance(model_kwargs.get("past_key_values"), PagedCache):
        return run(runner, **model_kwargs)
    rows, columns = _prompt_shape(input_ids, model_kwargs)
    cache = new_cache(model, cache_config, generation_config, rows=rows, columns=columns)
    try:
        result = run(runner, **{**model_kwargs, "past_key_values": cache})
    except BaseException:
        cache.reset()
        raise
    if not generation_config.return_dict_in_generate:
        cache.reset()
    return result


def _driver_for(
    view: PreTrainedModel,
    generation_config: GenerationConfig,
    arguments: ModeArguments,
    model_kwargs: Mapping[str, Any],
) -> tuple[str, str]:
    """The one place where the driver is chosen: ("engine" | "loop" | "dense", why)."""
    mode = generation_config.get_generation_mode(arguments.assistant_model)
    cache = model_kwargs.get("past_key_values")
    if not generation_config.use_cache:
        logger.warning('use_cache=False with cache_implementation="paged": there is no cache, paged or other')
        return "dense", "use_cache=False"
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return "loop", mode.value
    if isinstance(cache, PagedCache):
        return "loop", "past_key_values was given"
    if generation_config.return_dict_in_generate:
        return "loop", "return_dict_in_generate returns the cache"
    if generation_config.is_assistant or arguments.synced_gpus:
        return "loop", "assistant" if generation_config.is_assistant else "synced_gpus"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "loop", "attentions or hidden states are returned"
    if not takes_keywords(view):
        return "loop", f"{type(view).__name__} drops the keyword that carries an engine step"
    other = sorted(k for k, v in model_kwargs.items() if v is not None and k not in _ENGINE_KEYWORDS)
    if other:
        return "loop", f"the forward takes {', '.join(other)}"
    return "engine", mode.value


def _without_effect(driver: str, config: EngineConfig) -> str:
    """The note on options that were given and do not matter to a loop."""
    default = EngineConfig()
    given = [name for name in _ENGINE_OPTIONS if getattr(config, name) != getattr(default, name)]
    return f"; {', '.join(given)} only steer the engine" if given and driver != "engine" else ""


def _prompt_shape(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that the prefill stores."""
    embeds = model_kwargs.get("inputs_embeds")
    shape = input_ids.shape if embeds is None else embeds.shape
    return int(shape[0]), int(shape[1])


def _check_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuse rows without a single token: nothing stands behind their first logits."""
    if attention_mask is None or attention_mask.dim() != 2:
        return
    empty = (~attention_mask.bool().any(-1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"attention_mask masks every token of rows {empty}: a prompt needs at least one")
