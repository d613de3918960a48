"""Calibration: offsets and factors for a model's keys and values, and each format's error, from one short forward.

The tokens are a text of the user's, or the model's own: short passages that it writes by itself, drawn by a seeded
generator; in stretches they stand all over the context. Prompts are never looked at. Random tokens would not do: what
deep layers attend to in them is far from what they attend to in text, and errors come out up to three times too small.
Whatever the tokens were, smoothing is exact algebra, so a poor choice costs precision and never correctness. Offset and
factor are chosen among a few, the identity with them, by the error that each leaves in the layer's output on these very
tokens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_paged.attention import AttentionCall
from hf_paged.kernels import reference
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import UINT4, num_groups
from hf_paged.kv_scales import KVMix, KVScales, LayerScales, SideScales
from hf_paged.packed_model import CACHE_KEYWORD, PackedModel

NUM_TOKENS = 512  # keys that the offsets are means of
_PASSAGES = 16  # of the model's own, side by side: 32 short steps
_PASSAGE = NUM_TOKENS // _PASSAGES
_QUERY_STEP = 8  # every 8th token's output is compared
_SEED = 0
OWN_TOKENS = f"the model's own, seed {_SEED}"
_V_OFFSET_GAIN = 0.5  # a V offset costs an addition per layer and step: kept where it halves the error at least
_FACTOR_BITS = 8  # factors stay within 2^8 either way: fp16 queries must hold what they are multiplied to
_LOST = 1e3  # a relative error that means: nothing is left
_TINY = 1e-20  # of a channel that is always zero
FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": UINT4}

T = TypeVar("T")


@torch.no_grad()
def calibrate(
    model: PackedModel,
    k_formats: Collection[str],
    v_formats: Collection[str],
    *,
    token_ids: Tensor | None = None,
    source: str = "",
    recent: int = 0,
) -> KVScales:
    """Run `model` over `token_ids` and measure it in the formats given.

    The model must not be fused: fused layers rotate and store their keys in one kernel, out of sight.

    Args:
        k_formats, v_formats: among "fp8", "int8", "int4"; one that a layer's head_dim does not allow is left out there.
        token_ids: `[T]` of `calibration_tokens`; None: tokens of the model's own.
        source: the tokens in words, kept with the result.
        recent: the size of the current block that queries read as it came (`kv_recent_block`); 0: they read codes.
    """
    if token_ids is None:
        token_ids = calibration_tokens(model)
        source = f"{len(token_ids)} tokens of {OWN_TOKENS}"
    if recent:
        source += ", current blocks in the model's dtype"
    last = torch.tensor([len(token_ids) - 1], device=model.device)
    with progress(model.specs, "calibration: layers") as bar:
        watch = _Watch(k_formats, v_formats, recent, bar)
        model(token_ids, _places(model, len(token_ids)), watch, last)
    layers = {i: watch.layers[i] for i in sorted(watch.layers)}
    return KVScales(layers=layers, source=source, probed=model.probed.float().cpu())


def calibration_tokens(model: PackedModel, token_ids: Sequence[int] | None = None) -> Tensor:
    """`token_ids` as far as the model has positions, or `NUM_TOKENS` of its own; int64 on its device.

    Raises:
        ValueError: fewer than two tokens, not one list of ids, or ids that the model has not.
    """
    limit = getattr(model.view.config.get_text_config(decoder=True), "max_position_embeddings", None) or NUM_TOKENS
    if token_ids is None:
        return _own_tokens(model, min(NUM_TOKENS, limit))
    tokens = torch.as_tensor(token_ids)
    if tokens.dim() == 1 and len(tokens) < 2:
        raise ValueError(f"the calibration text has {len(tokens)} tokens; at least 2 are needed")
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"token_ids: expected one list of ids, found {tokens.dtype} of shape {list(tokens.shape)}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < model.vocab_size:
        worst = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise ValueError(f"token_ids: {worst} is not one of the model's {model.vocab_size} tokens")
    return tokens[:limit].to(model.device, torch.long)


def _places(model: PackedModel, count: int) -> Tensor:
    """Positions [count] int64: `_PASSAGES` stretches of tokens, all over the context that RoPE is not scaled for.

    RoPE turns a channel's mean on: offsets of the first 512 positions alone are worse than none some thousands on.
    """
    config: Any = model.view.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each kind of layer
    limits = [getattr(config, "max_position_embeddings", None) or count]
    limits += [limit for kind in kinds if (limit := kind.get("original_max_position_embeddings"))]
    length = -(-count // _PASSAGES)
    tokens = torch.arange(count, device=model.device)
    return tokens + tokens // length * max(min(limits) // _PASSAGES - length, 0)


@torch.no_grad()
def _own_tokens(model: PackedModel, count: int) -> Tensor:
    """Passages that the model writes, one after the other; [count] int64."""
    generator = torch.Generator().manual_seed(_SEED)
    start = getattr(model.view.config.get_text_config(decoder=True), "bos_token_id", None)
    tokens = torch.randint(model.vocab_size, (_PASSAGES, 1), generator=generator)
    if isinstance(start, int) and 0 <= start < model.vocab_size:
        tokens.fill_(start)
    written = [tokens.to(model.device)]
    keywords: dict[str, Any] = {}
    for _ in progress(range(-(-count // _PASSAGES) - 1), "calibration: own text"):
        output = model.view(input_ids=written[-1], use_cache=True, **keywords)
        keywords = {CACHE_KEYWORD: output[CACHE_KEYWORD]}
        # one number from the CPU for each token, so that a model writes the same wherever it runs, up to its roundings
        share = torch.rand(_PASSAGES, 1, generator=generator).to(model.device)
        likely = output.logits[:, -1, : model.vocab_size].float().softmax(-1).cumsum(-1)
        written.append(torch.searchsorted(likely, share).clamp_(max=model.vocab_size - 1))
    return torch.cat(written, 1).flatten()[:count]


class _Watch:
    """An attention context without pages: plain causal attention over the call's tokens, and a look at each layer."""

    def __init__(self, k_formats: Collection[str], v_formats: Collection[str], recent: int, bar: tqdm[Any]) -> None:
        self.layers: dict[int, LayerScales] = {}
        self._k_formats, self._v_formats = k_formats, v_formats
        self._recent = recent
        self._bar = bar

    def attend(self, call: AttentionCall) -> Tensor:
        self.layers[call.layer_idx] = _Layer(call, self._recent).scales(self._k_formats, self._v_formats)
        self._bar.update()
        positions = torch.arange(call.query.shape[2], device=call.query.device)
        out = _attention(call, call.query[0].float(), call.key[0].float(), call.value[0].float(), positions)
        return out.transpose(0, 1).unsqueeze(0).to(call.value.dtype)


