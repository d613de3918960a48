"""A view of a user's model: the same weights, another attention.

`model.config` decides which attention runs, and it is shared by everything that uses the model: other threads,
training, an assistant. So paged generation never touches it. The view is a copy of the module tree whose parameters
and buffers *are* the model's tensors; only the config is its own. Views are kept while the model lives and rebuilt
when the model changed in a way that a shared tensor does not show (moved, resized, adapters added or merged).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.attention import ATTENTION_NAME
from hf_paged.private_transformers import takes_attention

_SIMPLE = (bool, int, float, str, type(None))


def build_view(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` that shares every parameter and buffer and attends through pages.

    Raises:
        ValueError: the model does not use Transformers' attention interface (named).
    """
    if not takes_attention(model):
        raise ValueError(f"{type(model).__name__} does not use Transformers' attention interface and cannot be paged")
    tensors = chain(model.parameters(), model.buffers())
    view = copy.deepcopy(model, {id(x): x for x in chain(tensors, _outside_hooks(model))})
    view.set_attn_implementation(ATTENTION_NAME)
    return view


def _outside_hooks(model: PreTrainedModel) -> Iterator[Any]:
    """Hooks that belong to the user: what they record must reach the user's object, not a copy of it."""
    modules = list(model.modules())
    for module in modules:
        for hook in chain(module._forward_pre_hooks.values(), module._forward_hooks.values()):
            if not any(held is m for held in _held(hook) for m in modules):
                yield hook


def _held(hook: Any) -> Iterator[Any]:
    """What a hook is called on or with: the object of a method, the arguments of a partial."""
    if isinstance(hook, functools.partial):
        yield from chain(hook.args, hook.keywords.values(), _held(hook.func))
    else:
        yield getattr(hook, "__self__", hook)


class ModelFingerprint:
    """What views and engines depend on besides the values inside the model's tensors.

    `identity` changes when a view is stale: modules, the tensors' identities, simple attributes such as PEFT's merge
    and adapter state, the config. `structure` changes also when tensors moved in memory, which joined weights and
    captured graphs do not survive, but a view does, since its tensors are the model's. `versions` changes when weights
    were written in place: both stay right, cached keys and values do not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = tuple(
            (name, id(m), m.training, *_own_calls(m), *_simple_attributes(m)) for name, m in model.named_modules()
        )
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.identity = hash((modules, tuple((name, id(t)) for name, t in tensors), repr(model.config)))
        self.structure = hash((self.identity, tuple((_address(t), t.dtype, t.shape) for _, t in tensors)))
        self.versions = hash(tuple(0 if t.is_inference() else t._version for _, t in tensors))


def _address(tensor: Tensor) -> int:
    return -1 if tensor.is_meta else tensor.data_ptr()


def _own_calls(module: nn.Module) -> Iterator[int]:
    """What runs beside the class's forward: hooks (their handle ids are never reused) and a replaced `forward`."""
    yield from module._forward_pre_hooks
    yield from module._forward_hooks
    yield id(vars(module).get("forward"))


def _simple_attributes(module: nn.Module) -> Iterator[Any]:
    """A module's own scalars, and containers of scalars (PEFT keeps merged_adapters in a list, scaling in a dict)."""
    for key, value in vars(module).items():
        if isinstance(value, _SIMPLE):
            yield key, value
        elif isinstance(value, list | tuple) and all(isinstance(v, _SIMPLE) for v in value):
            yield key, tuple(value)
        elif isinstance(value, dict) and value and all(isinstance(v, _SIMPLE) for v in value.values()):
            yield key, tuple(value.items())


class ViewRegistry:
    """Views of living models; an entry goes with its model."""

    def __init__(self) -> None:
        self._views: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, PreTrainedModel]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, model: PreTrainedModel, fingerprint: ModelFingerprint | None = None) -> PreTrainedModel:
        fingerprint = fingerprint or ModelFingerprint(model)
        entry = self._views.get(model)
        if entry is None or entry[0] != fingerprint.identity:
            entry = (fingerprint.identity, build_view(model))
            self._views[model] = entry
        return entry[1]

    def clear(self) -> None:
        self._views.clear()
