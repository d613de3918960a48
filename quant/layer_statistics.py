"""Statistics of a decoder layer's linears: one Hessian per group that reads the same activation, nothing else kept.

With a reference, the inputs that the full-precision model would have at the same place are taken in beside those of the
model as quantized so far: its own copy of the layer runs on its own hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.quant.decoder_layers import LayerInputs
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.layer_linears import LinearGroup, get_weight

COMPARED = 4  # windows on which a layer's output is compared before and after


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The full-precision model at one layer: the layer, which stays as it is, and its hidden states."""

    layer: nn.Module
    inputs: LayerInputs


@dataclass(kw_only=True)
class LayerRun:
    """A decoder layer that is being quantized, and what reaches it."""

    index: int
    layer: nn.Module
    inputs: LayerInputs
    reference: Reference | None
    stored: torch.dtype  # of the model's files: what a changed plain weight will be rounded to
    tell: Callable[[str], None]  # what is at work now
    scales: dict[LinearGroup, Tensor] = field(default_factory=dict)  # what a group's input was divided by

    @torch.no_grad()
    def hessians(self, groups: Sequence[LinearGroup], *, referenced: bool = True) -> dict[LinearGroup, Hessian]:
        """One pass over all windows, no further into the layer than the last group's linears.

        `referenced`: with the reference's inputs beside, where there is one.
        """
        reference = self.reference if referenced else None
        self.tell(f"inputs of {groups[0].names[0]}")
        found: dict[LinearGroup, Hessian] = {}
        expected: dict[LinearGroup, Tensor] = {}
        for group in groups:
            k = get_weight(self.layer.get_submodule(group.names[0])).shape[1]
            asymmetric = reference is not None and not group.routed  # routed: each model sends its own tokens
            found[group] = Hessian(k, device=self.inputs.device, asymmetric=asymmetric)

        def add(group: LinearGroup, x: Tensor) -> None:
            other = expected.pop(group, None)
            if other is not None and group in self.scales:
                other = (other / self.scales[group]).to(other.dtype)
            found[group].add(x, other)

        batches = _batches(self.index, self.layer, self.inputs, groups, add)
        if reference is None:
            for _ in batches:
                pass
            return found
        shared = [group for group in groups if not group.routed]
        layer, inputs = reference.layer, reference.inputs
        for _ in _batches(self.index, layer, inputs, shared, expected.__setitem__):
            next(batches)
        return found


class _Enough(Exception):
    """All that a pass was for has been seen."""


class _Stoppable(nn.Module):
    """A layer whose forward a hook may end; what it then returns means nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.layer(hidden, *args, **kwargs)
        except _Enough:
            return hidden


def _batches(
    index: int,
    layer: nn.Module,
    inputs: LayerInputs,
    groups: Sequence[LinearGroup],
    take: Callable[[LinearGroup, Tensor], object],
) -> Iterator[None]:
    """Run batch after batch, each group's input handed to `take`."""
    last = max((group.stage for group in groups), default=0)
    single = sum(group.stage == last for group in groups) == 1  # with several (experts) a pass runs to the end

    def hook(group: LinearGroup) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def taking(module: nn.Module, args: tuple[Any, ...]) -> None:
            take(group, args[0])
            if single and group.stage == last:
                raise _Enough

        return taking

    with ExitStack() as stack:
        for group in groups:
            handle = layer.get_submodule(group.names[0]).register_forward_pre_hook(hook(group))
            stack.callback(handle.remove)
        for _ in inputs.run(index, _Stoppable(layer)):
            yield


def layer_error(index: int, layer: nn.Module, inputs: LayerInputs, before: Sequence[Tensor]) -> float:
    """|layer_Q(x) - layer(x)|^2 / |layer(x) - x|^2 on the first windows."""
    wrong = whole = 0.0
    for (part, out), old in zip(inputs.run(index, layer, limit=COMPARED), before, strict=True):
        expected = old.to(out.device).float()
        wrong += float((out.float() - expected).square().sum())
        whole += float((expected - inputs.hidden[part].to(out.device).float()).square().sum())
    return wrong / max(whole, 1e-30)
