"""Triton kernel between the QKV projection and attention: norm, RoPE, smoothing, quantize and page write, one launch.

The grid is (token, tile of heads): first the tiles of Q, then of K, then of V. A channel's partner in the rotation is
read a second time (it is in L1), so one code path serves halves, interleaved pairs and partial rotation of any size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.hadamard_tile import hadamard_tile
from hf_paged.kernels.kv_transform import KVTransform, rotation_block
from hf_paged.kernels.layout import LayerKV, RecentRows
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap
from hf_paged.kernels.reference_fused import RMSNorm, Rope
from hf_paged.kernels.rms_norm import weigh
from hf_paged.kernels.store_tile import store_tile
from hf_paged.kernels.write_kernel import page_parts

# Up to so many tokens: elements of a tile, warps. Few tokens need many programs; all programs of a decode step must fit
# the GPU at once (a step of 128 tokens: 2 to 3 microseconds less a layer than with the large tiles of prompts).
_TILES = ((64, 512, 4), (256, 512, 2))
_PROMPT_TILE = (2048, 4)


@triton.jit
def _rotated_rows(
    x_ptr,  # one token's heads
    at,  # [ROWS] int64, offset of each head
    keep,  # [ROWS]
    d,  # [BLOCK_D]
    weight_ptr,  # [HEAD_DIM]
    cos_ptr,  # [columns], one token's
    sin_ptr,  # [columns]
    angle_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):
    """Heads `[ROWS, BLOCK_D]` of one token, normalised, rotated and rounded to their dtype; zero beyond HEAD_DIM."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    mask = keep[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    # every head reads weights and angles by itself: one row for all would reach them through shared memory
    every = tl.zeros_like(at)[:, None]
    if NORM:
        weight = tl.load(weight_ptr + every + d[None, :], mask=mask, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = weigh(x * scale, weight, OFFSET, CAST_FIRST, DTYPE)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        turns = d < ROTARY_DIM
        if INTERLEAVED:
            first = d % 2 == 0
            partner = tl.where(first, d + 1, d - 1)
            angle = d // 2 * angle_stride
        else:
            first = d < HALF
            partner = tl.where(first, d + HALF, d - HALF)
            angle = d % HALF * angle_stride
        y_mask = keep[:, None] & turns[None, :]
        y = tl.load(x_ptr + at[:, None] + partner[None, :], mask=y_mask, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(weight_ptr + every + partner[None, :], mask=y_mask, other=0.0)
            y = weigh(y * scale, weight, OFFSET, CAST_FIRST, DTYPE)
        cos = tl.load(cos_ptr + every + angle[None, :], mask=y_mask, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + every + angle[None, :], mask=y_mask, other=0.0).to(tl.float32)
        x = x * cos + y * tl.where(first[None, :], -sin, sin)
    return x.to(DTYPE)


@triton.jit
def _reciprocal(power):
    """Of powers of two, exactly: their exponent mirrored at that of 1."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _write_query(
    token, head, d, q_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, factor_ptr, stride_t, stride_h, angle_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
    TRANSFORM: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """A tile of query heads, as they meet stored keys."""
    keep = head < HEADS
    mask = keep[:, None] & (d < HEAD_DIM)[None, :]
    if TRANSFORM:  # read before the rows are: one latency, not two
        per_head = (head // (HEADS // KV_HEADS) * HEAD_DIM)[:, None] + d[None, :]
        factor = tl.load(factor_ptr + per_head, mask=mask, other=0.0)
    at = token * stride_t + head.to(tl.int64) * stride_h
    q = _rotated_rows(
        q_ptr, at, keep, d, weight_ptr, cos_ptr, sin_ptr, angle_stride, eps,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, NORM, OFFSET, CAST_FIRST,
    )  # fmt: skip
    if TRANSFORM:
        q = hadamard_tile(q.to(tl.float32) * factor, ROTATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((token * HEADS + head) * HEAD_DIM)[:, None] + d[None, :], q, mask=mask)


@triton.jit
def _write_key(
    token, head, live, block, row_in_block, d, k_ptr, weight_ptr, cos_ptr, sin_ptr, pages_ptr, scale_ptr,
    offset_ptr, factor_ptr, own_ptr, recent_ptr, recent_slot, stride_t, stride_h, angle_stride, page_stride,
    scale_stride, recent_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TRANSFORM: tl.constexpr, ROTATION: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """A tile of key heads, to the page rows of their token."""
    keep = head < HEADS
    if TRANSFORM:
        per_head = (head * HEAD_DIM)[:, None] + d[None, :]
        inside = keep[:, None] & (d < HEAD_DIM)[None, :]
        offset = tl.load(offset_ptr + per_head, mask=inside, other=0.0)
        factor = tl.load(factor_ptr + per_head, mask=inside, other=1.0)
    at = token * stride_t + head.to(tl.int64) * stride_h
    k = _rotated_rows(
        k_ptr, at, keep, d, weight_ptr, cos_ptr, sin_ptr, angle_stride, eps,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, NORM, OFFSET, CAST_FIRST,
    )  # fmt: skip
    if TRANSFORM:
        k = hadamard_tile((k.to(tl.float32) - offset) * _reciprocal(factor), ROTATION)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    store_tile(
        k, mask, live, pages_ptr, scale_ptr, block, row_in_block, page_stride, scale_stride, d, HEAD_DIM, CODE_MAX
    )
    if RECENT:
        _keep(k, token, head, keep, d, own_ptr, recent_ptr, recent_slot, recent_stride, HEADS, HEAD_DIM, BLOCK_SIZE)


@triton.jit
def _write_value(
    token, head, live, block, row_in_block, c, v_ptr, pages_ptr, scale_ptr, offset_ptr, own_ptr, recent_ptr,
    recent_slot, stride_t, stride_h, page_stride, scale_stride, recent_stride,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, CODE_MAX: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    V_OFFSET: tl.constexpr, ROTATION: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """A tile of value heads, to the page rows of their token."""
    inside = (head < HEADS)[:, None] & (c < V_DIM)[None, :]
    at = token * stride_t + head.to(tl.int64) * stride_h
    v = tl.load(v_ptr + at[:, None] + c[None, :], mask=inside, other=0.0)
    if V_OFFSET:
        offset = tl.load(offset_ptr + (head * V_DIM)[:, None] + c[None, :], mask=inside, other=0.0)
        v = v.to(tl.float32) - offset
    if ROTATION > 1:
        v = hadamard_tile(v.to(tl.float32), ROTATION)
    mask = live[:, None] & (c < V_DIM)[None, :]
    store_tile(v, mask, live, pages_ptr, scale_ptr, block, row_in_block, page_stride, scale_stride, c, V_DIM, CODE_MAX)
    if RECENT:
        inside_heads = head < HEADS
        _keep(
            v, token, head, inside_heads, c, own_ptr, recent_ptr, recent_slot, recent_stride, HEADS, V_DIM, BLOCK_SIZE
        )


@triton.jit
def _keep(
    x, token, head, inside, d, own_ptr, recent_ptr, slot, recent_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Stored rows as they came: to the step's own, and to their sequence's current block if they are of it."""
    x = x.to(own_ptr.dtype.element_ty)
    mask = inside[:, None] & (d < DIM)[None, :]
    tl.store(own_ptr + ((token * HEADS + head) * DIM)[:, None] + d[None, :], x, mask=mask)
    row = slot // BLOCK_SIZE * recent_stride + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM
    tl.store(recent_ptr + row[:, None] + d[None, :], x, mask=mask & (slot >= 0)[:, None])


@triton.jit
def _rope_write(
    q_ptr,  # [T, Q_HEADS, HEAD_DIM], contiguous channels
    k_ptr,  # [T, KV_HEADS, HEAD_DIM], contiguous channels
    v_ptr,  # [T, KV_HEADS, V_DIM], contiguous channels
    cos_ptr,  # [T, columns]
    sin_ptr,  # [T, columns]
    q_weight_ptr,  # [HEAD_DIM]
    k_weight_ptr,  # [HEAD_DIM]
    out_ptr,  # [T, Q_HEADS, HEAD_DIM]
    k_pages_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    k_scale_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE] fp16
    v_pages_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, V_DIM]
    v_scale_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE] fp16
    slot_ptr,  # [T] int64
    own_k_ptr,  # [T, KV_HEADS, HEAD_DIM], as the others below where RECENT
    own_v_ptr,  # [T, KV_HEADS, V_DIM]
    recent_k_ptr,  # [num_slots, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    recent_v_ptr,  # [num_slots, KV_HEADS, BLOCK_SIZE, V_DIM]
    recent_slot_ptr,  # [T] int64
    k_offset_ptr,  # [KV_HEADS, HEAD_DIM] fp32
    k_factor_ptr,  # [KV_HEADS, HEAD_DIM] fp32
    v_offset_ptr,  # [KV_HEADS, V_DIM] fp32
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    angle_stride_t, angle_stride,  # the latter between the angles of neighbouring pairs
    k_stride, k_scale_stride, v_stride, v_scale_stride, recent_k_stride, recent_v_stride, q_eps, k_eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
    K_CODE_MAX: tl.constexpr, V_CODE_MAX: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TRANSFORM: tl.constexpr, V_OFFSET: tl.constexpr,
    K_ROTATION: tl.constexpr, V_ROTATION: tl.constexpr,  # channels rotated together, 1: no rotation
    RECENT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_TILES: tl.constexpr = (Q_HEADS + Q_ROWS - 1) // Q_ROWS
    KV_TILES: tl.constexpr = (KV_HEADS + KV_ROWS - 1) // KV_ROWS
    d = tl.arange(0, BLOCK_D)
    cos_ptr += token * angle_stride_t
    sin_ptr += token * angle_stride_t
    if tile < Q_TILES:
        _write_query(
            token, tile * Q_ROWS + tl.arange(0, Q_ROWS), d, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, out_ptr,
            k_factor_ptr, q_stride_t, q_stride_h, angle_stride, q_eps, Q_HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM,
            INTERLEAVED, NORM, OFFSET, CAST_FIRST, TRANSFORM, K_ROTATION,
        )  # fmt: skip
    else:
        head = (tile - Q_TILES) % KV_TILES * KV_ROWS + tl.arange(0, KV_ROWS)
        # not tested before the rows are loaded: the two latencies would add up
        slot = tl.load(slot_ptr + token) + tl.zeros_like(head)
        live = (head < KV_HEADS) & (slot >= 0)
        block, row_in_block = slot // BLOCK_SIZE, head * BLOCK_SIZE + slot % BLOCK_SIZE
        recent_slot = slot
        if RECENT:
            recent_slot = tl.load(recent_slot_ptr + token) + tl.zeros_like(head)
        if tile < Q_TILES + KV_TILES:
            _write_key(
                token, head, live, block, row_in_block, d, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_pages_ptr,
                k_scale_ptr, k_offset_ptr, k_factor_ptr, own_k_ptr, recent_k_ptr, recent_slot, k_stride_t, k_stride_h,
                angle_stride, k_stride, k_scale_stride, recent_k_stride, k_eps, KV_HEADS, HEAD_DIM, ROTARY_DIM,
                INTERLEAVED, NORM, OFFSET, CAST_FIRST, K_CODE_MAX, BLOCK_SIZE, TRANSFORM, K_ROTATION, RECENT,
            )  # fmt: skip
        else:
            _write_value(
                token, head, live, block, row_in_block, tl.arange(0, BLOCK_V), v_ptr, v_pages_ptr, v_scale_ptr,
                v_offset_ptr, own_v_ptr, recent_v_ptr, recent_slot, v_stride_t, v_stride_h, v_stride, v_scale_stride,
                recent_v_stride, KV_HEADS, V_DIM, V_CODE_MAX, BLOCK_SIZE, V_OFFSET, V_ROTATION, RECENT,
            )  # fmt: skip


