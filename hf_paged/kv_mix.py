"""`kv_cache_dtype="auto-quality"`: the cheapest mix of formats within a perplexity budget, found by measurement.

Mixes lie on one path: int4, int4 under ever smaller error budgets (`kv_protection.py`: the layers that err most are
stored in 8 bits, then in the model's dtype), int8, the model's dtype. Each is tried, cheapest first, by reading the
calibration's tokens through pages stored so; the first within the budget is taken. What is compared is the divergence
of its next-token distributions from those over pages in the model's dtype: by so much the perplexity rises on text that
the model itself would write, and hundreds of tokens tell, where a change of log-probabilities would take a book.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_paged.attention import ATTENTION_NAME
from hf_paged.config import AUTO_QUALITY, EngineConfig, parse_kv_cache_dtype
from hf_paged.kv_cache import KVCache, LayerFormat
from hf_paged.kv_calibration import CALIBRATIONS, FORMATS, OWN_TOKENS, calibrate, calibration_tokens, progress
from hf_paged.kv_protection import plan_layers, scales_of
from hf_paged.kv_scales import KVMix, KVScales, load_kv_scales, save_kv_scales
from hf_paged.memory import check_size
from hf_paged.model_inputs import one_prompt
from hf_paged.model_runner import StepContext
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel

logger = logging.getLogger(__name__)

CALIBRATION_TOKENS = 2048  # of a text, at most
_BLOCK_SIZE = 32
_STEPS: tuple[tuple[str, float | None], ...] = (
    ("int4", None), ("int4", 0.1), ("int4", 0.085), ("int4", 0.07), ("int4", 0.055), ("int4", 0.04), ("int4", 0.025),
    ("int8", None), ("int8", 0.01),
)  # fmt: skip


def resolve_quality(model: PreTrainedModel, packed: PackedModel, config: EngineConfig) -> EngineConfig:
    """`config` with "auto-quality" replaced by formats and an error budget; any other comes back as it is.

    What was found is kept with the model's scales, or comes from the file of `config.kv_scales`.

    Args:
        packed: a view of `model` that is not fused.

    Raises:
        OSError, ValueError: as `load_kv_scales`.
    """
    if config.kv_cache_dtype != AUTO_QUALITY:
        return config
    if config.kv_scales == "auto":
        scales = CALIBRATIONS.get(model, packed, FORMATS, FORMATS)
    else:
        scales = load_kv_scales(config.kv_scales, packed)
    mix = scales.mix
    if mix is None or mix.perplexity_budget != config.kv_perplexity_budget or mix.skip_layers != config.skip_layers:
        mix = find_mix(packed, scales, calibration_tokens(packed), config)
        if config.kv_scales == "auto":
            CALIBRATIONS.keep_mix(model, mix)
    logger.info("%s: kv_cache_dtype=%s is %s", type(model).__name__, AUTO_QUALITY, mix)
    budget: float | Literal["off"] = "off" if mix.error_budget is None else mix.error_budget
    return replace(config, kv_cache_dtype=mix.kv_cache_dtype, kv_error_budget=budget)


def cache_storage(model: PreTrainedModel, config: EngineConfig) -> tuple[EngineConfig, KVScales | None]:
    """`config` with "auto-quality" resolved, and the model's scales, for a cache that any attention may read.

    `kv_scales="auto"` does without scales where pages cannot run the model themselves; that is logged.

    Raises:
        OSError, ValueError: as `load_kv_scales`; "auto-quality" where pages cannot run the model; more blocks than the
            device has memory for.
    """
    quality = config.kv_cache_dtype == AUTO_QUALITY
    own_scales = config.kv_scales in ("auto", "off")
    plain = not quality and own_scales and parse_kv_cache_dtype(config.kv_cache_dtype) == ("auto", "auto")
    if plain and config.num_blocks is None:
        return config, None
    try:
        is_view = model.config._attn_implementation == ATTENTION_NAME
        packed = PackedModel(model if is_view else build_view(model))
    except ValueError as error:
        if quality or not own_scales:
            raise
        logger.info("the KV cache of %s is not smoothed: %s", type(model).__name__, error)
        return config, None
    config = resolve_quality(model, packed, config)
    scales = scales_of(model, packed, config)
    if config.num_blocks is not None:
        formats = plan_layers(packed.specs, config, scales).formats
        empty = (KVCache([spec], formats, num_blocks=0, block_size=config.block_size) for spec in packed.specs)
        num_bytes = config.num_blocks * sum(layer.block_bytes for layer in empty)
        check_size(f"{config.num_blocks} KV blocks", num_bytes, packed.device)
    return config, scales


def calibrate_on(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Calibrate a loaded model on a text of yours instead of tokens of its own, for all caches made of it from now on.

    Weights that are written later are calibrated anew, on tokens of the model's own.

    Args:
        token_ids: of the text, one list, two at least; read as far as the model has positions.

    Raises:
        ValueError: fewer than two tokens, not one list of ids of the model, or a model that cannot be paged.
    """
    packed = PackedModel(build_view(model))
    tokens = calibration_tokens(packed, token_ids)
    scales = calibrate(packed, FORMATS, FORMATS, token_ids=tokens, source=f"{len(tokens)} tokens of text")
    CALIBRATIONS.keep_text(model, tokens, scales)


