"""Quantizing the linears of one decoder layer: by their weights alone, by GPTQ, or by AWQ.

A quantizer leaves in the layer what a reader of the file will see, dequantized, so that running the layer again gives
the inputs of the next one. Statistics are one Hessian per group of linears that read the same activation: no activation
is kept. Device memory beside the layer: the Hessians of one stage, for AWQ those of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.quant.awq import awq_clip, awq_scales
from hf_paged.quant.decoder_layers import LayerInputs
from hf_paged.quant.gptq import gptq
from hf_paged.quant.grid import Grid
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.layer_linears import LinearGroup, get_weight
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import LinearReport
from hf_paged.quant.rtn import rtn, rtn_fp8
from hf_paged.quant.scale_folding import Folding, LayerTrace, find_folding
from hf_paged.quant.weight import QuantizedWeight, dequantize

Quantized = QuantizedWeight | tuple[Tensor, Tensor]  # the second: codes e4m3 [N, K] and scales [N, 1]


@dataclass(kw_only=True)
class LayerResult:
    """By names in the layer."""

    weights: dict[str, Quantized] = field(default_factory=dict)
    reports: dict[str, LinearReport] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # plain parameters that are no longer the source's

    def add(self, name: str, weight: Quantized, error: float, tokens: int | None, note: str | None = None) -> None:
        codes = weight.codes if isinstance(weight, QuantizedWeight) else weight[0]
        shape = (codes.shape[0], codes.shape[1])
        self.weights[name] = weight
        self.reports[name] = LinearReport(name=name, shape=shape, error=error, tokens=tokens, note=note)


def grid_of(config: QuantizeConfig, dtype: torch.dtype) -> Grid:
    """The grid that `config` (resolved) asks for; `dtype` is the model's in its files."""
    assert config.bits is not None and config.group_size is not None and config.sym is not None
    return Grid(
        bits=config.bits,
        group_size=config.group_size,
        sym=config.sym,
        mse=config.mse,
        scales_dtype=dtype if config.format == "compressed-tensors" else torch.float16,
        lowest_zero=1 if config.format == "gptq" else 0,
    )


def quantize_weights(layer: nn.Module, names: Sequence[str], config: QuantizeConfig, grid: Grid) -> LayerResult:
    """By the weights alone: rtn, int8, fp8."""
    result = LayerResult()
    for name in names:
        weight = get_weight(layer.get_submodule(name))
        with _naming(name):
            quantized: Quantized = rtn_fp8(weight) if config.method == "fp8" else rtn(weight, grid)
        actual = as_dense(quantized, torch.float32)
        error = float((actual - weight.float()).square().sum() / weight.float().square().sum().clamp(min=1e-30))
        result.add(name, quantized, error, None)
        weight.copy_(actual)
    return result


def quantize_gptq(
    index: int, layer: nn.Module, groups: Sequence[LinearGroup], inputs: LayerInputs, config: QuantizeConfig, grid: Grid
) -> LayerResult:
    """GPTQ, stage after stage: later linears see what earlier ones became (`true_sequential`), or all at once."""
    result = LayerResult()
    stages = sorted({group.stage for group in groups})
    for stage in stages if config.true_sequential else [None]:
        now = [group for group in groups if stage in (None, group.stage)]
        hessians = collect_hessians(index, layer, now, inputs)
        while now:
            group = now.pop(0)
            _gptq_group(layer, group, hessians.pop(group), config, grid, result)
    return result


def _gptq_group(
    layer: nn.Module, group: LinearGroup, hessian: Hessian, config: QuantizeConfig, grid: Grid, result: LayerResult
) -> None:
    weights = {name: get_weight(layer.get_submodule(name)) for name in group.names}
    energies = {name: _energy(weight, hessian) for name, weight in weights.items()}
    tokens, note = hessian.tokens, _sparse(hessian)
    with _naming(group.names[0]):
        factor = hessian.factor(damping=config.damping, act_order=config.act_order)
    for name, weight in weights.items():
        with _naming(name):
            quantized, errors = gptq(weight, factor, grid, static_groups=config.act_order and config.static_groups)
        result.add(name, quantized, float(errors.sum()) / energies[name], tokens, note)
        weight.copy_(as_dense(quantized, weight.dtype))


