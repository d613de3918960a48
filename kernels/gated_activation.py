"""Triton kernel for act(gate) * up on the two halves of one projection, or on two projections.

An order of the result's channels is that of an act-order weight behind. Few rows are read in it from memory, which
costs little; many rows get a kernel of their own behind this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.gather_channels import gather_channels
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.overlap import begin, overlap

BLOCK = 1024  # columns per program
MAX_ORDERED_ROWS = 16


@triton.jit
def _gated_activation(
    gate_ptr,  # [T, N], rows gate_stride apart
    up_ptr,  # [T, N], rows up_stride apart
    out_ptr,  # [T, N]
    order_ptr,  # [N] int32, with ORDER
    gate_stride,
    up_stride,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < N
    source = d
    if ORDER:  # part of a weight, which no kernel of a step writes
        source = tl.load(order_ptr + d, mask=mask, other=0)
    begin(OVERLAP)
    gate = tl.load(gate_ptr + row * gate_stride + source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + source, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        act = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # (1 + tanh(inner)) / 2
    act = act.to(out_ptr.dtype.element_ty).to(tl.float32)  # the model rounds the activation, too
    tl.store(out_ptr + row * N + d, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


@on_device
def gated_activation(gate: Tensor, up: Tensor, kind: str, order: Tensor | None) -> Tensor:
    """`reference_fused.gated_activation` on a GPU."""
    n = gate.shape[-1]
    if order is not None and gate.numel() > MAX_ORDERED_ROWS * n:
        return gather_channels(gated_activation(gate, up, kind, None), order)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_rows, up_rows = gate.reshape(-1, n), up.reshape(-1, n)
    assert gate_rows.stride(1) == up_rows.stride(1) == 1, (gate.stride(), up.stride())
    _gated_activation[(gate_rows.shape[0], triton.cdiv(n, BLOCK))](
        gate_rows,
        up_rows,
        out,
        gate_rows if order is None else order,
        gate_rows.stride(0),
        up_rows.stride(0),
        N=n,
        KIND=kind,
        BLOCK=BLOCK,
        ORDER=order is not None,
        num_warps=4,
        **overlap(out),
    )
    return out