def calibrated_file(
    path: str,
    output: str | os.PathLike[str],
    *,
    text: str | None = None,
    max_tokens: int = CALIBRATION_TOKENS,
    perplexity_budget: float = EngineConfig.kv_perplexity_budget,
    dtype: str = "auto",
    device: str | None = None,
) -> KVScales:
    """Calibrate the model in folder (or hub repository) `path` in every format and write `output`.

    Args:
        text: to run the model on, its first `max_tokens` tokens; None: tokens of the model's own.
        perplexity_budget: what the mix for "auto-quality" may cost, relative.
        dtype, device: as of `LLM`.

    Raises:
        OSError: there is no such model, or no folder for `output`.
        ValueError: the model cannot be paged, or the text has fewer than two tokens.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise OSError(f"there is no folder {folder} for the calibration")
    config = EngineConfig(kv_perplexity_budget=perplexity_budget)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    packed = PackedModel(build_view(AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device).eval()))
    ids = None
    if text is not None:
        ids = AutoTokenizer.from_pretrained(path)(text, verbose=False).input_ids[:max_tokens]
    tokens = calibration_tokens(packed, ids)
    source = OWN_TOKENS if ids is None else "text"
    scales = calibrate(packed, FORMATS, FORMATS, token_ids=tokens, source=f"{len(tokens)} tokens of {source}")
    mix = find_mix(packed, scales, tokens, config)
    scales = replace(scales, mix=mix)
    save_kv_scales(scales, output)
    return scales


@torch.no_grad()
def find_mix(packed: PackedModel, scales: KVScales, token_ids: Tensor, config: EngineConfig) -> KVMix:
    """The first step of the path whose perplexity over `token_ids` `[T]` rises by no more than the budget.

    Args:
        config: `skip_layers` and `kv_perplexity_budget` are read.
    """
    plain = plan_layers(packed.specs, replace(config, kv_cache_dtype="auto"), None).formats
    truth = paged_log_probs(packed, plain, token_ids)
    last = KVMix(
        kv_cache_dtype="auto",
        error_budget=None,
        skip_layers=config.skip_layers,
        perplexity_budget=config.kv_perplexity_budget,
        perplexity_change=0.0,
        bytes_per_token=_bytes_per_token(packed, plain),
    )
    for name, error_budget in progress(_STEPS, "auto-quality: mixes"):
        budget: float | Literal["off"] = "off" if error_budget is None else error_budget
        step = replace(config, kv_cache_dtype=name, kv_error_budget=budget)
        try:
            formats = plan_layers(packed.specs, step, scales).formats
        except ValueError:  # a head_dim that int4 cannot pack
            continue
        found = paged_log_probs(packed, formats, token_ids)
        change = math.expm1(float((truth.exp() * (truth - found)).sum(-1).mean()))
        logger.info("%s, error budget %s: perplexity %+.3f%%", name, budget, 100 * change)
        if change <= config.kv_perplexity_budget:
            size = _bytes_per_token(packed, formats)
            return replace(
                last, kv_cache_dtype=name, error_budget=error_budget, perplexity_change=change, bytes_per_token=size
            )
    return last


def paged_log_probs(packed: PackedModel, formats: Mapping[int, LayerFormat], ids: Tensor) -> Tensor:
    """`[T, vocab]` fp32 of a prompt read through pages of `formats`."""
    blocks = -(-len(ids) // _BLOCK_SIZE)
    cache = KVCache(packed.specs, formats, num_blocks=0, block_size=_BLOCK_SIZE)
    cache.grow(1 + blocks * len(cache.groups))
    positions = torch.arange(len(ids), device=ids.device)
    metadata = tuple(one_prompt(1 + g * blocks, blocks, _BLOCK_SIZE, positions) for g in range(len(cache.groups)))
    return packed(ids, positions, StepContext(cache, metadata)).float().log_softmax(-1)


def _bytes_per_token(packed: PackedModel, formats: Mapping[int, LayerFormat]) -> float:
    return KVCache(packed.specs, formats, num_blocks=0, block_size=_BLOCK_SIZE).bytes_per_token
