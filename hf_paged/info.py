"""What a model costs here, before any weight is loaded: its attention layers, KV bytes per token, tokens that fit.

The model is built on the meta device and probed by one forward, so the answer comes from what its layers pass to
attention and not from reading config fields by family. A checkpoint's bytes are those of its files. Only the fusion
pass and the protection of layers need weights, since they look at values; they are run where there is a GPU, or when
asked. Protection can also be read from a file of `hf-paged calibrate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_paged.config import KV_FORMATS, EngineConfig
from hf_paged.engine import resolve_max_model_len
from hf_paged.fused_linear import REORDER_SHARE
from hf_paged.fusion import FusionReport, fuse, not_fused
from hf_paged.kernels.cpu_linear import reorders
from hf_paged.kernels.packed_weight import field_bits
from hf_paged.kv_cache import KVCache, layer_formats
from hf_paged.kv_calibration import FORMATS, calibrate
from hf_paged.kv_protection import plan_layers
from hf_paged.kv_scales import KVScales, load_kv_scales
from hf_paged.layer_probe import LayerSpec
from hf_paged.memory import CPU_SHARE
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel
from hf_paged.quant.header import read_header


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Attention layers that are alike. Head counts, dimensions and the window are in heads, elements and tokens."""

    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, kw_only=True)
class KVCost:
    """One `kv_cache_dtype`: bytes per token in all layers, and the tokens that the memory for KV blocks holds.

    `protection` says which layers are stored finer than that, None: nobody has measured; the bytes count it.
    """

    kv_cache_dtype: str
    bytes_per_token: float
    tokens_that_fit: int
    recent_block_bytes: int  # of one running sequence, under `kv_recent_block`
    protection: str | None


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What `hf-paged info` says. `kv_bytes` is the memory that `LLM` would have for KV blocks on this machine."""

    model: str
    architecture: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    max_model_len: int
    layers: list[LayerKind]
    memory: str
    kv_bytes: int
    kv_cache: list[KVCost]
    refused: dict[str, str]  # formats that this model's layers or this machine rule out, and why
    fusion: FusionReport

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def model_info(
    path: str, *, fusion: bool | None = None, protection: bool | None = None, kv_scales: str | None = None
) -> ModelInfo:
    """Describe the model in the folder (or hub repository) `path`.

    Args:
        fusion: load the weights and run the fusion pass; None = on a GPU, where that takes seconds.
        protection: load the weights and calibrate, as the engine would; None = on a GPU.
        kv_scales: or read what `hf-paged calibrate` wrote.

    Raises:
        OSError: there is no such model, or no such file.
        ValueError: a weight file is damaged, `kv_scales` is of another model, the model is unknown to Transformers or
            cannot be paged; the message says why.
    """
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = checkpoint_bytes(Path(path)) or sum(p.numel() * p.element_size() for p in model.parameters())
    packed = PackedModel(build_view(model))
    specs = packed.specs
    memory, kv_bytes = kv_memory(weight_bytes, linear_bytes=_linear_bytes(model))
    loaded = cache(partial(_loaded, path))  # two questions may need the weights
    scales = None if kv_scales is None else load_kv_scales(kv_scales, packed)
    if scales is None and (protection or (protection is None and torch.cuda.is_available() and kv_bytes)):
        scales = calibrate(PackedModel(build_view(loaded())), FORMATS, FORMATS)
    refused = {name: reason for name in KV_FORMATS if (reason := _refusal(specs, name)) is not None}
    return ModelInfo(
        model=path,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        max_model_len=resolve_max_model_len(EngineConfig(), model),
        layers=layer_kinds(specs),
        memory=memory,
        kv_bytes=kv_bytes,
        kv_cache=[_kv_cost(specs, name, kv_bytes, scales) for name in KV_FORMATS if name not in refused],
        refused=refused,
        fusion=_fusion(loaded, kv_bytes, wanted=fusion),
    )


def layer_kinds(specs: Sequence[LayerSpec]) -> list[LayerKind]:
    """Group like layers, in the order in which each kind first appears."""
    names = [name for name in LayerKind.__dataclass_fields__ if name != "num_layers"]
    counts: dict[tuple[Any, ...], int] = {}
    for spec in specs:
        key = tuple(getattr(spec, name) for name in names)
        counts[key] = counts.get(key, 0) + 1
    return [LayerKind(num_layers=count, **dict(zip(names, key))) for key, count in counts.items()]


def checkpoint_bytes(folder: Path) -> int:
    """Bytes that the weights of `folder` take in memory; 0 for a hub name.

    That is the size of its files, and a third more for 3-bit words, whose codes are held in 4-bit fields (5 to 7 bits
    in 8).

    Raises:
        ValueError: a file is cut off or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    headers = [read_header([str(file)]) for file in files]  # each alone: a folder may hold a model in two forms
    total = sum(file.stat().st_size for file in files)
    config = json.loads((folder / "config.json").read_text()) if files else {}
    bits = (config.get("quantization_config") or {}).get("bits")
    if bits in (3, 5, 6, 7):
        specs = [pair for header in headers for pair in header.specs.items()]
        words = sum(4 * math.prod(spec.shape) for name, spec in specs if name.endswith(".qweight"))
        total += words * (field_bits(bits) - bits) // bits
    return total


