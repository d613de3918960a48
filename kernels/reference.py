"""The plain-torch definition of every cache operation: the specification, the CPU path and the kernels' test oracle.

Vectorised: no Python loop over tokens or heads; prefill loops over sequences and over chunks of their queries, so its
cost stays near a dense forward and its scratch memory bounded. Arithmetic is fp32 (fp64 for fp64 queries) whatever the
pages hold. A token attends to what the pages hold, never to the K and V it was computed with, so chunking, batching and
prefix hits cannot change a result. It trades memory traffic for simplicity: every step gathers (and dequantizes) the
live pages once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels.decode_groups import DecodeKeys, decode_groups
from hf_paged.kernels.layout import (
    FP8_MAX,
    FP16_MAX,
    INT8_MAX,
    UINT4_MAX,
    AttentionMetadata,
    GroupPages,
    LayerKV,
    Pages,
    PlainPages,
    RecentRows,
    num_groups,
)
from hf_paged.kernels.reference_recent import current_of_decodes, put_current_blocks, with_own_block

T = TypeVar("T")

SCRATCH_ELEMENTS = 1 << 24  # attention scores held at once by a prefill chunk: 64 MB in fp32
_KEY_TILE = 512  # keys that torch's attention takes at once on a CPU, after one another
_QUERY_TILE = 32  # queries that it takes at once where they are fewer than 192


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row (last dimension) symmetrically to `dtype`.

    Args:
        x: `[..., head_dim]` of any float dtype.
        dtype: `torch.int8` or `torch.float8_e4m3fn`.

    Returns:
        codes `[..., head_dim]` of `dtype` and scale `[...]` fp16, with `value ~ code * scale`. The scale is
        absmax / code_max rounded *up* to fp16, so no code clips and the int8 error is at most scale / 2. A row of zeros
        has scale 0; a row with inf or NaN, or too large for an fp16 scale, has codes 0 and scale NaN, so it reads back
        as NaN and is never silent.
    """
    x = x.float()
    code_max = INT8_MAX if dtype == torch.int8 else FP8_MAX
    largest = x.abs().amax(-1)
    exact = largest / torch.full_like(largest, code_max)  # CUDA multiplies by 1 / code_max if that is a Python number
    scale = exact.half()
    rounded_down = scale.float() < exact
    scale = (scale.view(torch.int16) + rounded_down).to(torch.int16).view(torch.float16)  # next fp16 above, scale >= 0
    finite = scale < float("inf")
    divisor = torch.where(finite & (scale > 0), scale, 1.0).float()
    codes = torch.where(finite.unsqueeze(-1), x, 0.0) / divisor.unsqueeze(-1)
    if dtype == torch.int8:
        codes = codes.round()  # half to even
    return codes.to(dtype), torch.where(finite, scale, float("nan"))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Values `[..., head_dim]` fp32 of `codes` `[..., head_dim]` and `scale` `[...]`.

    fp8 goes through integers, 10x faster than torch's scalar conversion on a CPU: an e4m3 byte shifted into an fp16
    (exponent bias 7 read as bias 15) is the value / 256, exactly.
    """
    scale = scale.float().unsqueeze(-1)
    if codes.dtype == torch.float8_e4m3fn:
        shifted = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        codes, scale = shifted.view(torch.float16), scale * 256
    return codes.float().mul_(scale)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each group of channels of each row (last dimension) to 4 bits, asymmetrically.

    Args:
        x: `[..., head_dim]` of any float dtype; `layout.num_groups` says how a row is cut.

    Returns:
        codes `[..., head_dim / 2]` uint8, packed as `layout.GroupPages` says, and `[..., groups, 2]` fp16, scale and
        zero, with `value ~ code * scale + zero`. The zero is the group's minimum rounded *down* to fp16, the scale
        (maximum - zero) / 15 rounded *up*, so no code clips and the error is at most scale / 2. A group of zeros has
        scale and zero 0. A row with inf or NaN, or beyond the range of fp16, has codes 0 and NaN for every scale and
        zero: all of it reads back as NaN and is never silent.
    """
    x = x.float()
    finite = x.abs().amax(-1, keepdim=True) <= FP16_MAX  # not so for NaN
    x = torch.where(finite, x, 0.0).unflatten(-1, (num_groups(x.shape[-1]), -1))
    low, high = x.amin(-1), x.amax(-1)
    zero = low.half()
    bits = zero.view(torch.int16)
    below = torch.where(zero > 0, bits - 1, torch.where(zero == 0, -0x7FFF, bits + 1)).to(torch.int16)
    zero = torch.where(zero.float() > low, below.view(torch.float16), zero) + 0.0  # never -0
    span = (high - zero.float()).clamp(min=0) + 0.0  # never -0
    exact = span / torch.full_like(span, UINT4_MAX)  # CUDA multiplies by 1 / 15 if that is a Python number
    scale = exact.half()
    rounded_down = scale.float() < exact
    scale = (scale.view(torch.int16) + rounded_down).to(torch.int16).view(torch.float16)  # next fp16 above, scale >= 0
    divisor = torch.where(scale > 0, scale, 1.0).float()
    codes = (x - zero.float().unsqueeze(-1)) / divisor.unsqueeze(-1)
    first, second = codes.round().flatten(-2).to(torch.uint8).chunk(2, -1)  # half to even
    return first | second << 4, torch.where(finite.unsqueeze(-1), torch.stack((scale, zero), -1), float("nan"))


