"""Ragged attention cases on poisoned pages, and an independent fp64 attention to judge them by.

Every slot that no live token owns holds NaN (codes: all ones under a NaN scale), block 0 included, so a kernel that
reads one shows it. Pages are strided views into one row per block, as in the real cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import (
    UINT4,
    AttentionMetadata,
    CurrentBlocks,
    GroupPages,
    LayerKV,
    Pages,
    PlainPages,
    RecentRows,
    ScaledPages,
    num_groups,
)

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a case is made of; `q_lens[i] <= seq_lens[i]`, single queries first, seq_len 0 is a padded row."""

    q_lens: tuple[int, ...] = (1, 1, 1)
    seq_lens: tuple[int, ...] = (1, 37, 70)
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    k_format: torch.dtype = torch.float32
    v_format: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    row_sinks: bool = False  # other sinks for every query
    scale: float = 0.2
    recent: bool = False  # the current blocks are kept as they came; chunks begin at a block
    v_offset: bool = False  # the output over values is that over stored ones and an offset of each channel
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    query: Tensor
    layer: LayerKV
    meta: AttentionMetadata
    recent: RecentRows | None = None
    options: dict[str, Any] = field(default_factory=dict)


def empty_pages(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, format: torch.dtype) -> Pages:
    """Poisoned pages whose blocks are 16 elements apart, so that a kernel must honour the stride."""

    def rows(dtype: torch.dtype, *row: int) -> Tensor:
        shape = (kv_heads, block_size, *row)
        width = math.prod(shape)
        if dtype == torch.float8_e4m3fn:
            return (
                torch.full((num_blocks, width + 16), 127, dtype=torch.uint8).view(dtype)[:, :width].unflatten(1, shape)
            )
        poison = {torch.int8: 127, torch.uint8: 255}.get(dtype, float("nan"))
        return torch.full((num_blocks, width + 16), poison, dtype=dtype)[:, :width].unflatten(1, shape)

    if format == UINT4:
        scale = rows(torch.float16, num_groups(head_dim), 2)
        return GroupPages(codes=rows(torch.uint8, head_dim // 2), scale=scale)
    if format not in EIGHT_BIT:
        return PlainPages(data=rows(format, head_dim))
    return ScaledPages(codes=rows(format, head_dim), scale=rows(torch.float16))


def to_device(case: Case, device: str) -> Case:
    """The same case elsewhere; page strides survive."""

    def move(x: Tensor) -> Tensor:
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        width = torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype
        out.view(width).copy_(x.view(width))
        return out

    def pages(p: Pages) -> Pages:
        if isinstance(p, PlainPages):
            return PlainPages(data=move(p.data))
        return type(p)(codes=move(p.codes), scale=move(p.scale))

    meta, recent, current = case.meta, case.layer.recent, case.meta.current
    transform = None if case.layer.transform is None else case.layer.transform.to(device)
    if recent is not None:
        recent = LayerKV(k=pages(recent.k), v=pages(recent.v))
    return Case(
        query=case.query.to(device),
        layer=LayerKV(k=pages(case.layer.k), v=pages(case.layer.v), recent=recent, transform=transform),
        recent=None if case.recent is None else RecentRows(**{k: x.to(device) for k, x in vars(case.recent).items()}),
        meta=AttentionMetadata(
            cu_seqlens_q=meta.cu_seqlens_q.to(device),
            seq_lens=meta.seq_lens.to(device),
            block_tables=meta.block_tables.to(device),
            slot_mapping=meta.slot_mapping.to(device),
            num_decodes=meta.num_decodes,
            max_seqlen_q=meta.max_seqlen_q,
            max_seq_len=meta.max_seq_len,
            current=None if current is None else CurrentBlocks(**{k: x.to(device) for k, x in vars(current).items()}),
        ),
        options={k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.options.items()},
    )


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Random K, V and queries of ragged sequences, K and V stored through the reference; built on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    v_dim = shape.v_head_dim or shape.head_dim
    tables, all_slots = _tables(shape, generator)
    num_blocks, bs = sum(-(-n // shape.block_size) for n in shape.seq_lens) + 1, shape.block_size
    layer = LayerKV(
        k=empty_pages(num_blocks, shape.kv_heads, bs, shape.head_dim, shape.k_format),
        v=empty_pages(num_blocks, shape.kv_heads, bs, v_dim, shape.v_format or shape.k_format),
    )
    total = sum(shape.seq_lens)
    # an offset on V makes a wrong softmax denominator visible, an outlier channel a wrong scale
    key = randn(total, shape.kv_heads, shape.head_dim)
    key[..., 3] *= 10
    value = randn(total, shape.kv_heads, v_dim) + 0.5
    reference.write_kv(layer, key, value, torch.cat(all_slots))
    cu_seqlens = torch.tensor([0, *shape.q_lens]).cumsum(0).to(torch.int32)
    num_decodes = 0
    while num_decodes < len(shape.q_lens) and shape.q_lens[num_decodes] == 1:
        num_decodes += 1
    meta = AttentionMetadata(
        cu_seqlens_q=cu_seqlens,
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat([s[len(s) - n :] for s, n in zip(all_slots, shape.q_lens, strict=True)]),
        num_decodes=num_decodes,
        max_seqlen_q=max(shape.q_lens),
        max_seq_len=max(shape.seq_lens),
    )
    recent = None
    if shape.recent:
        layer, meta, recent = _keep_current_blocks(shape, layer, meta, key, value)
    heads = shape.kv_heads * shape.group
    query = randn(int(cu_seqlens[-1]), heads, shape.head_dim).to(shape.dtype)
    if shape.v_offset:
        transform = KVTransform(
            k_offset=torch.zeros(shape.kv_heads, shape.head_dim),
            k_factor=torch.ones(shape.kv_heads, shape.head_dim),
            v_offset=randn(shape.kv_heads, v_dim) / 4,  # outputs stay of the magnitude that `tolerance` knows
            rotates_k=False,
            rotates_v=False,
        )
        layer = replace(layer, transform=transform)
    case = Case(
        query=query,
        layer=layer,
        meta=meta,
        recent=recent,
        options={
            "scale": shape.scale,
            "window": shape.window,
            "softcap": shape.softcap,
            "sinks": randn(len(query), heads) if shape.row_sinks else randn(heads) if shape.sinks else None,
        },
    )
    return to_device(case, shape.device) if shape.device != "cpu" else case


def _tables(shape: Shape, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Block tables `[sequences, longest + 1]` of blocks all over the pages, and each sequence's slots (-1: freed)."""
    bs = shape.block_size
    blocks_needed = [-(-n // bs) for n in shape.seq_lens]
    ids = torch.randperm(sum(blocks_needed), generator=generator) + 1
    tables = torch.zeros(len(shape.seq_lens), max(*blocks_needed, 1) + 1, dtype=torch.int32)
    for i, blocks in enumerate(ids.split(blocks_needed)):
        tables[i, : len(blocks)] = blocks
    all_slots = []
    for table, seq_len, q_len in zip(tables, shape.seq_lens, shape.q_lens, strict=True):
        position = torch.arange(seq_len)
        slots = table[position // bs].long() * bs + position % bs
        oldest = max(seq_len - q_len - shape.window + 1, 0) if shape.window else 0  # older blocks were freed
        all_slots.append(torch.where(position < oldest // bs * bs, -1, slots))
        table[: oldest // bs] = 0
    return tables, all_slots


def _keep_current_blocks(
    shape: Shape, layer: LayerKV, meta: AttentionMetadata, key: Tensor, value: Tensor
) -> tuple[LayerKV, AttentionMetadata, RecentRows]:
    """The current blocks of all sequences in poisoned slots; `key` and `value` are those of all tokens."""
    bs, n = shape.block_size, len(shape.seq_lens)
    seq_lens, q_lens = torch.tensor(shape.seq_lens), torch.tensor(shape.q_lens)
    assert all(q == 1 or (s - q) % bs == 0 for s, q in zip(shape.seq_lens, shape.q_lens, strict=True))
    starts = (seq_lens - 1).clamp(min=0) // bs * bs
    slots = torch.where(seq_lens > 0, n - torch.arange(n), 0)  # in another order than the sequences
    recent = LayerKV(
        k=empty_pages(n + 1, shape.kv_heads, bs, key.shape[2], shape.dtype),
        v=empty_pages(n + 1, shape.kv_heads, bs, value.shape[2], shape.dtype),
    )
    position = torch.cat([torch.arange(s) for s in shape.seq_lens])
    of = torch.arange(n).repeat_interleave(seq_lens)
    mapping = torch.where(position >= starts[of], slots[of] * bs + position % bs, -1)
    reference.write_kv(recent, key, value, mapping)
    own = position >= (seq_lens - q_lens)[of]  # of padded rows there is none
    rows = RecentRows(
        key=key.new_zeros(int(q_lens.sum()), *key.shape[1:], dtype=shape.dtype),
        value=value.new_zeros(int(q_lens.sum()), *value.shape[1:], dtype=shape.dtype),
        slot_mapping=torch.full((int(q_lens.sum()),), -1),
    )
    real = (seq_lens > 0).repeat_interleave(q_lens)
    rows.key[real], rows.value[real] = key[own].to(shape.dtype), value[own].to(shape.dtype)
    rows.slot_mapping[real] = mapping[own]
    current = CurrentBlocks(starts=starts.int(), slots=slots.int(), slot_mapping=rows.slot_mapping)
    return replace(layer, recent=recent), replace(meta, current=current), rows


def with_null_block(case: Case) -> Case:
    """The case as a real cache holds it: zeros in the null block."""
    recent = case.layer.recent
    for pages in (case.layer.k, case.layer.v, *((recent.k, recent.v) if recent is not None else ())):
        pages.tensor.view(torch.uint8)[0] = 0
        if not isinstance(pages, PlainPages):
            pages.scale[0] = 0
    return case


def definition(case: Case) -> Tensor:
    """The reference on the CPU, where it was itself compared with fp64 (CUDA's own sdpa is another implementation).

    The null block is poison for kernels, which never read it; a real cache keeps zeros there, and the reference reads
    them under a mask.
    """
    case = with_null_block(to_device(case, "cpu"))
    out = reference.paged_attention(case.query, case.layer, case.meta, **case.options, recent=case.recent)
    if case.layer.transform is not None:
        out = case.layer.transform.output(out)
        out[: case.meta.num_decodes][case.meta.seq_lens[: case.meta.num_decodes] == 0] = 0
    return out


def stored_values(pages: Pages, table: Tensor, seq_len: int) -> Tensor:
    """What the pages hold for one sequence, token by token in fp64: `[seq_len, kv_heads, head_dim]`."""
    values = []
    for position in range(seq_len):
        block, offset = divmod(position, pages.tensor.shape[2])
        row = pages.tensor[int(table[block]), :, offset].double()
        if isinstance(pages, ScaledPages):
            row = row * pages.scale[int(table[block]), :, offset, None].double()
        elif isinstance(pages, GroupPages):
            row = torch.cat([row % 16, (row / 16).floor()], -1)
            scale = pages.scale[int(table[block]), :, offset].double()
            channel_scale = scale.repeat_interleave(row.shape[-1] // scale.shape[1], 1)
            row = row * channel_scale[..., 0] + channel_scale[..., 1]
        values.append(row)
    return torch.stack(values)


def dense_attention(case: Case) -> Tensor:
    """fp64 attention query by query and head by head, sharing no code with the package."""
    meta, options = case.meta, case.options
    kv_heads = case.layer.k.tensor.shape[1]
    group = case.query.shape[1] // kv_heads
    out = torch.zeros(*case.query.shape[:2], case.layer.v.head_dim, dtype=torch.float64)
    for i, seq_len in enumerate(meta.seq_lens.tolist()):
        begin, end = meta.cu_seqlens_q[i : i + 2].tolist()
        if seq_len == 0:
            continue
        k = stored_values(case.layer.k, meta.block_tables[i], seq_len)
        v = stored_values(case.layer.v, meta.block_tables[i], seq_len)
        coded = (k.clone(), v.clone())
        for row in range(begin, end):
            position = seq_len - (end - row)
            if case.recent is not None:
                k, v = _with_own_block(case, i, position, *coded)
            first = max(position - options["window"] + 1, 0) if options["window"] else 0
            for head in range(case.query.shape[1]):
                keys, values = k[first : position + 1, head // group], v[first : position + 1, head // group]
                scores = keys @ case.query[row, head].double() * options["scale"]
                if options["softcap"]:
                    scores = options["softcap"] * torch.tanh(scores / options["softcap"])
                weights = scores.exp()
                denominator = weights.sum()
                if options["sinks"] is not None:
                    denominator = denominator + options["sinks"].expand(len(out), -1)[row, head].double().exp()
                out[row, head] = weights @ values / denominator
    return out


def _with_own_block(case: Case, seq: int, position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stored keys and values `[seq_len, ...]`, those of the block of `position` as they came."""
    meta, bs, recent = case.meta, case.layer.block_size, case.layer.recent
    assert meta.current is not None and recent is not None and case.recent is not None
    begin, end = meta.cu_seqlens_q[seq : seq + 2].tolist()
    start = position // bs * bs
    stop = min(start + bs, len(k))
    if seq < meta.num_decodes:
        slot = int(meta.current.slots[seq])
        own = [pages.tensor[slot, :, : stop - start].transpose(0, 1).double() for pages in (recent.k, recent.v)]
    else:
        rows = slice(end - len(k) + start, end - len(k) + stop)
        assert rows.start >= begin
        own = [x[rows].double() for x in (case.recent.key, case.recent.value)]
    k, v = k.clone(), v.clone()
    k[start:stop], v[start:stop] = own
    return k, v


def tolerance(shape: Shape) -> float:
    """Absolute error allowed on outputs of magnitude up to about 4.

    fp32: a score is a sum of up to 256 products with partial sums below 16, so off by 16 * sqrt(256) * 2^-24 at most;
    its probability is off by that factor, and an average of values up to 4 by twice that. 16 bits: probabilities and
    the output are rounded once each, 2^-11 (fp16) or 2^-8 (bf16) relative. 8-bit codes are exact in fp16, so q and
    probabilities in fp16 are the only rounding beside the output's own. Scores of q itself in fp16 add |score| * 2^-11
    in the exponent, |score| <= 16 here. 4-bit codes become fp16 values of a tile, which doubles either rounding.
    """
    if shape.dtype == torch.float32:
        return 2 * 4 * 16 * 16 * 2**-24
    step = 2**-8 if torch.bfloat16 in (shape.dtype, shape.k_format) else 2**-11
    return 4 * 2 * step * (2 if UINT4 in (shape.k_format, shape.v_format) else 1)
