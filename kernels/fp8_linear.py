"""y = x W^T + b with e4m3 weights: the meaning, quantized activations, and torch's scaled matmul where GPUs have it.

Weights carry one scale per tensor, per output row, or per 128x128 block; activations are quantized with a scale from
the file (static), per row (dynamic), or not at all. On CUDA from compute capability 8.9, per-tensor and per-row
weights go to `torch._scaled_mm`; block scales, older GPUs and odd shapes keep the activations in 16 bits (`fp8_gemm`),
which is never less accurate. On CPU the definition runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.kernels.layout import FP8_MAX
from hf_paged.kernels.on_device import cuda_capability, multiprocessors

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """value = codes * scale, the scale repeated over `block` (rows, columns) elements."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [ceil(N / block[0]), ceil(K / block[1])] floating
    block: tuple[int, int]
    input_scale: Tensor | None  # [1] or [], static activation scale
    dynamic: bool  # quantize activations per row (per 128 columns with column blocks)


def dequantize_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """`[N, K]` weights; the fp32 product rounded once to `dtype`."""
    n, k = weight.codes.shape
    rows, columns = weight.block
    scale = weight.scale.float().repeat_interleave(min(rows, n), 0)[:n]
    scale = scale.expand(n, 1) if columns >= k else scale.repeat_interleave(columns, 1)[:, :k]
    return (weight.codes.float() * scale).to(dtype)


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """`[M, K]` -> e4m3 codes `[M, K]` and fp32 scales `[M, ceil(K / group)]`, absmax / 448; a zero group gets scale
    1.
    """
    m, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % group)).view(m, -1, group)
    scale = padded.abs().amax(dim=-1) / FP8_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return (padded / scale[..., None]).to(E4M3).view(m, -1)[:, :k], scale


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """`[M, K]` -> e4m3 codes with a fixed scale; values beyond the range saturate."""
    return (x.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(E4M3)


def fp8_linear_reference(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """The definition: quantized activations times quantized weights in fp32, rounded once to the dtype of `x`."""
    k = x.shape[1]
    if weight.input_scale is not None:
        values = quantize_static(x, weight.input_scale).float() * weight.input_scale.float()
    elif weight.dynamic:
        group = min(weight.block[1], k)
        codes, scale = quantize_activations(x, group)
        values = codes.float() * scale.repeat_interleave(group, 1)[:, :k]
    else:
        values = x.float()
    out = values @ dequantize_fp8(weight, torch.float32).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None, locks: Tensor) -> Tensor:
    """`[M, K]` -> `[M, N]` in the dtype of `x`. `locks`: as for `packed_linear`."""
    if not x.is_cuda:
        return fp8_linear_reference(x, weight, bias)
    if not quantizes_activations(x, weight):
        return _weight_only(x, weight, bias, locks)
    n = weight.codes.shape[0]
    if weight.input_scale is not None:
        codes = quantize_static(x, weight.input_scale)
        if weight.scale.numel() == 1:
            scales = weight.input_scale.float().reshape(()), weight.scale.float().reshape(())
            return _biased(torch._scaled_mm(codes, weight.codes.t(), *scales, out_dtype=x.dtype), bias)
        row_scale = weight.input_scale.float().reshape(1, 1).expand(x.shape[0], 1).contiguous()
    else:
        from hf_paged.kernels.fp8_quantize import quantize_activations_cuda  # a machine without CUDA needs no Triton

        codes, row_scale = quantize_activations_cuda(x)
    column_scale = weight.scale.float().reshape(1, -1).expand(1, n).contiguous()
    out = torch._scaled_mm(codes, weight.codes.t(), row_scale, column_scale, out_dtype=torch.bfloat16)  # all it offers
    return _biased(out.to(x.dtype), bias)


def _biased(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _weight_only(x: Tensor, weight: Fp8Weight, bias: Tensor | None, locks: Tensor) -> Tensor:
    """16-bit activations: one kernel that reads the codes once for few rows, dequantize and cuBLAS for many."""
    if cuda_capability(x.device) < (8, 9):  # Triton has no e4m3 below
        return torch.nn.functional.linear(x, dequantize_fp8(weight, x.dtype), bias)
    from hf_paged.kernels.fp8_gemm import BLOCK_K, fp8_dequantize, fp8_gemm
    from hf_paged.kernels.packed_linear import MAX_FUSED_ROWS
    from hf_paged.kernels.w4a16_tiles import choose_tiles

    (n, k), rows = weight.codes.shape, x.shape[0]
    aligned = weight.block[1] >= k or weight.block[1] % BLOCK_K == 0
    if rows > MAX_FUSED_ROWS or not aligned or x.dtype not in (torch.float16, torch.bfloat16):
        return torch.nn.functional.linear(x, fp8_dequantize(weight.codes, weight.scale, weight.block, x.dtype), bias)
    tiles = choose_tiles(rows, n, -(-k // BLOCK_K), multiprocessors(x.device))
    return fp8_gemm(x.contiguous(), weight.codes, weight.scale, weight.block, bias, locks, tiles)


def quantizes_activations(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether `fp8_linear` quantizes activations for this weight on this device, or keeps them in 16 bits."""
    if not x.is_cuda:
        return True
    n, k = weight.codes.shape
    return (
        (weight.dynamic or weight.input_scale is not None)
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.block[1] >= k
        and (weight.block[0] == 1 or weight.block[0] >= n)
        and n % 16 == 0
        and k % 16 == 0
        and cuda_capability(x.device) >= (8, 9)
    )
