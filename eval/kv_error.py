"""Where a KV format errs: keys, values, scores and output of every layer and head.

A text runs through the model once over pages in the model's own dtype. Every layer also writes its keys and values to
the pages of the format, with that engine's calibration, attends over them with the same queries, and reads them back.
So each layer's error is its own, not what earlier layers passed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.attention import AttentionCall
from hf_paged.config import EngineConfig
from hf_paged.engine import Engine
from hf_paged.eval.texts import check_windows, context_of
from hf_paged.kernels.layout import AttentionMetadata, LayerKV
from hf_paged.kernels.reference import gather_pages
from hf_paged.kv_cache import KVCache, layer_formats
from hf_paged.model_inputs import one_prompt
from hf_paged.model_runner import StepContext


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """One layer. `key` and `value` have one entry per KV head, `score` and `output` one per query head.

    key: RMS error over the RMS of the keys' deviation from their mean over the text (what they share, the softmax
        cancels).
    value: RMS error over RMS.
    score: RMS error of the scaled logits that a query's visible keys get, less their mean error (which cancels too).
    output: RMS error of attention's output over its RMS.
    """

    layer_idx: int
    bytes_per_token: int
    key: list[float]
    value: list[float]
    score: list[float]
    output: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_kv_error(
    model: PreTrainedModel, token_ids: Sequence[int], *, kv_cache_dtype: str, **engine_options: Any
) -> list[LayerError]:
    """Errors of every layer over one stretch of text, by layer.

    Args:
        token_ids: the text, at least 2 tokens, within the model's context.
        engine_options: fields of `EngineConfig`.

    Raises:
        ValueError: a text that the context does not hold, or an option that is not allowed.
    """
    check_windows(len(token_ids), None, None, context_of(model.config))
    config = EngineConfig.parse(
        {"kv_cache_dtype": kv_cache_dtype, "max_model_len": len(token_ids) + 1, "fuse": False, **engine_options}
    )
    num_blocks = math.ceil(len(token_ids) / config.block_size)
    engine = Engine(model, config, pool_tokens=num_blocks * config.block_size)
    stored = engine.kv_cache
    exact = KVCache(
        stored.specs, layer_formats(stored.specs, "auto"), num_blocks=stored.num_blocks, block_size=stored.block_size
    )
    ids = torch.tensor(token_ids, device=engine.device)
    positions = torch.arange(len(ids), device=engine.device)
    metadata = tuple(
        one_prompt(1 + group * num_blocks, num_blocks, config.block_size, positions)
        for group in range(len(stored.groups))
    )
    probe = _Probe(exact, stored, metadata)
    engine.runner.model(ids, positions, probe, positions[-1:])
    return [probe.errors[i] for i in sorted(probe.errors)]


class _Probe(StepContext):
    """Attention over exact pages that also measures each layer over pages of the format."""

    def __init__(self, exact: KVCache, stored: KVCache, metadata: tuple[AttentionMetadata, ...]) -> None:
        super().__init__(exact, metadata)
        self._exact = exact
        self._stored = stored
        self._over_stored = StepContext(stored, metadata)
        self.errors: dict[int, LayerError] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        out = super().attend(call)
        out_of_codes = self._over_stored.attend(call)
        table = self._metadata[self._exact.group_of[call.layer_idx]].block_tables
        length = call.key.shape[2]
        (k, v), (k_back, v_back) = (
            _read_back(cache.layers[call.layer_idx], table, length) for cache in (self._exact, self._stored)
        )
        spread = k - k.mean(1, keepdim=True)
        self.errors[call.layer_idx] = LayerError(
            layer_idx=call.layer_idx,
            bytes_per_token=_layer_bytes(self._stored, call.layer_idx),
            key=_ratio(k_back - k, spread),
            value=_ratio(v_back - v, v),
            score=_score_errors(call, k_back - k),
            output=_ratio(*(x[0].transpose(0, 1).float() for x in (out_of_codes - out, out))),
        )
        return out


def _read_back(layer: LayerKV, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[kv_heads, length, head_dim]` fp32 that the pages of one sequence stand for."""
    k, v = (gather_pages(pages, table, torch.float32)[0, :, :length] for pages in (layer.k, layer.v))
    if layer.transform is not None:
        k = layer.transform.key(k.transpose(0, 1)).transpose(0, 1)
        v = layer.transform.value(v.transpose(0, 1)).transpose(0, 1)
    return k, v


def _ratio(error: Tensor, signal: Tensor) -> list[float]:
    """RMS of the one over RMS of the other, by head; both `[heads, length, head_dim]`."""
    found: list[float] = (error.norm(dim=(1, 2)) / signal.norm(dim=(1, 2))).tolist()
    return found


def _score_errors(call: AttentionCall, error: Tensor) -> list[float]:
    """RMS of `scale * q . error` over each query's visible keys, less its mean over them, by query head.

    One KV head at a time, so at most the scores of one group are held. `error` is `[kv_heads, length, head_dim]`.
    """
    query = call.query[0].float().unflatten(0, (len(error), -1))  # [kv_heads, group, length, head_dim]
    length = error.shape[1]
    position = torch.arange(length, device=error.device)
    seen = position <= position[:, None]
    if call.window is not None:
        seen &= position > position[:, None] - call.window
    count = seen.sum(-1)
    found: list[float] = []
    for q, e in zip(query, error, strict=True):
        scores = (call.scale * q @ e.T).masked_fill_(~seen, 0.0)  # [group, length, length]
        mean = scores.sum(-1) / count
        squares = scores.square().sum(-1) - count * mean.square()
        found += (squares.sum(-1) / count.sum()).clamp(min=0).sqrt().tolist()
    return found


def _layer_bytes(cache: KVCache, layer_idx: int) -> int:
    """Bytes per token of one layer's codes and scales."""
    layer = cache.layers[layer_idx]
    tensors = [x for pages in (layer.k, layer.v) for x in vars(pages).values()]
    return sum(x[0].numel() * x.itemsize for x in tensors) // cache.block_size
