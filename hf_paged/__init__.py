"""Paged and quantized KV cache, AWQ/GPTQ checkpoints and continuous batching inside Hugging Face Transformers.

Importing the package registers it with Transformers; `unregister()` undoes that. Heavy names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_paged.registration import register, unregister

if TYPE_CHECKING:
    from hf_paged.config import EngineConfig
    from hf_paged.engine_registry import release
    from hf_paged.generation import generate
    from hf_paged.kv_mix import calibrate_on
    from hf_paged.llm import LLM
    from hf_paged.outputs import CompletionOutput, RequestOutput
    from hf_paged.paged_cache import PagedCache
    from hf_paged.quant.quantize import quantize
    from hf_paged.quant.quantize_config import QuantizeConfig
    from hf_paged.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "PagedCache",
    "QuantizeConfig",
    "RequestOutput",
    "SamplingParams",
    "calibrate_on",
    "generate",
    "quantize",
    "register",
    "release",
    "unregister",
]

_HOME = {
    "LLM": "hf_paged.llm",
    "CompletionOutput": "hf_paged.outputs",
    "EngineConfig": "hf_paged.config",
    "PagedCache": "hf_paged.paged_cache",
    "QuantizeConfig": "hf_paged.quant.quantize_config",
    "RequestOutput": "hf_paged.outputs",
    "SamplingParams": "hf_paged.sampling_params",
    "calibrate_on": "hf_paged.kv_mix",
    "generate": "hf_paged.generation",
    "quantize": "hf_paged.quant.quantize",
    "release": "hf_paged.engine_registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register()
