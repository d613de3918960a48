"""Triton kernel that turns attention over stored values into attention over values: `KVTransform.output`, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.hadamard_tile import hadamard_tile
from hf_paged.kernels.kv_transform import KVTransform, rotation_block
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

_TILE = 2048  # elements


@triton.jit(do_not_specialize=["num_rows"])  # it varies: no kernel per value
def _restore_output(
    out_ptr,  # [num_rows, V_DIM], contiguous; a row is a head of a token
    offset_ptr,  # [KV_HEADS, V_DIM] fp32
    num_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_ROTATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_V)
    mask = (row < num_rows)[:, None] & (c < V_DIM)[None, :]
    at = out_ptr + (row * V_DIM)[:, None] + c[None, :]
    out = hadamard_tile(tl.load(at, mask=mask, other=0.0).to(tl.float32), V_ROTATION)
    if V_OFFSET:
        head = row % HEADS // (HEADS // KV_HEADS)
        out += tl.load(offset_ptr + (head * V_DIM)[:, None] + c[None, :], mask=mask, other=0.0)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@on_device
def restore_output(out: Tensor, transform: KVTransform) -> Tensor:
    """`transform.output(out)` on a GPU, written over `out`, which must be contiguous."""
    tokens, heads, v_dim = out.shape
    if tokens == 0 or (transform.v_offset is None and not transform.rotates_v):
        return out
    assert out.is_contiguous(), out.stride()
    block_v = triton.next_power_of_2(v_dim)
    rows = max(_TILE // block_v, 1)
    _restore_output[(triton.cdiv(tokens * heads, rows),)](
        out,
        out if transform.v_offset is None else transform.v_offset,
        tokens * heads,
        HEADS=heads,
        KV_HEADS=len(transform.k_factor),
        V_DIM=v_dim,
        BLOCK_V=block_v,
        ROWS=rows,
        V_OFFSET=transform.v_offset is not None,
        V_ROTATION=rotation_block(v_dim) if transform.rotates_v else 1,
        num_warps=4,
        **overlap(out),
    )
    return out
