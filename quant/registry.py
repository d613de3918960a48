"""Making `from_pretrained` load quantized checkpoints through this package, and undoing it.

Transformers' own register functions refuse names that exist, so its two tables are assigned directly, and what has no
table is replaced by an object that remembers the original; all are read at call time. A model that is not yet quantized
still goes to Transformers' own quantizer (GPTQ calibration, FP8 on the fly).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import modeling_utils
from transformers.quantizers import auto

from hf_paged.quant import config as configs
from hf_paged.quant.loader import CheckpointLoader
from hf_paged.quant.sidecar import adopt

_CONFIGS: dict[str, type] = {
    "awq": configs.AwqConfig,
    "gptq": configs.GPTQConfig,
    "auto-round": configs.AutoRoundConfig,
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


class _Supports:
    """In place of Transformers' check of a `quant_method`, which skips an unknown one with a warning: then the packed
    tensors are left unused, and the linears that miss them stay random.
    """

    def __init__(self, original: staticmethod[..., bool]) -> None:
        self.original = original

    def __call__(self, fields: Mapping[str, Any]) -> bool:
        method = fields.get("quant_method")
        if (method is None or isinstance(method, str)) and self.original(fields):
            return True
        known = ", ".join(sorted(_tables()[1]))
        raise ValueError(
            f"quant_method={method!r} is not allowed; allowed: {known}. If the weights are plain, "
            "remove quantization_config from config.json"
        )


class _Adopts:
    """In place of the function that gives a config its quantizer: completes the config first (`sidecar.py`)."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("gguf_file") is None:
            adopt(config)
        return self.original(config, *args, **kwargs)


def register() -> None:
    """Take over the quantized checkpoints named above, and refuse those of unknown methods. Idempotent."""
    quantizers, config_classes = _tables()
    check = vars(auto.AutoHfQuantizer)["supports_quant_method"]
    if not isinstance(check, _Supports):
        auto.AutoHfQuantizer.supports_quant_method = _Supports(check)  # type: ignore[method-assign]  # a static method
    if not isinstance(modeling_utils.get_hf_quantizer, _Adopts):
        modeling_utils.get_hf_quantizer = _Adopts(modeling_utils.get_hf_quantizer)
    for method, config_class in _CONFIGS.items():
        if not isinstance(quantizers[method], _Entry):
            quantizers[method] = _Entry(quantizers[method], config_classes[method])
            config_classes[method] = config_class


def unregister() -> None:
    """Give Transformers its own entries back. Idempotent; models already loaded keep working."""
    quantizers, config_classes = _tables()
    check = vars(auto.AutoHfQuantizer)["supports_quant_method"]
    if isinstance(check, _Supports):
        auto.AutoHfQuantizer.supports_quant_method = check.original  # type: ignore[method-assign]  # as above
    if isinstance(modeling_utils.get_hf_quantizer, _Adopts):
        modeling_utils.get_hf_quantizer = modeling_utils.get_hf_quantizer.original
    for method in _CONFIGS:
        entry = quantizers[method]
        if isinstance(entry, _Entry):
            quantizers[method], config_classes[method] = entry.original, entry.original_config


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    return auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