def dequantize_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """Values `[..., head_dim]` fp32 of packed `codes` `[..., head_dim / 2]` and `scale` `[..., groups, 2]`."""
    values = torch.cat((codes & 15, codes >> 4), -1).float().unflatten(-1, (scale.shape[-2], -1))
    step, zero = scale.float().unsqueeze(-1).unbind(-2)
    return values.mul_(step).add_(zero).flatten(-2)


def write_kv(
    layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor, derived: dict[Any, Any] | None = None
) -> None:
    """Store `key` `[T, kv_heads, head_dim]` and `value` `[T, kv_heads, v_head_dim]` at `slot_mapping` `[T]` int64.

    A slot is block * block_size + offset; -1 stores nothing. Codes are those of `quantize_rows`, `quantize_groups`.

    Args:
        derived: `AttentionMetadata.derived` of the step that `slot_mapping` belongs to.
    """
    live, blocks, offsets = once(derived, ("slots", layer.block_size), lambda: _slots(slot_mapping, layer.block_size))
    for pages, rows in ((layer.k, key), (layer.v, value)):
        if live is not None:
            rows = rows[live]
        if isinstance(pages, PlainPages):
            _store(pages.data, blocks, offsets, rows.to(pages.data.dtype))
        elif isinstance(pages, GroupPages):
            codes, scale = quantize_groups(rows)
            _store(pages.codes, blocks, offsets, codes)
            _store(pages.scale, blocks, offsets, scale)
        else:
            codes, scale = quantize_rows(rows, pages.codes.dtype)
            # fp8 travels as bytes: indexed stores of float8 are not implemented everywhere
            _store(pages.codes.view(torch.int8), blocks, offsets, codes.view(torch.int8))
            _store(pages.scale, blocks, offsets, scale)


