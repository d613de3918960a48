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
from hf_paged.layer_probe import check_supported
from hf_paged.model_view import ViewRegistry
from hf_paged.packed_model import PackedModel

_VIEWS = ViewRegistry()
_VIEWS_LOCK = threading.Lock()
_PROBED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # views that every layer was seen to serve


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
        if view not in _PROBED:
            PackedModel(view)
            _PROBED.add(view)
        # The view generates for nobody by default: self-speculation calls `view.generate` for its drafts.
        view.generation_config = copy.copy(model.generation_config)
        view.generation_config.cache_implementation = None
    return view


def forget_models() -> None:
    """Drop every view and engine, as if no paged call had been made."""
    _VIEWS.clear()
    engines = sys.modules.get("hf_paged.engine_registry")
    if engines is not None:
        engines.ENGINES.clear()