@on_device
def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: LayerKV,
    slot_mapping: Tensor,
    *,
    rope: Rope,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    recent: RecentRows | None = None,
) -> Tensor:
    """`reference_fused.rope_write` on a GPU."""
    tokens, q_heads, head_dim = query.shape
    out = torch.empty((tokens, q_heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0:
        return out
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, (query.stride(), key.stride(), value.stride())
    assert rope.rotary_dim == 0 or cos.stride() == sin.stride(), (cos.stride(), sin.stride())
    (k_data, k_scale, k_max), (v_data, v_scale, v_max) = page_parts(layer.k), page_parts(layer.v)
    shape = _shape(query, value, layer.transform)
    tiles = triton.cdiv(q_heads, shape["Q_ROWS"]) + 2 * triton.cdiv(shape["KV_HEADS"], shape["KV_ROWS"])
    weights = (query if q_norm is None else q_norm.weight, key if k_norm is None else k_norm.weight)
    strides = (stride for x in (query, key, value) for stride in x.stride()[:2])
    kept: tuple[Tensor, ...] = (query,) * 5
    if layer.recent is not None:
        assert recent is not None
        pages = (layer.recent.k.tensor, layer.recent.v.tensor)
        kept = (recent.key, recent.value, *pages, recent.slot_mapping)
    _rope_write[(tokens, tiles)](
        query, key, value, cos, sin, *weights, out, k_data, k_scale, v_data, v_scale, slot_mapping, *kept,
        *_parameters(layer.transform, query),
        *strides,
        cos.stride(0),
        cos.stride(1) * rope.angle_step,
        *(x.stride(0) for x in (k_data, k_scale, v_data, v_scale, *kept[2:4])),
        *(0.0 if norm is None else norm.eps for norm in (q_norm, k_norm)),
        **shape,
        ROTARY_DIM=rope.rotary_dim,
        INTERLEAVED=rope.interleaved,
        NORM=q_norm is not None,
        OFFSET=0.0 if q_norm is None else q_norm.offset,
        CAST_FIRST=q_norm is not None and q_norm.cast_first,
        K_CODE_MAX=k_max,
        V_CODE_MAX=v_max,
        BLOCK_SIZE=layer.block_size,
        RECENT=layer.recent is not None,
        **overlap(out),
    )  # fmt: skip
    return out


def _shape(query: Tensor, value: Tensor, transform: KVTransform | None) -> dict[str, int | bool]:
    """Heads, channels, tiles and what a transform does, as the launch takes them."""
    tokens, q_heads, head_dim = query.shape
    kv_heads, v_dim = value.shape[1:]
    block_d = triton.next_power_of_2(head_dim)
    tile, num_warps = next(((tile, warps) for most, tile, warps in _TILES if tokens <= most), _PROMPT_TILE)
    rows = max(tile // block_d, 1)
    return {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "BLOCK_D": block_d,
        "BLOCK_V": triton.next_power_of_2(v_dim),
        "Q_ROWS": min(triton.next_power_of_2(q_heads), rows),
        "KV_ROWS": min(triton.next_power_of_2(kv_heads), rows),
        "TRANSFORM": transform is not None,
        "V_OFFSET": transform is not None and transform.v_offset is not None,
        "K_ROTATION": rotation_block(head_dim) if transform is not None and transform.rotates_k else 1,
        "V_ROTATION": rotation_block(v_dim) if transform is not None and transform.rotates_v else 1,
        "num_warps": num_warps,
    }


def _parameters(transform: KVTransform | None, unread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K offset, K factor and V offset; `unread` where there is none."""
    if transform is None:
        return unread, unread, unread
    return transform.k_offset, transform.k_factor, unread if transform.v_offset is None else transform.v_offset
