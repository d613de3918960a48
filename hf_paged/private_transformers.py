"""What Transformers keeps to itself and this package needs: each reached from here alone.

`tests/test_private_transformers.py` holds every one to what is expected of it, so a release that moves one fails there,
by name. Beside these `quant/registry.py` replaces entries of the quantizer tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.hub import cached_file


def pad_token(config: GenerationConfig) -> Tensor | None:
    """The padding of a prepared call, which may be the end token where the user named none."""
    token: Tensor | None = config._pad_token_tensor
    return token


def check_mode(
    model: PreTrainedModel, mode: GenerationMode, config: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Raise Transformers' own ValueError for arguments that a decoding mode refuses."""
    mixin: Any = model
    mixin._validate_generation_mode(mode, config, arguments)


def forget_attention(name: str) -> None:
    """Undo `register` of an attention function and of its mask function, which has no public inverse."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model's code asks the attention interface for its attention."""
    return getattr(model.config, "_attn_implementation", None) is not None and model._can_set_attn_implementation()


def skip_initialization(module: nn.Module) -> None:
    """Keep `from_pretrained` from initialising a module whose weights it did not load itself."""
    module.__dict__["_is_hf_initialized"] = True


def initialize(model: PreTrainedModel, module: nn.Module) -> None:
    """The model's random weights, in place."""
    model._init_weights(module)


def find_file(path: str, name: str) -> str | None:
    """Where the file of a model's folder or hub name lies, None if there is none."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found
