"""The linears of a decoder layer: which are quantized, why others are not, and which read the same activation.

What the header alone can tell (sizes that a format cannot hold, skip patterns that match nothing) is told before any
weight is read. What only a forward can tell, who reads what, is found by watching one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.source_model import SourceModel
from hf_paged.quant.unfused_experts import UnfusedExperts

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_WORD = 32  # bits; other tools want whole words along both axes of a packed weight


@dataclass(frozen=True, kw_only=True)
class LinearGroup:
    """Linears of one layer that read the same activation, by their name in the layer."""

    names: tuple[str, ...]
    stage: int  # groups of one stage do not depend on one another
    source: str  # the module that is given the activation: the first linear, or the mixture that it is an expert of
    routed: bool  # of an expert: its tokens are those that the router sends


@dataclass(kw_only=True)
class LinearPlan:
    """Names are the model's, in full."""

    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # quantized linear -> (N, K)
    plain: dict[str, str] = field(default_factory=dict)  # weight in a decoder layer that stays as it is -> why

    def of_layer(self, layer: str) -> list[str]:
        """The quantized linears of one layer, by their names in it."""
        return [name.removeprefix(f"{layer}.") for name in self.shapes if name.startswith(f"{layer}.")]


def plan_linears(source: SourceModel, layers: Sequence[str], config: QuantizeConfig) -> LinearPlan:
    """Which linears of the decoder layers are quantized. `config` is resolved.

    Raises:
        ValueError: a skip pattern that matches no linear, a group size that the format cannot hold (the linear is
            named) or that no linear has channels for, or nothing left to quantize.
    """
    plan, matched = LinearPlan(), set()
    experts = _expert_counts(source.config)
    for layer in layers:
        for relative, module in source.model.get_submodule(layer).named_modules():
            name = f"{layer}.{relative}"
            weight = getattr(module, "weight", None)
            shape = linear_shape(module)
            if shape is None:
                if not isinstance(module, UnfusedExperts):
                    for key, value in module.named_parameters(recurse=False):
                        if value.dim() > 1:
                            plan.plain[name] = f"{type(module).__name__}.{key} is no linear layer"
                continue
            assert weight is not None
            names = (name, source.file_name.get(f"{name}.weight", name).removesuffix(".weight"))
            hits = [p for p in config.skip if any(re.search(p, one) for one in names)]
            matched.update(hits)
            reason = f"skip {hits[0]!r}" if hits else _unfit(*shape, config, experts)
            if reason is None:
                _check_group_size(name, shape[1], config)
                plan.shapes[name] = shape
            else:
                plan.plain[name] = reason
    for pattern in config.skip:
        if pattern not in matched:
            raise ValueError(f"skip={pattern!r} matches no linear of the decoder layers, such as {_example(plan)}")
    if not plan.shapes:
        name, reason = next(iter(plan.plain.items()), ("none", "the decoder layers have no linear"))
        raise ValueError(
            f"{type(source.model).__name__}: no linear is left to quantize; all {len(plan.plain)} stay plain, such as "
            f"{name}: {reason}"
        )
    assert config.group_size is not None
    widest = max(k for _, k in plan.shapes.values())
    if config.group_size > widest:
        raise ValueError(
            f"group_size={config.group_size} is more than the {widest} input channels of any linear; -1 takes them all"
        )
    return plan


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(out_features N, in_features K) of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return None


def get_weight(module: nn.Module) -> Tensor:
    """`[N, K]`: a view of the weight of a linear layer."""
    assert isinstance(module, nn.Linear | Conv1D), type(module)
    return module.weight.data.t() if isinstance(module, Conv1D) else module.weight.data


def watch_groups(layer: nn.Module, names: Sequence[str], forward: Callable[[], object]) -> list[LinearGroup]:
    """The groups among `names`, in the order in which `forward` (one call of the layer) reaches them.

    The experts of a mixture are grouped by what they are: a window does not reach them all. Other linears that were not
    called belong to no group.
    """
    order: list[str] = []
    inputs: dict[str, Tensor] = {}  # kept alive: an address then means one tensor

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if name not in inputs:
                order.append(name)
                inputs[name] = args[0]

        return hook

    modules = {name: layer.get_submodule(name) for name in names}
    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    keys = {name: _expert_key(layer, name) or (x.data_ptr(), *x.shape, *x.stride()) for name, x in inputs.items()}
    for name in names:  # experts that no token was sent to come with those of their mixture
        key = _expert_key(layer, name)
        if key is not None and name not in inputs:
            order.append(name)
            keys[name] = key
    return _numbered(order, keys)


def _numbered(order: Sequence[str], keys: dict[str, tuple[Any, ...]]) -> list[LinearGroup]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in order:
        groups.setdefault(keys[name], []).append(name)
    stages: dict[tuple[Any, ...], int] = {}
    found = []
    for key, names in groups.items():
        kind = key[:-1] if key[0] == "experts" else key  # all experts' first projections, then all their second ones
        stage = stages.setdefault(kind, len(stages))
        routed = key[0] == "experts"
        source = key[1] if routed and not key[2] else names[0]
        found.append(LinearGroup(names=tuple(names), stage=stage, source=source, routed=routed))
    return sorted(found, key=lambda group: group.stage)


def _expert_key(layer: nn.Module, name: str) -> tuple[Any, ...] | None:
    """("experts", module, whether it is the second projection, expert) for a linear of `UnfusedExperts`."""
    owner, _, rest = name.rpartition(".")
    parent, _, expert = owner.rpartition(".")
    module = layer.get_submodule(parent) if parent else None
    if not isinstance(module, UnfusedExperts):
        return None
    return ("experts", parent, rest == module.names[2], expert)


def _expert_counts(config: Any) -> set[int]:
    text = config.get_text_config(decoder=True)
    return {int(getattr(text, name)) for name in _EXPERT_COUNTS if getattr(text, name, None)}


def _unfit(n: int, k: int, config: QuantizeConfig, experts: set[int]) -> str | None:
    """Why a linear `[n, k]` stays plain, if it does."""
    if n in experts:
        return "a router: as many outputs as experts"
    if config.method == "fp8":
        return None
    assert config.bits is not None
    along_n = 8 if config.format == "awq" else 1 if config.format == "compressed-tensors" else _WORD
    along_k = 1 if config.format == "awq" else _WORD // config.bits if config.format == "compressed-tensors" else _WORD
    if n % along_n:
        return f"{n} output channels are no multiple of {along_n}, which {config.format} files pack together"
    if k % along_k:
        return f"{k} input channels are no multiple of {along_k}, which {config.format} files pack together"
    return None


def _check_group_size(name: str, k: int, config: QuantizeConfig) -> None:
    assert config.group_size is not None
    whole = config.method in ("awq", "int8")  # neither AutoAWQ's layout nor compressed-tensors has a short last group
    if whole and config.group_size != -1 and k % config.group_size:
        fitting = min(k & -k, 1 << (config.group_size.bit_length() - 1))  # a power of two: readers like those
        raise ValueError(
            f"group_size={config.group_size} does not divide the {k} input channels of {name}, which {config.method} "
            f"needs: group_size={fitting} does, --skip leaves such linears plain, method gptq "
            "takes any size"
        )


def _example(plan: LinearPlan) -> str:
    return next(iter([*plan.shapes, *plan.plain]), "none")
