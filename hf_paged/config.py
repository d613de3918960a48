"""What the engine may be told: `EngineConfig`, the words for a KV format, and the KV groups of a model.

Every value is checked on construction; an unknown name or an impossible value is a `ValueError` that names the field,
the value and what is allowed. "auto" and `None` are resolved by the engine, which makes a new object with
`dataclasses.replace`. No torch here: the command line reads this file without loading it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

KV_FORMATS = ("auto", "fp8", "int8", "int4")

AUTO_QUALITY = "auto-quality"  # as kv_cache_dtype: the cheapest formats within a measured perplexity budget

_LONGEST = 1 << 24  # rotary angles take positions in fp32, which holds no larger integers

MAX_NUM_SEQS = 65536  # each keeps a row in the block tables and in the sampler

AutoBool = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that share one block table per request: `num_layers` layers with the same attention window.

    `window` counts positions, a query at p sees keys > p - window; None is full attention.
    """

    window: int | None
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.window is not None:
            check_int("window", self.window, minimum=1)
        check_int("num_layers", self.num_layers, minimum=1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError for a value that no engine can run with."""

    block_size: int = 32  # tokens per KV block, a power of two in 16..256
    kv_cache_dtype: str = "auto"  # "auto" (model dtype), "fp8", "int8", "int4", "k=int8,v=int4", or "auto-quality"
    skip_layers: tuple[int, ...] = ()  # layers that keep the model dtype in the cache
    kv_scales: str = "auto"  # smoothing: "auto" (calibrate when the model is loaded), "off", or a file of calibrate
    kv_error_budget: float | Literal["auto", "off"] = "auto"  # relative error of a layer; over it, it is stored finer
    kv_recent_block: bool = False  # each sequence's current block also in the model dtype; its queries read it so
    kv_perplexity_budget: float = 0.005  # of kv_cache_dtype="auto-quality": perplexity may rise by this share
    num_blocks: int | None = None  # blocks on the device, the null block included; None = from the free memory
    gpu_memory_utilization: float = 0.9  # share of the device memory for weights, activations and KV blocks
    max_num_seqs: int = 256  # requests that run at the same time
    max_num_batched_tokens: int = 8192  # tokens computed per step
    max_model_len: int | None = None  # prompt + output tokens of one request; None = from the model
    enable_prefix_caching: bool = True
    swap_space: float = 0.0  # GiB of pinned CPU memory for preempted requests; 0 = recompute them
    cuda_graphs: AutoBool = "auto"  # False: no step is captured, on a CPU neither
    async_scheduling: AutoBool = "auto"
    fuse: AutoBool = "auto"  # fewer, larger operations where that is provably the same model; "auto" = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, minimum=16, maximum=256)
        if self.block_size & (self.block_size - 1):
            refuse("block_size", self.block_size, "16, 32, 64, 128 or 256")
        if self.kv_cache_dtype != AUTO_QUALITY:
            parse_kv_cache_dtype(self.kv_cache_dtype)
        check_float("kv_perplexity_budget", self.kv_perplexity_budget, minimum=0.0)
        check_bool("kv_recent_block", self.kv_recent_block)
        _check_smoothing(self.kv_scales, self.kv_error_budget, self.kv_cache_dtype)
        object.__setattr__(self, "skip_layers", _layer_indices(self.skip_layers))
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, minimum=2)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, minimum=0.0, maximum=1.0)
        if self.gpu_memory_utilization == 0:
            refuse("gpu_memory_utilization", self.gpu_memory_utilization, "a number above 0, at most 1")
        check_int("max_num_seqs", self.max_num_seqs, minimum=1, maximum=MAX_NUM_SEQS)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, minimum=2, maximum=_LONGEST)
        if self.kv_recent_block:
            _check_recent_block(self)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_float("swap_space", self.swap_space, minimum=0.0)
        for name in ("cuda_graphs", "async_scheduling", "fuse"):
            value = getattr(self, name)
            if not isinstance(value, bool) and value != "auto":
                refuse(name, value, 'True, False or "auto"')
        check_int("seed", self.seed, minimum=0, maximum=2**63 - 1)

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> EngineConfig:
        """The config of keyword arguments, a `cache_config` or a command line. Raises ValueError, also for a name."""
        allowed = [field.name for field in fields(cls)]
        unknown = [str(name) for name in mapping if name not in allowed]
        if unknown:
            raise ValueError(f"unknown engine option {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return cls(**mapping)


def parse_kv_cache_dtype(text: str) -> tuple[str, str]:
    """The formats of K and of V: "int8" -> ("int8", "int8"), "v=auto,k=int8" -> ("int8", "auto"). Raises ValueError."""
    allowed = f'{", ".join(KV_FORMATS)}, {AUTO_QUALITY}, or a pair such as "k=int8,v=int4"'
    if not isinstance(text, str):
        refuse("kv_cache_dtype", text, allowed)
    if text in KV_FORMATS:
        return text, text
    sides: dict[str, str] = {}
    for part in text.split(",") if "=" in text else ():
        side, _, value = (word.strip() for word in part.partition("="))
        if side in ("k", "v") and side not in sides and value in KV_FORMATS:
            sides[side] = value
        else:
            refuse("kv_cache_dtype", text, allowed)
    if len(sides) != 2:
        refuse("kv_cache_dtype", text, allowed)
    return sides["k"], sides["v"]


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the ValueError that names the field, its value and what is allowed."""
    raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def check_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """A bool is not an int: `max_tokens=True` is a mistake, not 1."""
    allowed = f"an integer >= {minimum}" if maximum is None else f"an integer in {minimum}..{maximum}"
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        refuse(name, value, allowed)
    if maximum is not None and value > maximum:
        refuse(name, value, allowed)


def check_float(name: str, value: object, *, minimum: float, maximum: float = math.inf) -> None:
    """An int will do for a float; NaN and infinities are refused."""
    allowed = f"a finite number >= {minimum:g}" if maximum == math.inf else f"a number in {minimum:g}..{maximum:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(name, value, allowed)
    if not minimum <= value <= maximum or value == math.inf:
        refuse(name, value, allowed)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")


def _check_smoothing(kv_scales: object, budget: object, kv_cache_dtype: str) -> None:
    if not isinstance(kv_scales, str | os.PathLike) or kv_scales == "":
        refuse("kv_scales", kv_scales, '"auto", "off", or a file that hf-paged calibrate wrote')
    if budget not in ("auto", "off"):
        if isinstance(budget, str):
            refuse("kv_error_budget", budget, 'a number >= 0, "auto" or "off"')
        check_float("kv_error_budget", budget, minimum=0.0)
    if kv_scales == "off" and (budget not in ("auto", "off") or kv_cache_dtype == AUTO_QUALITY):
        raise ValueError('kv_scales="off" measures nothing: kv_error_budget and kv_cache_dtype="auto-quality" need it')


def _check_recent_block(config: EngineConfig) -> None:
    if config.kv_cache_dtype in ("auto", AUTO_QUALITY):
        why = "nothing is quantized" if config.kv_cache_dtype == "auto" else "its mixes are measured without"
        raise ValueError(
            f"kv_recent_block=True with kv_cache_dtype={config.kv_cache_dtype!r} is not allowed, {why}; allowed: "
            f"{', '.join(KV_FORMATS[1:])}, or a pair"
        )
    if config.max_num_batched_tokens < config.block_size:
        raise ValueError(
            f"kv_recent_block=True computes prompts in whole blocks: max_num_batched_tokens="
            f"{config.max_num_batched_tokens} is not allowed; allowed: an integer >= block_size={config.block_size}"
        )


def _layer_indices(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse("skip_layers", value, "a sequence of layer indices")
    layers = tuple(value)
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers):
        refuse("skip_layers", value, "a sequence of layer indices, integers >= 0")
    return layers
