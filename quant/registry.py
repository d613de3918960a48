"""Making `from_pretrained` load quantized checkpoints through this package, and undoing it.

Transformers' own register functions refuse names that exist, so its two tables are assigned directly; they are read at
call time. A model that is not yet quantized still goes to Transformers' own quantizer (GPTQ calibration, FP8 on the
fly).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.quantizers import auto

from hf_paged.quant import config as configs
from hf_paged.quant.loader import CheckpointLoader

_CONFIGS: dict[str, type] = {
    "awq": configs.AwqConfig,
    "gptq": configs.GPTQConfig,
    "compressed-tensors": configs.CompressedTensorsConfig,
    "fp8": configs.FineGrainedFP8Config,
}


class _Entry:
    """A row of Transformers' quantizer table that remembers the row it replaced."""

    def __init__(self, original: Callable[..., Any], original_config: type) -> None:
        self.original, self.original_config = original, original_config

    def __call__(self, quantization_config: Any, **kwargs: Any) -> Any:
        ours = isinstance(quantization_config, configs.CheckpointConfig)
        if ours and kwargs.get("pre_quantized", True):
            return CheckpointLoader(quantization_config, **kwargs)
        return self.original(quantization_config, **kwargs)


def register() -> None:
    """Take over the quantized checkpoints named above. Idempotent."""
    quantizers, config_classes = _tables()
    for method, config_class in _CONFIGS.items():
        if not isinstance(quantizers[method], _Entry):
            quantizers[method] = _Entry(quantizers[method], config_classes[method])
            config_classes[method] = config_class


def unregister() -> None:
    """Give Transformers its own entries back. Idempotent; models already loaded keep working."""
    quantizers, config_classes = _tables()
    for method in _CONFIGS:
        entry = quantizers[method]
        if isinstance(entry, _Entry):
            quantizers[method], config_classes[method] = entry.original, entry.original_config


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    return auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
