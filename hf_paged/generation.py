"""`model.generate(..., cache_implementation="paged")`: recognise a call for pages and check it.

Transformers then prepares everything (inputs, processors, criteria, expansion) and hands over through its public
`custom_generate=<callable>`, a `PagedCall`. Every other call passes through untouched. What cannot be done raises
before any work, and nothing that belongs to the user (configs, dictionaries, the model) is changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
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

from hf_paged.loop_generation import ModeArguments
from hf_paged.packed_model import CACHE_NAMES
from hf_paged.paged_cache import PagedCache
from hf_paged.paged_call import PagedCall, engine_config
from hf_paged.served_models import paged_view

CACHE_NAME = "paged"

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
    paged = isinstance(_given_cache(call), PagedCache) or call.get("custom_generate") is generate
    return paged or _effective(model, call, "cache_implementation") == CACHE_NAME


def _given_cache(call: Mapping[str, Any]) -> Any:
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


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
    cache = _given_cache(call)
    if call.get("custom_generate") not in (None, generate):
        raise ValueError('custom_generate and cache_implementation="paged" exclude each other')
    if cache is not None:
        _check_cache(model, cache, call.get("cache_implementation"))
    _check_inputs(call)
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
        streamer=call.pop("streamer", None),  # the prompt is put once the call has been checked
        assistant_model=call.get("assistant_model"),
        tokenizer=call.get("tokenizer"),
        assistant_tokenizer=call.get("assistant_tokenizer"),
        synced_gpus=call.get("synced_gpus"),
    )
    call["custom_generate"] = PagedCall(view=view, cache_config=config, arguments=arguments)
    return original(model, **call)


def _check_cache(model: PreTrainedModel, cache: Any, implementation: str | None) -> None:
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f'the given cache is a {type(cache).__name__}; with cache_implementation="paged" it must be a PagedCache'
        )
    if implementation not in (None, CACHE_NAME):
        raise ValueError(f"cache_implementation={implementation!r} and a PagedCache exclude each other")
    wanted, name = model.config.get_text_config(decoder=True).num_hidden_layers, type(model).__name__
    if len(cache.layers) != wanted:
        raise ValueError(f"the given PagedCache has {len(cache.layers)} layers, {name} has {wanted}")


def _check_inputs(call: Mapping[str, Any]) -> None:
    """Refuse prompts without a column here, since Transformers indexes their last one while it prepares a call."""
    ids = call.get("input_ids", call.get("inputs"))
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] == 0 and call.get("inputs_embeds") is None:
        raise ValueError(f"input_ids of shape {tuple(ids.shape)} hold no token: a prompt needs at least one")


def _with_stop_strings(stop_strings: Any, call: dict[str, Any]) -> StoppingCriteriaList:
    if call.get("tokenizer") is None:
        raise ValueError("stop_strings need the model's tokenizer: pass tokenizer= to generate()")
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=call["tokenizer"])
    return StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])


# ---- without the hook ------------------------------------------------------------------------------------------------


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
    call = PagedCall(
        view=paged_view(model),
        cache_config=engine_config(generation_config.cache_config),
        arguments=ModeArguments(),
    )
    return call(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, **model_kwargs)
