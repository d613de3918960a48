"""Register with Transformers, and undo it: the attention, its mask, the `generate` hook and the quantizers.

Only calls that ask for pages change behaviour. Everything is reversible, and doing it twice is doing it once: the hook
carries the function that it replaced, so a second import of the package (a reload, a fork) finds and replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin

from hf_paged.attention import ATTENTION_NAME, paged_attention_forward, paged_attention_mask
from hf_paged.generation import wrap_generate
from hf_paged.private_transformers import forget_attention
from hf_paged.quant import registry
from hf_paged.served_models import forget_models

_REPLACED = "__hf_paged_original__"


def register(*, hook: bool = True) -> None:
    """Make Transformers know pages. Called by `import hf_paged`; idempotent.

    Args:
        hook: also let `generate(cache_implementation="paged")` and quantized checkpoints come to us. Without it, use
            `custom_generate=hf_paged.generate`.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, paged_attention_mask)
    if not hook:
        return
    current = GenerationMixin.generate
    if _is_hook(current) or _REPLACED not in current.__dict__:  # else somebody wrapped our hook: it is in place
        original = current.__dict__.get(_REPLACED, current)
        hooked = wrap_generate(original)
        setattr(hooked, _REPLACED, original)
        _set_generate(hooked)
    registry.register()


def unregister() -> None:
    """Leave Transformers as it was before `register()`.

    Raises:
        RuntimeError: somebody else replaced `GenerationMixin.generate` after us; undo that first.
    """
    current = GenerationMixin.generate
    if _REPLACED in current.__dict__:
        if not _is_hook(current):
            raise RuntimeError("GenerationMixin.generate was wrapped after hf_paged was registered; undo that first")
        _set_generate(current.__dict__[_REPLACED])
    forget_attention(ATTENTION_NAME)
    forget_models()
    registry.unregister()


def _set_generate(function: Callable[..., Any]) -> None:
    mixin: Any = GenerationMixin
    mixin.generate = function


def _is_hook(function: Callable[..., Any]) -> bool:
    """Whether this is our hook itself, not a wrapper around it that inherited our mark."""
    marks = function.__dict__
    return _REPLACED in marks and marks.get("__wrapped__") is marks[_REPLACED]