def quantize_awq(
    index: int,
    layer: nn.Module,
    groups: Sequence[LinearGroup],
    trace: LayerTrace,
    inputs: LayerInputs,
    config: QuantizeConfig,
    grid: Grid,
) -> LayerResult:
    """AWQ: scales for all groups first, folded into what produces their input, then clipping, then rounding."""
    result = LayerResult()
    hessians = collect_hessians(index, layer, groups, inputs)
    notes: dict[LinearGroup, str | None] = {}
    unclipped = set(trace.attention_inputs(groups))
    for group in groups:
        hessian, names = hessians[group], group.names
        folding = find_folding(layer, group, trace)
        notes[group] = folding if isinstance(folding, str) else _sparse(hessian)
        if isinstance(folding, Folding):
            with _naming(names[0]):
                weights = [get_weight(layer.get_submodule(name)) for name in names]
                scales = awq_scales(weights, hessian, grid, share=folding.share)
            result.changed |= folding.apply(layer, scales)
            hessian.scale_(scales)
            if folding.whole:  # v_proj, when this is o_proj; of q and k the product counts, not each output
                unclipped.discard(folding.producer)
    for group in groups:
        hessian = hessians.pop(group)
        for name in group.names:
            weight = get_weight(layer.get_submodule(name))
            with _naming(name):
                clip = config.clip and hessian.tokens > 0 and name not in unclipped
                quantized = rtn(awq_clip(weight, hessian, grid) if clip else weight, grid)
            actual = as_dense(quantized, torch.float32)
            error = _error(actual - weight.float(), hessian) / _energy(weight, hessian)
            result.add(name, quantized, error, hessian.tokens, notes[group])
            weight.copy_(actual)
    return result


@torch.no_grad()
def collect_hessians(
    index: int, layer: nn.Module, groups: Sequence[LinearGroup], inputs: LayerInputs
) -> dict[LinearGroup, Hessian]:
    """One pass over all windows, no further into the layer than the last group's linears."""
    hessians: dict[LinearGroup, Hessian] = {}
    last = max(group.stage for group in groups)
    ends = sum(group.stage == last for group in groups) == 1  # with several (experts) the pass runs to the end
    with ExitStack() as stack:
        for group in groups:
            first = layer.get_submodule(group.names[0])
            hessian = Hessian(get_weight(first).shape[1], device=inputs.device)
            hessians[group] = hessian
            hook = _adding(hessian, stop=ends and group.stage == last)
            stack.callback(first.register_forward_pre_hook(hook).remove)
        for _ in inputs.run(index, _Stoppable(layer)):
            pass
    return hessians


def as_dense(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """`[N, K]`: what a reader of the file computes with."""
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    codes, scales = weight
    return (codes.float() * scales.float()).to(dtype)


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


def _adding(hessian: Hessian, *, stop: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        hessian.add(args[0])
        if stop:
            raise _Enough

    return hook


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the linear's name before a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _energy(weight: Tensor, hessian: Hessian) -> float:
    """Squared output of the linear, summed over tokens and channels."""
    return max(_error(weight.float(), hessian), 1e-30)


def _error(difference: Tensor, hessian: Hessian) -> float:
    return float(((difference @ hessian.matrix) * difference).sum())


def _sparse(hessian: Hessian) -> str | None:
    if hessian.tokens == 0:
        return "no calibration token reached it: rounded to nearest"
    if hessian.tokens < hessian.in_features:
        return f"only {hessian.tokens} calibration tokens reached it"
    return None
