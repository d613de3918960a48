"""Packed linears of one input as one packed product: a third of the launches for Q, K, V, and larger ones.

The joined codes become the storage and the original parameters rows of it, as for plain linears (`joined_linear.py` of
the package). Scales and zeros lie group by group, so those of the joined weight are a copy, 2 to 5% of the codes' size;
packed weights do not train, nobody writes them. With act-order the linears must sort their input channels alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_paged.kernels.packed_linear import lock_count, packed_linear
from hf_paged.kernels.packed_weight import TILE_N, PackedWeight, field_bits
from hf_paged.quant.linear import PackedLinear


class JoinedPackedLinear:
    """One product for several `PackedLinear` that `obstacle` has nothing against."""

    def __init__(self, linears: Sequence[PackedLinear], join_rows: Callable[[Sequence[Tensor]], Tensor]) -> None:
        """`join_rows` makes tensors the slices of one, along dimension 0, and returns that."""
        first = linears[0]
        self._sizes = [linear.out_features for linear in linears]
        zeros = None
        if any(linear.zeros is not None for linear in linears):
            zeros = torch.cat([_zeros(linear) for linear in linears], 1)
        self.weight = PackedWeight(
            packed=join_rows([linear.packed for linear in linears]),
            scales=torch.cat([linear.scales.data for linear in linears], 1),
            zeros=zeros,
            perm=first.perm,
            field_bits=field_bits(first.layout.bits),
            code_bits=first.layout.bits,
            group_size=first.layout.group_size,
            in_features=first.in_features,
            out_features=sum(self._sizes),
        )
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = join_rows(biases) if biases else None
        self.locks = torch.zeros(lock_count(sum(self._sizes)), dtype=torch.int32, device=first.packed.device)

    @property
    def order(self) -> Tensor | None:
        """`[K]` int32, the order of input channels that `ordered` takes, where there is one."""
        return self.weight.perm

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._product(x, self.weight)

    def ordered(self, x: Tensor) -> tuple[Tensor, ...]:
        """The products of an input whose channels lie in `order` already."""
        return self._product(x, replace(self.weight, perm=None))

    def _product(self, x: Tensor, weight: PackedWeight) -> tuple[Tensor, ...]:
        out = packed_linear(x.reshape(-1, x.shape[-1]), weight, self.bias, self.locks)
        return self.split(out.view(*x.shape[:-1], -1))

    @property
    def operands(self) -> tuple[PackedWeight, Tensor | None, Tensor]:
        """Weight, bias and locks, as kernels take them."""
        return self.weight, self.bias, self.locks

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """The parts of the product `out` `[..., N]`."""
        return out.split(self._sizes, -1)


def input_order(modules: Sequence[nn.Module]) -> Tensor | None:
    """The order in which all of `modules` take their input channels through `ordered`, None where there is none."""
    linears = [module for module in modules if type(module) is PackedLinear]
    if len(linears) != len(modules) or not all(_same_order(linear.perm, linears[0].perm) for linear in linears):
        return None
    return linears[0].perm


def inverse(order: Tensor) -> Tensor:
    """`[K]` int32: where the channels that `order` takes come to lie."""
    return torch.argsort(order).to(torch.int32)


def obstacle(modules: Sequence[nn.Module]) -> str | None:
    """Why these are not rows of one packed weight, or None."""
    linears = [module for module in modules if isinstance(module, PackedLinear)]
    if len(linears) != len(modules):
        return "a packed linear is joined with packed linears only"
    first = linears[0]
    for linear in linears:
        if (linear.layout.bits, linear.layout.group_size) != (first.layout.bits, first.layout.group_size):
            return "the packed weights differ in bits or group size"
        if linear.scales.dtype != first.scales.dtype or (linear.bias is None) != (first.bias is None):
            return "the packed weights differ in the dtype of scales or in the presence of a bias"
        if linear.packed.device != first.packed.device:
            return "the packed weights are on different devices"
        if not _same_order(linear.perm, first.perm):
            return "act-order sorts the input channels of the packed weights differently"
    if any(linear.out_features % TILE_N for linear in linears[:-1]):
        return f"rows of a packed weight are no multiple of {TILE_N}"
    return None


def _same_order(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _zeros(linear: PackedLinear) -> Tensor:
    if linear.zeros is not None:
        return linear.zeros.data
    return torch.full(linear.scales.shape, linear.packed_weight.middle, dtype=torch.uint8, device=linear.scales.device)
