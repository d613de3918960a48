"""The models that `generate()` was called on: their views, kept while the models live.

Pages serve decoder-only models whose layers all attend through Transformers' interface; every other model is refused
here, before any work.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.attention import ATTENTION_NAME
from hf_paged.layer_probe import check_supported, probe_layers
from hf_paged.model_view import ViewRegistry

_VIEWS = ViewRegistry()
_VIEWS_LOCK = threading.Lock()
_TAKES_KEYWORDS: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()  # by view


def paged_view(model: PreTrainedModel) -> PreTrainedModel:
    """The model's view that attends through pages.

    Raises:
        ValueError: pages cannot serve this model; the message names it and why.
    """
    check_supported(model)
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError("hf_paged is not registered; call hf_paged.register() (hook=False leaves generate alone)")
    with _VIEWS_LOCK:
        view = _VIEWS.get(model)
        if view not in _TAKES_KEYWORDS:
            _TAKES_KEYWORDS[view] = _probe_keywords(view)
        # The view generates for nobody by default: self-speculation calls `view.generate` for its drafts.
        view.generation_config = copy.copy(model.generation_config)
        view.generation_config.cache_implementation = None
    return view


def takes_keywords(view: PreTrainedModel) -> bool:
    """Whether a keyword of the forward reaches attention, which the engine needs; a cache's tag serves the loop."""
    return _TAKES_KEYWORDS[view]


def _probe_keywords(view: PreTrainedModel) -> bool:
    try:
        probe_layers(view)
    except ValueError:
        probe_layers(view, through_cache=True)
        return False
    return True


def forget_models() -> None:
    """Drop every view and engine, as if no paged call had been made."""
    _VIEWS.clear()
    engines = sys.modules.get("hf_paged.engine_registry")
    if engines is not None:
        engines.ENGINES.clear()
