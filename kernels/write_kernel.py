"""Triton kernel that quantizes and stores the K and V rows of a step in one launch.

One program stores `ROWS` (token, KV head) rows of K or of V, see `store_tile.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.layout import UINT4_MAX, GroupPages, LayerKV, Pages, PlainPages
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.store_tile import store_tile

ROWS = 16


@triton.jit
def _store_rows(
    x_ptr,  # [T, kv_heads, HEAD_DIM], any strides
    pages_ptr,  # pages and scales as `store_tile` has them
    scale_ptr,
    slot_ptr,  # [T] int64
    num_rows, kv_heads, x_stride_t, x_stride_h, x_stride_d, page_stride, scale_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of K or of V."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // kv_heads
    head = row % kv_heads
    slot = tl.load(slot_ptr + token, mask=row < num_rows, other=-1)
    live = slot >= 0
    block = slot // BLOCK_SIZE
    row_in_block = head * BLOCK_SIZE + slot % BLOCK_SIZE
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    x_offset = token.to(tl.int64) * x_stride_t + head * x_stride_h
    x = tl.load(x_ptr + x_offset[:, None] + d[None, :] * x_stride_d, mask=mask, other=0.0)
    store_tile(
        x, mask, live, pages_ptr, scale_ptr, block, row_in_block, page_stride, scale_stride, d, HEAD_DIM, CODE_MAX
    )


@triton.jit(do_not_specialize=["num_rows"])  # it varies: no kernel per value
def _write_kv(
    key_ptr,  # [T, kv_heads, K_DIM], any strides
    value_ptr,  # [T, kv_heads, V_DIM], any strides
    k_ptr,  # pages and scales as `store_tile` has them
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    slot_ptr,  # [T] int64
    num_rows, kv_heads, key_stride_t, key_stride_h, key_stride_d, value_stride_t, value_stride_h, value_stride_d,
    k_stride, k_scale_stride, v_stride, v_scale_stride,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_CODE_MAX: tl.constexpr, V_CODE_MAX: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _store_rows(
            key_ptr, k_ptr, k_scale_ptr, slot_ptr, num_rows, kv_heads, key_stride_t, key_stride_h, key_stride_d,
            k_stride, k_scale_stride, K_DIM, K_BLOCK, BLOCK_SIZE, K_CODE_MAX, ROWS,
        )  # fmt: skip
    else:
        _store_rows(
            value_ptr, v_ptr, v_scale_ptr, slot_ptr, num_rows, kv_heads, value_stride_t, value_stride_h,
            value_stride_d, v_stride, v_scale_stride, V_DIM, V_BLOCK, BLOCK_SIZE, V_CODE_MAX, ROWS,
        )  # fmt: skip


@on_device
def write_kv(layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """`reference.write_kv` on a GPU: any strides of `key` and `value`, K and V of different head_dim or format."""
    tokens, kv_heads = key.shape[:2]
    if tokens == 0:
        return
    (k_data, k_scale, k_max), (v_data, v_scale, v_max) = page_parts(layer.k), page_parts(layer.v)
    k_dim, v_dim = key.shape[2], value.shape[2]
    grid = (triton.cdiv(tokens * kv_heads, ROWS), 2)
    _write_kv[grid](
        key,
        value,
        k_data,
        k_scale,
        v_data,
        v_scale,
        slot_mapping,
        tokens * kv_heads,
        kv_heads,
        *key.stride(),
        *value.stride(),
        k_data.stride(0),
        k_scale.stride(0),
        v_data.stride(0),
        v_scale.stride(0),
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=triton.next_power_of_2(k_dim),
        V_BLOCK=triton.next_power_of_2(v_dim),
        K_CODE_MAX=k_max,
        V_CODE_MAX=v_max,
        BLOCK_SIZE=layer.block_size,
        ROWS=ROWS,
        num_warps=4,
    )


def page_parts(pages: Pages) -> tuple[Tensor, Tensor, float]:
    """Data, scale (the data again where there is none, never read) and largest code (0: values, not codes)."""
    if isinstance(pages, PlainPages):
        return pages.data, pages.data, 0.0
    return pages.codes, pages.scale, UINT4_MAX if isinstance(pages, GroupPages) else pages.code_max