def kv_memory(weight_bytes: int, *, linear_bytes: int = 0) -> tuple[str, int]:
    """The memory of this machine in words, and the bytes of it left for KV blocks once the weights are loaded.

    The rule is the engine's (`memory.py`) without its profiling forward, so the GPU figure does not know activations.

    Args:
        linear_bytes: of the weights that a CPU keeps a second time, in the order of its products, if they leave room.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        share = EngineConfig.gpu_memory_utilization
        left = int(total * share) - (total - free) - weight_bytes
        return f"{torch.cuda.get_device_name()}: {share:.0%} of {total / 2**30:.1f} GiB", max(left, 0)
    available = psutil.virtual_memory().available
    left = available - weight_bytes
    if linear_bytes <= left * REORDER_SHARE:
        left -= linear_bytes
    return f"CPU: {CPU_SHARE:.0%} of {available / 2**30:.1f} GiB available", max(int(left * CPU_SHARE), 0)


def _linear_bytes(model: PreTrainedModel) -> int:
    """Bytes of the linears that `ReorderedWeights` copies on this CPU."""
    if getattr(model.config, "quantization_config", None) is not None or not reorders(model.dtype):
        return 0
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear))


def _fusion(loaded: Callable[[], PreTrainedModel], kv_bytes: int, *, wanted: bool | None) -> FusionReport:
    if wanted is False:
        return FusionReport(components=(), off="fusion: not looked at")
    if wanted is None and not torch.cuda.is_available():
        return FusionReport(components=(), off="fusion: not looked at, since it takes the weights; --fusion loads them")
    if kv_bytes == 0:
        return not_fused("the weights do not fit this machine")
    return fuse(build_view(loaded()))


def _loaded(path: str) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map=device)
    return model.eval()


def _refusal(specs: Sequence[LayerSpec], kv_cache_dtype: str) -> str | None:
    """Why these layers cannot be stored so, such as a head_dim that int4 cannot pack; None: they can."""
    try:
        layer_formats(specs, kv_cache_dtype)
    except ValueError as error:
        return str(error)
    return None


def _kv_cost(specs: Sequence[LayerSpec], kv_cache_dtype: str, kv_bytes: int, scales: KVScales | None) -> KVCost:
    block_size = EngineConfig.block_size
    plan = plan_layers(specs, EngineConfig(kv_cache_dtype=kv_cache_dtype), scales)
    cache = KVCache(specs, plan.formats, num_blocks=0, block_size=block_size)
    blocks = max(kv_bytes // cache.block_bytes - 1, 0)  # less the null block
    return KVCost(
        kv_cache_dtype=kv_cache_dtype,
        bytes_per_token=cache.bytes_per_token,
        tokens_that_fit=blocks // len(cache.groups) * block_size,
        recent_block_bytes=cache.recent_bytes,
        protection=None if scales is None else plan.protection,
    )
