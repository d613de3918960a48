"""Several linears of one input as one matrix product, without a second copy of the weights.

The joined weight becomes the storage: the original parameters keep their identity and their values, and their data
become rows of it. The user's model, an optimizer, `save_pretrained` go on as before, and what they write is seen here.
Memory for one group of linears is needed on top while it is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_paged.fused_linear import FusedLinear
from hf_paged.quant.joined_packed import JoinedPackedLinear, input_order
from hf_paged.quant.joined_packed import obstacle as packed_obstacle
from hf_paged.quant.linear import PackedLinear


class Projections(Protocol):
    """`[..., in_features]` -> one tensor per part, `[..., its features]`, contiguous in their last dimension."""

    @property
    def order(self) -> Tensor | None:
        """`[in_features]` int32, the order of input channels that `ordered` takes (act-order), where there is one."""

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...

    def ordered(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same of an input whose channels lie in `order` already."""


class JoinedLinear:
    """One product for several `nn.Linear` of one input.

    `beside` is a weight that loaders put between theirs (the output projection between K and Q, by name): it is moved
    along, so that the joined weight fits the room that its parts leave and device memory does not fill with holes.
    """

    def __init__(self, linears: Sequence[nn.Linear], beside: Tensor | None = None) -> None:
        self._sizes = [linear.out_features for linear in linears]
        weight = join_parameters([linear.weight for linear in linears], beside)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.product = FusedLinear(weight=weight, bias=join_parameters(biases) if biases else None)

    order = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.product(x).split_with_sizes(self._sizes, -1)

    ordered = __call__


class SeparateLinears:
    """Any modules of one input, each called by itself."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)
        self.order = None if any(map(wrapped, modules)) else input_order(modules)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(x) for module in self._modules)

    def ordered(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(as_packed(module).ordered(x) for module in self._modules)


class SplitLinear:
    """One module whose output holds all parts, one after the other."""

    def __init__(self, module: nn.Module, sizes: Sequence[int]) -> None:
        self._module = module
        self._sizes = list(sizes)
        self.order = None if wrapped(module) else input_order([module])

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self._module(x).split(self._sizes, -1)
        return parts

    def ordered(self, x: Tensor) -> tuple[Tensor, ...]:
        return as_packed(self._module).ordered(x).split(self._sizes, -1)


def as_packed(module: nn.Module) -> PackedLinear:
    """One of modules that have an order."""
    assert isinstance(module, PackedLinear), type(module)
    return module


def join(
    modules: Sequence[nn.Module], shared: set[int], beside: nn.Module | None = None
) -> tuple[Projections, str | None]:
    """The projections of `modules`, joined where possible, and the reason where not.

    Args:
        shared: ids of parameters that more than one module uses; those cannot be rows of two weights.
        beside: a module whose weight lies between theirs in memory, see `JoinedLinear`.
    """
    packed = [module for module in modules if type(module) is PackedLinear]
    reason = _shared_obstacle(modules, shared) or (packed_obstacle(modules) if packed else _obstacle(modules))
    if reason is not None:
        return SeparateLinears(modules), reason
    if packed and not packed[0].packed.is_cuda:
        return SeparateLinears(modules), "packed weights are joined on CUDA only: each keeps a plain copy on a CPU"
    if packed:
        return JoinedPackedLinear(packed, join_parameters), None
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    movable = isinstance(beside, nn.Linear) and _shared_obstacle([beside], shared) is None
    return JoinedLinear(linears, beside.get_parameter("weight") if beside is not None and movable else None), None


def _shared_obstacle(modules: Sequence[nn.Module], shared: set[int]) -> str | None:
    """What stands against joining modules of any kind."""
    for module in modules:
        if type(module) not in (nn.Linear, PackedLinear):
            return f"{type(module).__module__}.{type(module).__name__} is no linear that can be joined"
        if why := wrapped(module):
            return why
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
                return f"a weight is a {type(parameter.data).__name__} of its own kind"
            if id(parameter) in shared:
                return "a weight is shared with another module"
            if parameter.is_meta:
                return "weights are on the meta device"
    return None


def _obstacle(modules: Sequence[nn.Module]) -> str | None:
    for name, plural in (("weight", "weights"), ("bias", "biases")):
        if len({_kind(getattr(module, name)) for module in modules}) > 1:
            return f"the {plural} differ in dtype, device or presence"
    return None


def _kind(parameter: nn.Parameter | None) -> tuple[torch.dtype, torch.device, torch.Size] | None:
    return None if parameter is None else (parameter.dtype, parameter.device, parameter.shape[1:])


def wrapped(module: nn.Module) -> str | None:
    """Why a module must not be bypassed: somebody hangs on its calls."""
    if "forward" in vars(module):
        return f"the forward of a {type(module).__name__} is wrapped (offloaded or patched)"
    if module._forward_hooks or module._forward_pre_hooks:
        return f"a {type(module).__name__} has forward hooks"
    return None


def join_parameters(parameters: Sequence[Tensor], beside: Tensor | None = None) -> Tensor:
    """One tensor whose rows are those of all parameters; their data become slices of it, bit for bit.

    At no time is a parameter without its values. On a GPU the parts first step aside, `beside` with them, so that the
    allocator can put the joined tensor where they were.
    """
    first = parameters[0].data
    rows = [parameter.shape[0] for parameter in parameters]
    shape = (sum(rows), *first.shape[1:])
    if _adjacent(parameters):  # joined before, for an earlier view of the same model
        return first.as_strided(shape, first.stride(), first.storage_offset())
    moved = [*parameters, beside] if beside is not None else list(parameters)
    if first.is_cuda:
        del first
        for parameter in moved:
            parameter.data = parameter.data.clone()
    joined = torch.cat([parameter.data for parameter in parameters])
    if joined.is_cuda and beside is not None:
        beside.data = beside.data.clone()
    for parameter, part in zip(parameters, joined.split(rows), strict=True):
        parameter.data = part
    return joined


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    at = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != at or not parameter.is_contiguous():
            return False
        at += parameter.numel() * parameter.element_size()
    return len(storages) == 1
