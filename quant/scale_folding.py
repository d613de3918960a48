"""Where AWQ's channel scales can go: into whatever produces a group's input, found by structure, proved by running.

Dividing the channels of an activation by s and multiplying the columns of all that read it by s changes nothing, if
what produces the activation can be divided: a norm's weight, rows of v_proj for o_proj (through attention, which mixes
tokens but not channels), rows of up_proj for down_proj. No names are looked at. Candidates are tried with factors of
two on one window: dividing the producer alone must change the layer's output, and multiplying the readers restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.quant.layer_linears import LinearGroup, get_weight, linear_shape
from hf_paged.quant.unfused_experts import UnfusedExperts

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of what the layer adds: rounding
_NOTICED = 1e-3  # of what the layer adds: dividing the producer alone must change at least that
_UNDONE = 0.1  # of that change, at most, is left when the readers are multiplied (powers of two: nearly nothing)


@dataclass(eq=False)
class LayerTrace:
    """One window through a layer: what every module was given and returned, and how to run it again."""

    rerun: Callable[[], Tensor]  # the layer's output for the window
    hidden: Tensor  # its input
    head_dim: int | None
    order: list[str] = field(default_factory=list)  # modules in the order they were first called
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def watch(cls, layer: nn.Module, hidden: Tensor, rerun: Callable[[], Tensor], head_dim: int | None) -> LayerTrace:
        trace = cls(rerun=rerun, hidden=hidden, head_dim=head_dim)
        handles = []
        for name, module in layer.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(trace._entering(name), with_kwargs=True))
                handles.append(module.register_forward_hook(trace._leaving(name)))
        try:
            trace.rerun()
        finally:
            for handle in handles:
                handle.remove()
        return trace

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in self.inputs:
                self.order.append(name)
                self.inputs[name] = args[0] if args else kwargs.get("hidden_states")

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.outputs.setdefault(name, output)

        return hook


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Scales of one group's input go into `producer`."""

    producer: str
    rows: Tensor | None  # [K] int64: the producer's output channel behind each input channel; None: a norm
    one_plus: bool  # a norm that multiplies by 1 + weight
    readers: tuple[str, ...]  # all modules with a weight that reads the activation

    @property
    def share(self) -> Tensor | None:
        """`[K]`: channels of one number come from one row, and so must have one scale."""
        if self.rows is None or len(torch.unique(self.rows)) == len(self.rows):
            return None
        return torch.unique(self.rows, return_inverse=True)[1]

    def apply(self, layer: nn.Module, scales: Tensor) -> set[str]:
        """Divide the producer and multiply the readers, in place; the names of the parameters that changed."""
        changed = self.divide(layer, scales)
        for name in self.readers:
            weight = _columns(layer.get_submodule(name))
            weight.copy_(weight.float() * scales)
            changed.add(f"{name}.weight")
        return changed

    def divide(self, layer: nn.Module, scales: Tensor) -> set[str]:
        module = layer.get_submodule(self.producer)
        bias = getattr(module, "bias", None)
        if self.rows is None:
            one = 1.0 if self.one_plus else 0.0
            weight: Tensor = module.weight.data  # type: ignore[assignment]  # a norm's, seen when found
            weight.copy_((weight.float() + one) / scales - one)
            divisor = scales
        else:
            divisor = torch.ones(get_weight(module).shape[0], device=scales.device)
            divisor[self.rows] = scales
            weight = get_weight(module)
            weight.copy_(weight.float() / divisor[:, None])
        names = {f"{self.producer}.weight"}
        if isinstance(bias, Tensor):
            bias.data.copy_(bias.data.float() / divisor)
            names.add(f"{self.producer}.bias")
        return names


def shared_inputs(groups: Sequence[LinearGroup], trace: LayerTrace) -> list[list[LinearGroup]]:
    """Groups that are scaled together: an expert's first linears read what the mixture is given, as others may do."""
    found: dict[object, list[LinearGroup]] = {}
    for group in groups:
        x = trace.inputs.get(group.source)
        found.setdefault((x.data_ptr(), x.numel()) if isinstance(x, Tensor) else group, []).append(group)
    return list(found.values())


@torch.no_grad()
def find_folding(layer: nn.Module, groups: Sequence[LinearGroup], trace: LayerTrace) -> Folding | str:
    """The folding of the scales of `groups`, which read one activation, or why there is none."""
    x = trace.inputs.get(groups[0].source)
    if not isinstance(x, Tensor):
        return "scales kept out: no token of the watched window reached it"
    k = x.shape[-1]
    readers = tuple(_readers(layer, x, k, trace))
    expected = trace.rerun()
    scale = (expected - trace.hidden).float().norm()
    for candidate in _candidates(layer, groups[0].source, readers, k, trace):
        if _holds(layer, candidate, trace, expected, scale):
            return candidate
    return "scales kept out: nothing before it can absorb them"


