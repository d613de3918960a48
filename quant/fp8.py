"""FP8 weights in a file: compressed-tensors `float-quantized` and Transformers' fine-grained blocks.

| weight | scale | granularity |
| --- | --- | --- |
| e4m3 [N, K] | weight_scale [], [1] or [1, 1], weight_scale_inv [] or [1] | tensor |
| e4m3 [N, K] | weight_scale [N, 1] or [N] | output channel |
| e4m3 [N, K] | weight_scale or weight_scale_inv [N / bn, K / bk] (rounded up) | blocks, usually 128 x 128 |

`input_scale` or `activation_scale` ([] or [1]) makes activations static; without it they are dynamic, unless the
config leaves them alone.
The tensors keep their names in the model, so nothing is converted at load or at save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_paged.kernels.fp8_linear import Fp8Weight, fp8_linear
from hf_paged.kernels.packed_linear import lock_count
from hf_paged.quant.damage import is_constant
from hf_paged.quant.fixed_dtypes import FixedDtypes
from hf_paged.quant.header import torch_dtype
from hf_paged.quant.layout import FLOATS, TensorSpec

STATIC_SCALES = ("input_scale", "activation_scale")  # compressed-tensors and AutoFP8; Transformers
FP8_SUFFIXES = ("weight", "weight_scale", "weight_scale_inv", *STATIC_SCALES)


@dataclass(frozen=True, kw_only=True)
class Fp8Layout:
    """One FP8 linear in a file. `block`: the elements (rows, columns) one scale covers."""

    in_features: int
    out_features: int
    block: tuple[int, int]
    dynamic: bool
    tensors: Mapping[str, TensorSpec]

    @property
    def scale_name(self) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in self.tensors else "weight_scale"

    @property
    def static_name(self) -> str | None:
        """The tensor that holds the scale of activations, if they are static."""
        return next((name for name in STATIC_SCALES if name in self.tensors), None)


def identify_fp8(
    name: str,
    found: Mapping[str, TensorSpec],
    in_features: int,
    out_features: int,
    *,
    block: tuple[int, int] = (128, 128),
    quantize_activations: bool = True,
) -> Fp8Layout:
    """The layout of module `name`. Raises ValueError naming the tensor, what was expected and what was found."""
    weight, (n, k) = found["weight"], (out_features, in_features)
    if weight.dtype != "F8_E4M3" or weight.shape != (n, k):
        raise ValueError(f"tensor {name}.weight: expected F8_E4M3 {[n, k]}, found {weight}")
    scale_name = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
    scale = found.get(scale_name)
    if scale is None:
        raise ValueError(f"tensor {name}.weight_scale is missing: expected the scale of F8_E4M3 {[n, k]}")
    blocks = (-(-n // block[0]), -(-k // block[1]))
    covers = {(): (n, k), (1,): (n, k), (1, 1): (n, k), (n,): (1, k), (n, 1): (1, k)}
    if scale_name == "weight_scale_inv":
        covers = {blocks: block, (): (n, k), (1,): (n, k)}  # a 1x1 grid of blocks is still a grid
    else:
        covers.setdefault(blocks, block)
    if scale.dtype not in FLOATS or scale.shape not in covers:
        raise ValueError(
            f"tensor {name}.{scale_name}: expected {' or '.join(FLOATS)} in one of "
            f"{[list(shape) for shape in covers]} for a weight {[n, k]}, found {scale}"
        )
    static_names = [suffix for suffix in STATIC_SCALES if suffix in found]
    for suffix in static_names:
        if found[suffix].dtype not in FLOATS or found[suffix].shape not in ((), (1,)):
            raise ValueError(f"tensor {name}.{suffix}: expected {' or '.join(FLOATS)} [1], found {found[suffix]}")
    unknown = sorted(set(found) - {"weight", scale_name, "bias", *static_names[:1]})
    if unknown:
        raise ValueError(f"tensor {name}.{unknown[0]} ({found[unknown[0]]}) does not belong to an FP8 linear")
    return Fp8Layout(
        in_features=k,
        out_features=n,
        block=covers[scale.shape],
        dynamic=quantize_activations and not static_names,
        tensors=dict(found),
    )


class Fp8Linear(FixedDtypes):
    """y = x W^T + b from e4m3 weights. Parameters carry the names and shapes of the file. It does not train."""

    weight: Tensor
    bias: Tensor | None
    locks: Tensor

    def __init__(self, layout: Fp8Layout, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.in_features, self.out_features = layout.in_features, layout.out_features
        for suffix, spec in layout.tensors.items():
            if suffix != "bias":
                value = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
                setattr(self, suffix, nn.Parameter(value, requires_grad=False))
        self.bias = nn.Parameter(torch.empty(layout.out_features, dtype=dtype), requires_grad=False) if bias else None

        self.register_buffer("locks", torch.zeros(lock_count(layout.out_features), dtype=torch.int32), persistent=False)

    @property
    def fp8_weight(self) -> Fp8Weight:
        """The weight as the kernels take it."""
        static = self.layout.static_name
        scale = getattr(self, self.layout.scale_name)
        return fp8_weight(self.layout, self.weight, scale, None if static is None else getattr(self, static))

    def check(self, name: str) -> None:
        """Raise ValueError for values that cannot be meant."""
        check_fp8(name, {suffix: getattr(self, suffix) for suffix in self.layout.tensors if suffix != "bias"})

    def forward(self, x: Tensor) -> Tensor:
        out = fp8_linear(x.reshape(-1, self.in_features), self.fp8_weight, self.bias, self.locks)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        static = "static" if self.layout.static_name else "dynamic" if self.layout.dynamic else "16-bit"
        return f"in_features={self.in_features}, out_features={self.out_features}, fp8, {static} activations"


def fp8_weight(layout: Fp8Layout, codes: Tensor, scale: Tensor, input_scale: Tensor | None) -> Fp8Weight:
    grid = (-(-layout.out_features // layout.block[0]), -(-layout.in_features // layout.block[1]))
    return Fp8Weight(
        codes=codes, scale=scale.view(grid), block=layout.block, input_scale=input_scale, dynamic=layout.dynamic
    )


def check_fp8(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for values that cannot be meant: NaN (all bits but the sign; e4m3 has no infinity), scales that
    are infinite, negative or all 0, and nothing but zeros under scales that differ. One scale may be 0, and so may a
    weight, of which every writer makes constant scales.
    """
    codes = tensors["weight"]
    pieces = codes.reshape(-1).view(torch.uint8).split(1 << 22)  # a sum of flags takes eight bytes for each
    bad = sum(int(((piece & 0x7F) == 0x7F).sum()) for piece in pieces)
    if bad:
        raise ValueError(f"tensor {name}.weight: expected finite values, found {bad} NaN of {codes.numel()}")
    empty = not any(bool((piece & 0x7F).any()) for piece in pieces)  # the first piece answers for nearly all
    for suffix, scale in tensors.items():
        if suffix == "weight":
            continue
        bad = int((~torch.isfinite(scale) | (scale < 0)).sum())
        if bad:
            raise ValueError(
                f"tensor {name}.{suffix}: expected finite scales >= 0, found {bad} others of {scale.numel()}"
            )
        if not empty and not bool(scale.any()):
            raise ValueError(f"tensor {name}.{suffix}: expected a scale other than 0: the file is damaged")
        if empty and not is_constant(scale):
            raise ValueError(f"tensor {name}.weight: expected a weight, found only zeros: the file is damaged")
