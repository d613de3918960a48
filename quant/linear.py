"""The one packed linear: takes the place of `nn.Linear` (and GPT-2's Conv1D) whatever file the weight came from.

Everything it owns is a parameter or a buffer, so `.to()`, `deepcopy`, `state_dict` and accelerate's dispatch see all
of it, but for what a CPU derives from it, which copies of a model share (`CPUWeights`). Its state is the kernels'
layout; `file_tensors` gives back the layout it was read from. It does not train. On CPU the weight is used through
torch's int4 kernel (bf16, few rows) or a cached plain copy in the activation's dtype: 8 or 4 times the packed size,
built at the first forward; `cpu_cache = False` trades it for unpacking at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_paged.kernels.cpu_linear import cpu_linear
from hf_paged.kernels.packed_linear import lock_count, packed_linear
from hf_paged.kernels.packed_weight import PackedWeight, dequantize_reference, field_bits, packed_shape
from hf_paged.quant import formats
from hf_paged.quant.fixed_dtypes import FixedDtypes
from hf_paged.quant.layout import Layout
from hf_paged.quant.pack import pack, unpack
from hf_paged.quant.weight import QuantizedWeight

_INT4_MAX_ROWS = 32  # torch's CPU int4 kernel streams the weights once per row block: beyond this the plain copy wins


class CPUWeights:
    """Forms of one packed weight that a CPU computes with, made when they are first needed.

    No buffers: a view of a model (a deep copy that shares its parameters) uses the very same, and they are no part of
    what the model is.
    """

    def __init__(self) -> None:
        self.dense: Tensor | None = None  # [N, K] in the activation's dtype
        self.int4: tuple[Tensor, Tensor] | None = None  # words and (scale, offset) pairs of torch's int4 kernel

    def __deepcopy__(self, memo: dict[int, object]) -> CPUWeights:
        return self

    def __reduce__(self) -> tuple[type[CPUWeights], tuple[()]]:
        return CPUWeights, ()


class PackedLinear(FixedDtypes):
    """y = x W^T + b with W packed. Built empty (on any device) from a file's layout, filled by `load`."""

    perm: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    locks: Tensor

    def __init__(self, layout: Layout, *, bias: bool, dtype: torch.dtype, scales_dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.in_features, self.out_features = layout.in_features, layout.out_features
        self.cpu_cache = True
        k, n, groups = layout.in_features, layout.out_features, layout.groups
        self.packed = _parameter(packed_shape(k, n, field_bits(layout.bits)), torch.int32)
        self.scales = _parameter((groups, n), scales_dtype)
        self.zeros = _parameter((groups, n), torch.uint8)
        self.perm = _parameter((k,), torch.int32)
        self.bias = _parameter((n,), dtype) if bias else None
        self.register_buffer("locks", torch.zeros(lock_count(n), dtype=torch.int32), persistent=False)
        self.on_cpu = CPUWeights()

    @property
    def packed_weight(self) -> PackedWeight:
        """The weight as the kernels take it (shares the parameters)."""
        return PackedWeight(
            packed=self.packed,
            scales=self.scales,
            zeros=self.zeros,
            perm=self.perm,
            field_bits=field_bits(self.layout.bits),
            code_bits=self.layout.bits,
            group_size=self.layout.group_size,
            in_features=self.in_features,
            out_features=self.out_features,
        )

    @property
    def operands(self) -> tuple[PackedWeight, Tensor | None, Tensor]:
        """Weight, bias and locks, as kernels take them."""
        return self.packed_weight, self.bias, self.locks

    def load(self, weight: QuantizedWeight) -> None:
        """Take over a weight read from a file. `zeros` and `perm` stay only where the weight needs them."""
        self.on_cpu = CPUWeights()
        for name, value in packed_parameters(weight).items():
            setattr(self, name, None if value is None else nn.Parameter(value, requires_grad=False))

    def file_tensors(self) -> dict[str, Tensor]:
        """The tensors of the file layout this linear was read from, by suffix; the bias included."""
        out = formats.write(self.layout, unpack(self.packed_weight))
        if self.bias is not None:
            out["bias"] = self.bias.detach()
        return out

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        if x.is_cuda or torch.compiler.is_compiling():
            out = packed_linear(flat, self.packed_weight, self.bias, self.locks)
            return out.view(*x.shape[:-1], self.out_features)
        return self.ordered(x if self.perm is None else x.index_select(-1, self.perm))

    def ordered(self, x: Tensor) -> Tensor:
        """The forward of an input whose channels lie in the order of `perm` already."""
        flat = x.reshape(-1, self.in_features)
        if x.is_cuda or not self.cpu_cache:
            out = packed_linear(flat, replace(self.packed_weight, perm=None), self.bias, self.locks)
        else:
            out = self._from_plain_copy(flat)
        return out.view(*x.shape[:-1], self.out_features)

    def _from_plain_copy(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.shape[0] <= _INT4_MAX_ROWS and self._fits_int4():
            if self.on_cpu.int4 is None:
                with torch.inference_mode(False):
                    self.on_cpu.int4 = _int4_weights(self.packed_weight)
            words, scales = self.on_cpu.int4
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), words, self.layout.group_size, scales)
            return out if self.bias is None else out + self.bias
        if self.on_cpu.dense is None or self.on_cpu.dense.dtype != x.dtype:
            with torch.inference_mode(False):
                self.on_cpu.dense = dequantize_reference(self.packed_weight, x.dtype)
        if x.requires_grad:  # something before it is trained
            return nn.functional.linear(x, self.on_cpu.dense, self.bias)
        return cpu_linear(x, self.on_cpu.dense, self.bias)

    def _fits_int4(self) -> bool:
        group = self.layout.group_size
        return (
            self.layout.bits == 4
            and group in (32, 64, 128, 256)
            and self.in_features % group == 0
            and self.out_features % 16 == 0
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        self.on_cpu = CPUWeights()  # made again where it is needed
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        layout = self.layout
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{layout.kind} {layout.bits} bits, group_size={layout.group_size}, act_order={self.perm is not None}"
        )


def packed_parameters(weight: QuantizedWeight) -> dict[str, Tensor | None]:
    """The parameters of a packed linear, by name."""
    packed = pack(weight)
    return {"packed": packed.packed, "scales": packed.scales, "zeros": packed.zeros, "perm": packed.perm}


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _int4_weights(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes and (scale, (8 - zero) * scale) pairs as torch's CPU int4 kernel takes them: w = (code - 8) * scale +
    offset.
    """
    quantized = unpack(weight)
    codes = quantized.codes if weight.perm is None else quantized.codes[:, weight.perm.long()]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    scales = weight.scales.float()
    offset = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
    return packed, torch.stack([scales, offset], dim=-1).to(torch.bfloat16).contiguous()
