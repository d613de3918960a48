"""Quantizing the linears of one decoder layer: by their weights alone, by GPTQ, or by AWQ.

A quantizer leaves in the layer what a reader of the file will see, dequantized, so that running the layer again gives
the inputs of the next one. Device memory beside the layer: the Hessians of one stage and one factorisation; where all
groups are looked at together (AWQ's scales) those of all groups before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hf_paged.quant.awq import awq_round, awq_scales
from hf_paged.quant.descent import descend
from hf_paged.quant.gptq import gptq
from hf_paged.quant.grid import Grid
from hf_paged.quant.hessian import Hessian
from hf_paged.quant.layer_linears import LinearGroup, get_weight
from hf_paged.quant.layer_statistics import LayerRun
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import LinearReport
from hf_paged.quant.rtn import check_weight, rtn, rtn_fp8
from hf_paged.quant.scale_folding import Folding, LayerTrace, find_folding, shared_inputs
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
    assert config.bits is not None and config.group_size is not None
    assert config.sym is not None and config.mse is not None
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
            quantized: Quantized = rtn_fp8(weight, grid.scales_dtype) if config.method == "fp8" else rtn(weight, grid)
        result.add(name, quantized, _weight_error(quantized, weight), None)
        weight.copy_(as_dense(quantized, torch.float32))
    return result


class CalibratedQuantizer:
    """GPTQ or AWQ on one layer. `trace` is needed where scales are searched."""

    def __init__(
        self,
        run: LayerRun,
        groups: Sequence[LinearGroup],
        trace: LayerTrace | None,
        config: QuantizeConfig,
        grid: Grid,
    ) -> None:
        self.run, self.groups, self.trace, self.config, self.grid = run, groups, trace, config, grid
        self._coarse = replace(grid, mse=False)  # for searches that round the weight once per candidate
        self.result = LayerResult()
        self._notes: dict[LinearGroup, str] = {}  # why a group's scales were kept out

    def quantize(self) -> LayerResult:
        """Scales first; then stage after stage: later linears see what earlier ones became, or all at once."""
        if self.trace is not None:
            self._scale(self.trace)
        stages = sorted({group.stage for group in self.groups}) if self.config.true_sequential else [None]
        for stage in stages:
            now = [group for group in self.groups if stage in (None, group.stage)]
            hessians = self.run.hessians(now)
            for group in now:
                self._quantize_group(group, hessians.pop(group))
        return self.result

    def _quantize_group(self, group: LinearGroup, hessian: Hessian) -> None:
        config, weights = self.config, {name: self._weight(name) for name in group.names}
        energies = {name: _energy(weight, hessian) for name, weight in weights.items()}
        note = self._note(group, hessian)
        with _naming(group.names[0]):
            factor = hessian.factor(damping=config.damping, act_order=bool(config.act_order))
        matrix = factor.matrix() if config.method == "awq" else None
        static = bool(config.act_order) and config.static_groups
        assert config.asymmetry is not None
        for name, weight in weights.items():
            self.run.tell(name)
            with _naming(name):
                check_weight(weight, self.grid.scales_dtype)
                target = factor.target(weight, config.asymmetry)
                if matrix is None:
                    quantized, errors = gptq(target, factor, self.grid, static_groups=static)
                    error = float(errors.sum())
                else:
                    rows = target.t()
                    quantized = awq_round(rows, matrix, self.grid) if config.clip else rtn(rows, self.grid)
                    error = _error(dequantize(quantized, torch.float32) - rows, matrix)
                if config.descent:
                    quantized, errors = descend(quantized, target, factor, self.grid)
                    error = float(errors.sum())
            share = error / energies[name] if hessian.tokens else _weight_error(quantized, weight)  # 0 over 0
            self.result.add(name, quantized, share, hessian.tokens, note)
            weight.copy_(as_dense(quantized, weight.dtype))

    def _scale(self, trace: LayerTrace) -> None:
        """Search and fold the scales of every group that something can absorb."""
        layer, hessians = self.run.layer, self.run.hessians(self.groups, referenced=False)
        for groups in shared_inputs(self.groups, trace):
            folding = find_folding(layer, groups, trace)
            if not isinstance(folding, Folding):
                self._notes |= dict.fromkeys(groups, folding)
                continue
            names = [name for group in groups for name in group.names]
            self.run.tell(f"scales of {names[0]}")
            with _naming(names[0]):
                statistics = _merged([hessians.pop(group) for group in groups])
                scales = awq_scales([self._weight(n) for n in names], statistics, self._coarse, share=folding.share)
            self._note_changes(folding.apply(layer, scales))
            for group in groups:
                self.run.scales[group] = scales

    def _note_changes(self, names: set[str]) -> None:
        """Plain parameters go on as the file will hold them; weights of quantized linears are rounded later anyway."""
        quantized = {f"{name}.weight" for group in self.groups for name in group.names}
        for name in names - quantized:
            value = self.run.layer.get_parameter(name).data
            value.copy_(value.to(self.run.stored))
            self.result.changed.add(name)

    def _weight(self, name: str) -> Tensor:
        return get_weight(self.run.layer.get_submodule(name))

    def _note(self, group: LinearGroup, hessian: Hessian) -> str | None:
        if hessian.tokens == 0:
            return "no calibration token reached it: rounded to nearest"
        if hessian.tokens < hessian.in_features:
            return "fewer calibration tokens than input channels reached it"
        return self._notes.get(group)


def as_dense(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """`[N, K]`: what a reader of the file computes with."""
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    codes, scales = weight
    return (codes.float() * scales.float()).to(dtype)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the linear's name before a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _merged(hessians: Sequence[Hessian]) -> Hessian:
    """The statistics of all, as if every linear had seen every token."""
    if len(hessians) == 1:
        return hessians[0]
    merged = Hessian(hessians[0].in_features, device=hessians[0].matrix.device)
    for hessian in hessians:
        merged.merge(hessian)
    return merged


def _energy(weight: Tensor, hessian: Hessian) -> float:
    """Squared output of the linear, summed over tokens and channels."""
    return max(_error(weight.float(), hessian.matrix), 1e-30)


def _weight_error(quantized: Quantized, weight: Tensor) -> float:
    """Relative, squared, of the weights alone."""
    wrong = as_dense(quantized, torch.float32) - weight.float()
    return float(wrong.square().sum() / weight.float().square().sum().clamp(min=1e-30))


def _error(difference: Tensor, matrix: Tensor) -> float:
    return float(((difference @ matrix) * difference).sum())