class _Near(NamedTuple):
    """What queries read instead of the other keys and values where they look at their own block."""

    key: Tensor  # [kv_heads, T, head_dim]
    value: Tensor  # [kv_heads, T, v_head_dim]
    mask: Tensor  # [rows, T] bool


def _attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, near: _Near | None = None
) -> Tensor:
    """`[heads, rows, v_head_dim]` fp32 for `query` `[heads, rows, head_dim]` at `positions` `[rows]` over all keys."""
    key_positions = torch.arange(key.shape[1], device=key.device)
    mask = key_positions <= positions[:, None]
    if call.window is not None:
        mask &= key_positions > positions[:, None] - call.window
    queries = query.unflatten(0, (len(key), -1))
    scores = queries @ key.unsqueeze(1).mT
    if near is not None:
        scores = torch.where(near.mask, queries @ near.key.unsqueeze(1).mT, scores)
    scores = scores * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float().view(len(key), -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    probs = scores.softmax(-1)[..., : key.shape[1]]
    if near is None:
        return (probs @ value.unsqueeze(1)).flatten(0, 1)
    out = (probs * ~near.mask) @ value.unsqueeze(1) + (probs * near.mask) @ near.value.unsqueeze(1)
    return out.flatten(0, 1)


class _Layer:
    """One layer's queries, keys and values, and what formats and transforms do to its output."""

    def __init__(self, call: AttentionCall, recent: int) -> None:
        self._call = call
        self._key, self._value = call.key[0].float(), call.value[0].float()  # [kv_heads, T, head_dim]
        self._positions = torch.arange(0, self._key.shape[1], _QUERY_STEP, device=self._key.device)
        self._query = call.query[0].float()[:, self._positions]
        self._out = _attention(call, self._query, self._key, self._value, self._positions)
        self._near = self._near_of(recent) if recent and call.window is None else None

    def scales(self, k_formats: Collection[str], v_formats: Collection[str]) -> LayerScales:
        k_dim, v_dim = self._key.shape[-1], self._value.shape[-1]
        return LayerScales(
            keys={name: self._keys(FORMATS[name]) for name in k_formats if _fits(FORMATS[name], k_dim)},
            values={name: self._values(FORMATS[name]) for name in v_formats if _fits(FORMATS[name], v_dim)},
        )

    def _near_of(self, recent: int) -> _Near:
        """The current blocks, of a passage at most, each beginning in the middle of one.

        A passage of the model's own that lay in one block would be read without an error, which no text is.
        """
        size = min(recent, _PASSAGE)
        blocks = (torch.arange(self._key.shape[1], device=self._key.device) + size // 2) // size
        return _Near(self._key, self._value, blocks[self._positions, None] == blocks)

    def _keys(self, codes: torch.dtype) -> SideScales:
        """The offset and factor with the least error; no offset under a softcap, where q.z does not cancel."""
        zeros = self._key.new_zeros(len(self._key), self._key.shape[-1])
        offsets = [zeros]
        if self._call.softcap is None:
            low, high = self._key.aminmax(dim=1)
            offsets += [self._key.mean(1), self._key.median(1).values, (low + high) / 2]
        best = SideScales(offset=None, factor=None, error=float("inf"))
        for offset in offsets:
            for factor in self._factors(offset):
                error = self._key_error(codes, offset, factor)
                if error < best.error or best.offset is None:
                    best = SideScales(offset=offset, factor=factor, error=error)
        assert best.offset is not None and best.factor is not None
        return SideScales(offset=best.offset.cpu(), factor=best.factor.cpu(), error=best.error)

    def _factors(self, offset: Tensor) -> list[Tensor]:
        """None, and two that make channels more alike: one by what keys are alone, one by what queries weigh too."""
        largest = (self._key - offset.unsqueeze(1)).abs().amax(1)
        weight = self._query.unflatten(0, (len(self._key), -1)).square().mean((1, 2)).sqrt()
        keys, queries = largest.clamp(min=_TINY).log2(), weight.clamp(min=_TINY).log2()
        logs = [torch.zeros_like(keys), keys, (keys - queries) / 2]
        return [(x - x.mean(-1, keepdim=True)).round().clamp(-_FACTOR_BITS, _FACTOR_BITS).exp2() for x in logs]

    def _values(self, codes: torch.dtype) -> SideScales:
        plain = SideScales(offset=None, factor=None, error=self._value_error(codes, None))
        if self._call.sinks is not None:  # probabilities do not sum to one
            return plain
        offset = self._value.mean(1)
        error = self._value_error(codes, offset)
        pays = error < _V_OFFSET_GAIN * plain.error
        return SideScales(offset=offset.cpu(), factor=None, error=error) if pays else plain

    def _key_error(self, codes: torch.dtype, offset: Tensor, factor: Tensor) -> float:
        transform = KVTransform(
            k_offset=offset, k_factor=factor, v_offset=None, rotates_k=codes == UINT4, rotates_v=False
        )
        key = transform.key(_read_back(transform.stored_key(self._key.transpose(0, 1)), codes))
        return self._error_of(key.transpose(0, 1), self._value)

    def _value_error(self, codes: torch.dtype, offset: Tensor | None) -> float:
        unread = self._key.new_empty(0)
        transform = KVTransform(
            k_offset=unread, k_factor=unread, v_offset=offset, rotates_k=False, rotates_v=codes == UINT4
        )
        value = transform.value(_read_back(transform.stored_value(self._value.transpose(0, 1)), codes))
        return self._error_of(self._key, value.transpose(0, 1))

    def _error_of(self, key: Tensor, value: Tensor) -> float:
        """Root mean square of the output's error over that of the output; `_LOST` where it is more, or no number."""
        out = _attention(self._call, self._query, key, value, self._positions, self._near)
        error = float((out - self._out).norm() / self._out.norm().clamp(min=1e-30))
        return error if error < _LOST else _LOST


def progress(items: Iterable[T], description: str) -> tqdm[T]:
    """`items`, with a bar on stderr where that is a terminal and they take more than a second."""
    return tqdm(items, desc=description, disable=None, delay=1.0, leave=False)


def _fits(codes: torch.dtype, head_dim: int) -> bool:
    try:
        return codes != UINT4 or num_groups(head_dim) > 0
    except ValueError:
        return False


def _read_back(rows: Tensor, codes: torch.dtype) -> Tensor:
    """`rows` `[..., head_dim]` as pages of this format would give them back, fp32."""
    if codes == UINT4:
        return reference.dequantize_groups(*reference.quantize_groups(rows))
    return reference.dequantize(*reference.quantize_rows(rows, codes))


class CalibrationRegistry:
    """What is known of living models, so that a second engine or cache of a model costs no forward.

    An entry is of the values that the model's weights had: writing to them in place, adapters and the like make a new
    one. A layer's pages go on as they are until then: whatever the weights, smoothing is exact.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[PreTrainedModel, _Known] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(
        self,
        model: PreTrainedModel,
        packed: PackedModel,
        k_formats: Collection[str],
        v_formats: Collection[str],
        recent: int = 0,
    ) -> KVScales:
        """The scales of `model` in these formats, measured through `packed`, a view of it that is not fused.

        Args:
            recent: as of `calibrate`.
        """
        with self._lock:
            values = _fingerprint(model)
            known = self._known.get(model)
            if known is None or known.values != values:
                tokens = calibration_tokens(packed)
                known = _Known(values, tokens, f"{len(tokens)} tokens of {OWN_TOKENS}", {})
            scales = known.scales.get(recent)
            missing_k, missing_v = set(k_formats), set(v_formats)
            if scales is not None:
                missing_k, missing_v = missing_k - scales.k_formats, missing_v - scales.v_formats
            if missing_k or missing_v:
                new = calibrate(
                    packed, sorted(missing_k), sorted(missing_v),
                    token_ids=known.token_ids, source=known.source, recent=recent,
                )  # fmt: skip
                scales = new if scales is None else scales.joined(new)
                known.scales[recent] = scales
                self._known[model] = known
            assert scales is not None
            return scales

    def keep_text(self, model: PreTrainedModel, token_ids: Tensor, scales: KVScales) -> None:
        """Replace what is known of `model` by `scales`, measured on tokens of a text, and measure all else on these."""
        with self._lock:
            self._known[model] = _Known(_fingerprint(model), token_ids, scales.source, {0: scales})

    def keep_mix(self, model: PreTrainedModel, mix: KVMix) -> None:
        """Note the mix of a model whose scales are known."""
        with self._lock:
            known = self._known[model].scales
            known[0] = replace(known[0], mix=mix)


class _Known(NamedTuple):
    """What is known of a model."""

    values: int  # `_fingerprint` of the weights
    token_ids: Tensor  # [T] int64, what it is measured on
    source: str  # the tokens in words
    scales: dict[int, KVScales]  # by `recent`


def _fingerprint(model: PreTrainedModel) -> int:
    """Of names, shapes and versions, not of addresses: fusion and moves leave values as they are."""
    tensors = model.named_parameters(remove_duplicate=False)
    return hash(
        (repr(model.config), *((n, t.shape, t.dtype, 0 if t.is_inference() else t._version) for n, t in tensors))
    )


CALIBRATIONS = CalibrationRegistry()
