"""What every figure of a KV cache states about the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_paged.engine import Engine


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """The cache that figures belong to: format, smoothing and what protection made of them."""

    kv_cache_dtype: str
    kv_scales: str  # "auto", "off" or a file
    bytes_per_token: float  # all layers, as they are stored
    protected_layers: int  # stored finer than asked
    kv_recent_block: bool = False  # current blocks also in the model's dtype

    @property
    def name(self) -> str:
        """The format; "naive" is a quantized one without smoothing and protection."""
        naive = " naive" if self.kv_cache_dtype != "auto" and self.kv_scales == "off" else ""
        return f"{self.kv_cache_dtype}{naive}{' + recent block' if self.kv_recent_block else ''}"


def facts_of(engine: Engine, kv_cache_dtype: str) -> dict[str, Any]:
    """The fields of `CacheFigures`; the format is the one asked for, which the engine may have resolved."""
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "kv_scales": str(engine.config.kv_scales),
        "bytes_per_token": engine.kv_cache.bytes_per_token,
        "protected_layers": len(engine.kv_plan.protected),
        "kv_recent_block": engine.config.kv_recent_block,
    }