def _readers(layer: nn.Module, x: Tensor, k: int, trace: LayerTrace) -> Iterator[str]:
    """Modules with a matrix whose columns belong to the channels of `x`."""
    for name in trace.order:
        module = layer.get_submodule(name)
        if _same(trace.inputs[name], x) and isinstance(module, UnfusedExperts):
            yield from (f"{name}.{first}" for first in module.first_linears())
        if _same(trace.inputs[name], x) and isinstance(getattr(module, "weight", None), Tensor):
            weight = _columns(module)
            if weight.dim() == 2 and weight.shape[1] == k:
                yield name


def _candidates(
    layer: nn.Module, source: str, readers: tuple[str, ...], k: int, trace: LayerTrace
) -> Iterator[Folding]:
    """Norms whose output is read, then linears that ran before it, the latest first."""
    x, device = trace.inputs[source], trace.hidden.device
    before = trace.order[: trace.order.index(source)]
    for name in reversed(before):
        module = layer.get_submodule(name)
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (k,) and _same(trace.outputs.get(name), x):
            for one_plus in (False, True):
                yield Folding(producer=name, rows=None, one_plus=one_plus, readers=readers)
    for name in reversed(before):
        shape = linear_shape(layer.get_submodule(name))
        if shape is not None and name not in readers and _expert(name) == _expert(source):
            for rows in _row_maps(shape[0], k, trace.head_dim):
                yield Folding(producer=name, rows=rows.to(device), one_plus=False, readers=readers)


def _expert(name: str) -> list[str]:
    """The numbers in a linear's path: one expert never feeds another, and candidates cost a forward each."""
    return [part for part in name.split(".") if part.isdigit()]


def _row_maps(n: int, k: int, head_dim: int | None) -> Iterator[Tensor]:
    """Ways in which `k` input channels can come from rows of a linear with `n`: `[k]` int64 each."""
    channels = torch.arange(k)
    if n == k:
        yield channels
    if head_dim and k % head_dim == 0:
        heads = k // head_dim
        for kv_heads in (heads for heads in range(1, heads + 1) if (k // head_dim) % heads == 0):
            shared = channels // head_dim // (heads // kv_heads) * head_dim + channels % head_dim
            if n == kv_heads * head_dim and n < k:
                yield shared  # v_proj with fewer heads
            if n == (heads + 2 * kv_heads) * head_dim:
                yield (heads + kv_heads) * head_dim + shared  # q, k and v after one another
        if n == 3 * k:
            yield channels // head_dim * 3 * head_dim + 2 * head_dim + channels % head_dim  # q, k and v head by head
    if n == 2 * k:
        yield k + channels  # gate and up after one another, or interleaved
        yield channels
        yield 2 * channels + 1
        yield 2 * channels


def _holds(layer: nn.Module, folding: Folding, trace: LayerTrace, expected: Tensor, scale: Tensor) -> bool:
    """Whether dividing the producer by factors of two matters, and multiplying the readers undoes it."""
    k = _columns(layer.get_submodule(folding.readers[0])).shape[1]
    classes = folding.share if folding.share is not None else torch.arange(k, device=expected.device)
    scales = 1.0 + (classes % 3 == 0).float()  # 2 or 1
    names = [folding.producer, *folding.readers]
    kept = {n: p.detach().clone() for name in names for n, p in layer.get_submodule(name).named_parameters(name, False)}
    try:
        folding.divide(layer, scales)
        alone = float((trace.rerun() - expected).float().norm())
        for name in folding.readers:
            _columns(layer.get_submodule(name)).mul_(scales)
        restored = float((trace.rerun() - expected).float().norm())
    finally:
        for name, value in kept.items():
            layer.get_parameter(name).data.copy_(value)
    tolerance = _TOLERANCE[expected.dtype] * float(scale)
    return alone > _NOTICED * float(scale) and restored <= min(tolerance, _UNDONE * alone)


def _columns(module: nn.Module) -> Tensor:
    """`[..., K]`: the weight with its input channels last."""
    if linear_shape(module) is not None:
        return get_weight(module)
    weight: Tensor = module.weight.data  # type: ignore[assignment]  # callers looked for one
    return weight


def _same(a: Any, b: Any) -> bool:
    plain = isinstance(a, Tensor) and isinstance(b, Tensor)
    return plain and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