def _slots(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Tokens that are stored (None = all), and of each of these its block and its offset there."""
    live = None
    if bool((slot_mapping < 0).any()):
        live = slot_mapping >= 0
        slot_mapping = slot_mapping[live]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    return live, blocks, slot_mapping - blocks * block_size


def _store(x: Tensor, blocks: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Rows `[T, kv_heads, ...]` into `x` `[num_blocks, kv_heads, block_size, ...]`."""
    x.transpose(1, 2).index_put_((blocks, offsets), rows)


def once(derived: dict[Any, Any] | None, key: Any, make: Callable[[], T]) -> T:
    """What `make` gives, made once for all layers of a step."""
    if derived is None:
        return make()
    if key not in derived:
        derived[key] = make()
    value: T = derived[key]
    return value


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    fast: bool = False,
    decoded: Tensor | None = None,
    recent: RecentRows | None = None,
) -> Tensor:
    """Causal attention of `query` over the pages of its sequences.

    Query i of a sequence sits at position `seq_len - q_len + i` and sees the keys at positions <= its own and, with a
    `window`, > its own - window. A row of `seq_lens` 0 (padding of a captured graph) gives zeros. Where a layer keeps
    `recent` blocks, the keys and values of a query's own block are those that were not quantized.

    Args:
        query: `[T, heads, head_dim]`, heads a multiple of the pages' kv_heads.
        scale: multiplies q . k.
        softcap: scores become `softcap * tanh(score / softcap)` before masking (Gemma 2).
        sinks: `[heads]` or `[T, heads]`, logits that join the softmax denominator only (GPT-OSS).
        fast: single 16-bit queries on pages of their dtype are not widened where torch's sdpa takes them as they are:
            widening their keys costs as much as attention. It sums in fp32 and rounds probabilities to 16 bits, as for
            dense attention. (For prompts sdpa in fp32 is 1.6 times as fast as in bf16 on a CPU without AMX.)
        decoded: `[num_decodes, heads, v_head_dim]`, the result of the single queries where it is known already.
        recent: the step's own rows, where the layer keeps `recent` blocks and sequences have several queries.

    Returns:
        `[T, heads, v_head_dim]` in the dtype of `query`.
    """
    kv_heads = layer.k.tensor.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    narrow = fast and softcap is None and sinks is None and _hold(layer, query.dtype)
    tokens, heads, head_dim = query.shape
    q = query.view(tokens, kv_heads, heads // kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.to(compute).expand(tokens, heads).unflatten(1, (kv_heads, -1))
    num_decodes = meta.num_decodes
    if num_decodes and decoded is None:
        single = q[:num_decodes] if narrow else q[:num_decodes].to(compute)
        of_rows = None if sinks is None else sinks[:num_decodes]
        decoded = _decode(single, layer, meta, scale, window, softcap, of_rows).to(query.dtype)
    if decoded is not None and num_decodes == tokens:
        return decoded
    out = query.new_zeros(tokens, heads, layer.v.head_dim)
    if decoded is not None:
        out[:num_decodes] = decoded
    tile = _KEY_TILE if compute == query.dtype and softcap is None and sinks is None else 1
    for i, rows, seq_len in _prompts(meta):
        of_rows = None if sinks is None else sinks[rows]
        kept = None if recent is None else (recent.key[rows].to(compute), recent.value[rows].to(compute))
        own, table = q[rows].to(compute), meta.block_tables[i]
        out[rows] = _prefill(own, layer, table, seq_len, scale, window, softcap, of_rows, tile, kept)
    return out


def _prompts(meta: AttentionMetadata) -> Iterator[tuple[int, slice, int]]:
    """Of each sequence behind the decodes that has queries and keys: index, rows of its queries, length."""
    starts, seq_lens = meta.cu_seqlens_q.tolist(), meta.seq_lens.tolist()
    for i in range(meta.num_decodes, meta.num_seqs):
        if starts[i + 1] > starts[i] and seq_lens[i]:
            yield i, slice(starts[i], starts[i + 1]), seq_lens[i]


def _decode(
    q: Tensor, layer: LayerKV, meta: AttentionMetadata, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One query per sequence: `q` `[B, kv_heads, group, head_dim]` -> `[B, heads, v_head_dim]`."""
    which = ("decode groups", layer.block_size, window)
    plan = once(meta.derived, which, lambda: decode_groups(meta, layer.block_size, window))
    current = current_of_decodes(meta, layer)
    if plan.order is not None:
        q = q[plan.order]
        sinks, current = (None if x is None else x[plan.order] for x in (sinks, current))
    out = []
    for rows, keys in plan.groups:
        of_rows, own = (None if x is None else x[rows] for x in (sinks, current))
        out.append(_decode_group(q[rows], layer, keys, scale, softcap, of_rows, own))
    return out[0] if plan.place is None else torch.cat(out)[plan.place]


def _decode_group(
    q: Tensor, layer: LayerKV, keys: DecodeKeys, scale: float, softcap: float | None, sinks: Tensor | None,
    current: Tensor | None,
) -> Tensor:  # fmt: skip
    """The queries of one group, as `_decode`."""
    if keys.table.shape[1] == 0:
        return q.new_zeros(q.shape[0], q.shape[1] * q.shape[2], layer.v.head_dim)
    k, v = _gather_layer(layer, keys.table, q.dtype, blank=keys.unused)
    if current is not None:
        assert layer.recent is not None
        put_current_blocks(k, v, layer.recent, current, keys.unused)
    out = _attend(q, k[:, :, : keys.length], v[:, :, : keys.length], keys.mask, scale, softcap, sinks)
    if len(keys.empty):
        out[keys.empty] = 0.0
    return out.flatten(1, 2)


def _prefill(
    q: Tensor, layer: LayerKV, table: Tensor, seq_len: int, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, tile: int, own: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """The queries of one sequence: `q` `[q_len, kv_heads, group, head_dim]` -> `[q_len, heads, v_head_dim]`.

    Keys and queries are taken in whole tiles, counted from position 0, zeros where there are none: with a `tile` of
    `_KEY_TILE` keys a row is summed in the same order, to the same bits, however a prompt is cut. 16-bit rows, and
    layers that torch's blockwise kernel does not take, do without (`tile` 1).

    `own`: K and V of these tokens as they came, `[q_len, kv_heads, head_dim]`, which the queries of each block read;
    the queries are taken block by block then.
    """
    q_len, heads, head_dim = q.shape[0], q.shape[1] * q.shape[2], q.shape[3]
    history = seq_len - q_len  # position of the first query
    if window and window >= seq_len:
        window = None
    visible = max(history - window + 1, 0) // layer.block_size if window else 0  # first block that a query sees
    start = visible * layer.block_size // tile * tile  # position of the first key here
    first, stop = start // layer.block_size, -(-seq_len // layer.block_size)
    length = -(-(seq_len - start) // tile) * tile
    missing = (visible - first, -(-length // layer.block_size) - (stop - first))
    blocks = F.pad(table[visible:stop].long(), missing)  # with the null block, which holds zeros
    k, v = (x[0, :, None, :length] for x in _gather_layer(layer, blocks[None], q.dtype))
    if start + length > seq_len:  # the last block holds what was there before
        k[:, :, seq_len - start :] = v[:, :, seq_len - start :] = 0.0
    sinks = None if sinks is None else sinks.permute(1, 2, 0)
    q = q.permute(1, 2, 0, 3)  # [kv_heads, group, q_len, head_dim]
    fused = softcap is None and sinks is None and v.shape[-1] == head_dim  # torch's blockwise kernel: no score scratch
    if fused and window is None and history == 0 and tile == 1 and own is None:
        return _attend(q, k, v, None, scale, None, None, causal=True).permute(2, 0, 1, 3).flatten(1, 2)
    out = []
    chunk = min(max(SCRATCH_ELEMENTS // (heads * (seq_len - start)), 32), 256)
    ahead = 0  # rows of zeros before the first query
    if own is not None:
        assert window is None and history % layer.block_size == 0, (window, history)
        chunk = layer.block_size
    elif tile > 1:
        ahead, chunk = history % _QUERY_TILE, min(chunk, 160) // _QUERY_TILE * _QUERY_TILE
        q, history = F.pad(q, (0, 0, ahead, -seq_len % _QUERY_TILE)), history - ahead
    for i in range(0, q.shape[2], chunk):
        rows = q[:, :, i : i + chunk]
        last = history + i + rows.shape[2]  # keys at and after it are in every row's future
        low, end = start, -(-last // tile) * tile
        if window:
            low = max(history + i - window + 1, start) // tile * tile
        query_positions = torch.arange(history + i, last, device=q.device)[:, None]
        key_positions = torch.arange(low, end, device=q.device)
        mask = key_positions <= query_positions
        if window:
            mask &= key_positions > query_positions - window
        seen = tuple(x[:, :, low - start : end - start] for x in (k, v))
        if own is not None:
            seen = tuple(with_own_block(x, y[i : i + chunk], history + i) for x, y in zip(seen, own, strict=True))
        of_rows = None if sinks is None else sinks[:, :, i : i + chunk]
        out.append(_attend(rows, seen[0], seen[1], mask, scale, softcap, of_rows))
    return torch.cat(out, 2)[:, :, ahead : ahead + q_len].permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Softmax attention of `q` `[N, H, n, D]` on `k`, `v` `[N, H or 1, L, D]`; `mask` None: every key is seen."""
    if softcap is None and sinks is None:
        if k.shape[1] != q.shape[1]:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    assert not causal
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    top = torch.maximum(scores.amax(-1), sinks)
    probs = scores.sub_(top.unsqueeze(-1)).exp_()
    return (probs @ v) / (probs.sum(-1) + (sinks - top).exp()).unsqueeze(-1)


def _hold(layer: LayerKV, dtype: torch.dtype) -> bool:
    """Whether the layer's pages hold plain values of `dtype`."""
    return all(isinstance(pages, PlainPages) and pages.data.dtype == dtype for pages in (layer.k, layer.v))


def _gather_layer(
    layer: LayerKV, table: Tensor, dtype: torch.dtype, *, blank: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K and V of the blocks in `table`, as `gather_pages` gives them."""
    if (pair := layer.plain_pair) is not None:
        k, v = gather_pages(pair, table, dtype, blank=blank).chunk(2, 1)
        return k, v
    k, v = (gather_pages(pages, table, dtype, blank=blank) for pages in (layer.k, layer.v))
    return k, v


def gather_pages(pages: Pages, table: Tensor, dtype: torch.dtype, *, blank: Tensor | None = None) -> Tensor:
    """The values of the blocks in `table` `[B, blocks]` as `[B, kv_heads, keys, head_dim]` of `dtype`.

    Args:
        blank: `[n]` int64 slots, counted over `[B, blocks, block_size]`, that are zero in the result.
    """
    if isinstance(pages, PlainPages):
        values = _gather(pages.data, table).to(dtype)
    elif isinstance(pages, GroupPages):
        values = dequantize_groups(_gather(pages.codes, table), _gather(pages.scale, table)).to(dtype)
    else:
        codes = _gather(pages.codes.view(torch.int8), table).view(pages.codes.dtype)
        values = dequantize(codes, _gather(pages.scale, table)).to(dtype)
    if blank is not None and len(blank):
        values.flatten(1, 3).index_fill_(1, blank, 0.0)
    return values.flatten(2, 3).transpose(0, 1)


def _gather(x: Tensor, table: Tensor) -> Tensor:
    """Blocks of `x` `[num_blocks, kv_heads, ...]` as `[kv_heads, *table.shape, ...]`: one pass, in the order of use."""
    out = x.new_empty(x.shape[1], table.numel(), *x.shape[2:])
    torch.index_select(x, 0, table.flatten(), out=out.transpose(0, 1))
    return out.unflatten(1, table.shape)
