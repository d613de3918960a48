"""Per-row e4m3 quantization of activations: one program per row, absolute maximum, then codes. Meaning:
`quantize_activations`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.on_device import on_device


@triton.jit
def quantize_activations_kernel(
    x,  # [M, K] floating, contiguous
    codes,  # [M, K] float8_e4m3fn
    scales,  # [M, 1] fp32
    K,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values)) / 448.0
    scale = tl.where(scale == 0, 1.0, scale)
    values = tl.clamp(values / scale, -448.0, 448.0)  # the quotient of the maximum may round above
    tl.store(codes + row * K + k, values.to(codes.dtype.element_ty), mask=k < K)
    tl.store(scales + row, scale)


@on_device
def quantize_activations_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[M, K]` -> e4m3 codes `[M, K]`, fp32 scales `[M, 1]`."""
    x = x.contiguous()
    m, k = x.shape
    codes = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    quantize_activations_kernel[(m,)](x, codes, scales, k, BLOCK=triton.next_power_of_2(k), num_warps=8)
    return codes, scales
