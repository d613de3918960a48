"""`hf_paged.quantize`: a checkpoint of a model in 2, 3, 4 or 8 bits that other tools load, made layer by layer.

One decoder layer is on the device at a time: read from the shards, quantized on what the layers before it hand on, run
once more as quantized, written, and forgotten. The peak is one layer, its Hessians with one factorisation, and the
hidden states of the calibration windows, which the CPU's memory holds when they do not fit; it also holds one output
file at a time. A run that was killed continues where it was (`resume`): finished layers are read back and run.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_paged.config import refuse
from hf_paged.quant import decoder_layers as decoder
from hf_paged.quant import layer_quantizers as methods
from hf_paged.quant.calibration import Calibration, load_calibration
from hf_paged.quant.decoder_layers import LayerInputs
from hf_paged.quant.export_format import file_tensors, fp8_tensors, quantization_config, read_tensors
from hf_paged.quant.header import torch_dtype
from hf_paged.quant.layer_linears import LinearPlan, get_weight, plan_linears, watch_groups
from hf_paged.quant.layer_quantizers import LayerResult
from hf_paged.quant.layer_statistics import COMPARED, LayerRun, Reference, layer_error
from hf_paged.quant.partial_output import PartialOutput, check_output, check_space
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_progress import QuantizeProgress
from hf_paged.quant.quantize_report import LayerReport, QuantizeReport, package_versions, peak_cpu_bytes
from hf_paged.quant.scale_folding import LayerTrace
from hf_paged.quant.source_model import SourceModel
from hf_paged.quant.weight import QuantizedWeight

_OVERHEAD = 1.05  # scales and zero points, headers: of the disk space that is asked for


def quantize(
    model: str | Path | PreTrainedModel,
    config: QuantizeConfig | None = None,
    calibration: str | Path | Sequence[str] | Tensor | None = None,
    *,
    output: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    resume: bool = False,
    progress: bool = True,
) -> QuantizeReport:
    """Quantize the linears of a model's decoder layers into the checkpoint folder `output`.

    Args:
        model: a folder or hub name, or a model in memory (its files are written beside the output first).
        calibration: for gptq and awq, see `load_calibration`.
        tokenizer: of the calibration text; None = the one in the model's folder.
        device: where layers are quantized; None = the first GPU, else the CPU.
        resume: continue an unfinished run into the same output, or start.
        progress: on stderr, a bar on a terminal and a line per layer elsewhere.

    Raises:
        ValueError: settings, a model or a calibration that cannot be used; told before any weight is read, except for
            weights and activations that are not finite. Nothing is left behind, unless `output` was filled by somebody
            else meanwhile: then what was finished is kept for `resume`, as it is after every other error.
        OSError: no such model, or no room.
    """
    begin = time.monotonic()
    if not isinstance(config, QuantizeConfig | None):
        refuse("config", config, "a QuantizeConfig")
    output = Path(output)
    check_output(output)
    target = _device(device)
    with _files_of(model, output) as (path, called):
        source = SourceModel(path)
        context = getattr(source.config.get_text_config(decoder=True), "max_position_embeddings", None)
        config = (config or QuantizeConfig()).resolved(context)
        layers = decoder.find_decoder_layers(source.model)
        source.refuse_missing(layers)
        names = [f"{layers}.{index}" for index, _ in source.model.get_submodule(layers).named_children()]
        plan = plan_linears(source, names, config)
        windows = _calibration(config, calibration, source, context, tokenizer)
        check_space(output, _bytes_needed(source, plan, config))
        settings = {
            "model": source.fingerprint(),
            "config": json.loads(json.dumps(config.as_dict())),
            "calibration": windows.sha256 if windows else None,
            "versions": package_versions(),
        }
        run = _Run(source, layers, names, plan, config, PartialOutput(output, settings, resume=resume), target)
        with torch.no_grad():
            with run.partial.discarded_on(ValueError), QuantizeProgress(len(names), shown=progress) as run.progress:
                reports = run.quantize_layers(windows)
            return run.finish(reports, windows, called, begin)


class _Run:
    """One quantization; everything was checked."""

    def __init__(
        self,
        source: SourceModel,
        layers: str,
        names: Sequence[str],
        plan: LinearPlan,
        config: QuantizeConfig,
        partial: PartialOutput,
        device: torch.device,
    ) -> None:
        self.source, self.layers, self.names, self.plan, self.config = source, layers, names, plan, config
        self.partial, self.device = partial, device
        stored = source.config.dtype or torch.float32
        self.stored = stored  # dtype of the model in its files
        self.dtype = stored if device.type == "cuda" else torch.float32  # 16-bit products are slow and rounded on CPUs
        self.inputs: LayerInputs | None = None  # of the layer at hand, in the model as quantized so far
        self.reference: LayerInputs | None = None  # the same in the full-precision model
        self.resumed = 0
        self.progress = QuantizeProgress(len(names), shown=False)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def quantize_layers(self, calibration: Calibration | None) -> list[LayerReport]:
        """Every layer in turn; those that an earlier run finished are only run."""
        finished = [self.partial.finished(index) for index in range(len(self.names))]
        if calibration is not None and None in finished:
            self.progress.doing("embeddings")
            self.inputs = decoder.embed(self.source, self.layers, calibration.input_ids, self.device, self.dtype)
            if self.config.asymmetry:
                self.reference = self.inputs.copy()
        reports: list[LayerReport] = []
        for index, name in enumerate(self.names):
            report = finished[index]
            if report is None:
                report = self._quantize_layer(index, name)
            else:
                self.resumed += 1
                if None in finished[index:]:
                    self._rerun_layer(index, name)
            reports.append(report)
            self.progress.advance(report)
        return reports

    def _quantize_layer(self, index: int, name: str) -> LayerReport:
        begin = time.monotonic()
        relative = self.plan.of_layer(name)
        if not relative:
            self._rerun_layer(index, name)
            report = LayerReport(index=index, name=name, linears=(), error=None, seconds=time.monotonic() - begin)
            self.partial.write_layer({}, report)
            return report
        layer = self.source.model.get_submodule(name)
        self.source.fill(name, self.device, self.dtype)
        error = None
        try:
            if self.inputs is None:
                grid = methods.grid_of(self.config, self.stored)
                result = methods.quantize_weights(layer, relative, self.config, grid)
            else:
                result, error = self._with_inputs(index, layer, relative, self.inputs)
            tensors = self._file_tensors(name, layer, result)
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from problem
        finally:
            self.source.empty(name)
        linears = tuple(result.reports[one] for one in relative)
        report = LayerReport(index=index, name=name, linears=linears, error=error, seconds=time.monotonic() - begin)
        self.partial.write_layer(tensors, report)
        return report

    def _with_inputs(
        self, index: int, layer: nn.Module, relative: Sequence[str], inputs: LayerInputs
    ) -> tuple[LayerResult, float]:
        """Quantize a filled layer by what reaches it, hand on what it makes of that, and measure its error."""
        reference = None
        if self.reference is not None:
            reference = Reference(layer=copy.deepcopy(layer), inputs=self.reference)
        before = [out.cpu() for _, out in inputs.run(index, layer, limit=COMPARED)]
        run = LayerRun(
            index=index,
            layer=layer,
            inputs=inputs,
            reference=reference,
            stored=self.stored,
            tell=self.progress.doing,
        )
        result = self._calibrated(run, relative)
        error = layer_error(index, layer, inputs, before)
        self.progress.doing("outputs of the layer")
        if reference is not None:
            reference.inputs.advance(index, reference.layer)
        inputs.advance(index, layer)
        return result, error

    def _calibrated(self, run: LayerRun, relative: Sequence[str]) -> LayerResult:
        window = run.inputs.hidden[:1].to(self.device)

        def once() -> Tensor:
            return run.inputs.call(run.index, run.layer, window)

        groups = watch_groups(run.layer, relative, once)
        missing = set(relative).difference(*(group.names for group in groups))
        if missing:
            raise ValueError(f"{sorted(missing)} were not called in a forward: leave them plain with --skip")
        trace = None
        if self.config.method == "awq" or self.config.scale:
            trace = LayerTrace.watch(run.layer, window, once, _head_dim(self.source.config))
        grid = methods.grid_of(self.config, self.stored)
        return methods.CalibratedQuantizer(run, groups, trace, self.config, grid).quantize()

    def _file_tensors(self, name: str, layer: nn.Module, result: LayerResult) -> dict[str, Tensor]:
        """What replaces the source's tensors of this layer, by the names in the final files."""
        tensors: dict[str, Tensor] = {}
        for relative, weight in result.weights.items():
            base = self.source.file_name[f"{name}.{relative}.weight"].removesuffix(".weight")
            if isinstance(weight, QuantizedWeight):
                parts = file_tensors(base, self.config.format, weight)
            else:
                parts = fp8_tensors(*weight, self.stored)
            tensors |= {f"{base}.{suffix}": tensor for suffix, tensor in parts.items()}
        for relative in result.changed:
            key = self.source.file_name[f"{name}.{relative}"]
            stored = torch_dtype(self.source.header.specs[key].dtype)
            tensors[key] = layer.get_parameter(relative).detach().to("cpu", stored).contiguous()
        return tensors

    def _rerun_layer(self, index: int, name: str) -> None:
        """Run a layer as it was written (or as it is, with nothing to quantize)."""
        if self.inputs is None:
            return
        layer = self.source.model.get_submodule(name)
        self.source.fill(name, self.device, self.dtype)
        try:
            if self.reference is not None:
                self.reference.advance(index, layer)
            written = self.partial.read_layer(index) if self.partial.finished(index) else {}
            for relative in self.plan.of_layer(name):
                key = self.source.file_name[f"{name}.{relative}.weight"]
                weight = get_weight(layer.get_submodule(relative))
                try:
                    dense = read_tensors(self.config, key.removesuffix(".weight"), written, weight.shape)
                except (ValueError, KeyError) as error:  # what the other layers cost is not thrown away for this one
                    raise self.partial.damaged(index, error) from error
                weight.copy_(dense.to(self.dtype))
            by_key = {key: model_name for model_name, key in self.source.file_name.items() if key in written}
            for key, model_name in by_key.items():
                if model_name.removesuffix(".weight") not in self.plan.shapes:
                    layer.get_parameter(model_name.removeprefix(f"{name}.")).data.copy_(written[key])
            self.inputs.advance(index, layer)
        finally:
            self.source.empty(name)

    def finish(
        self, reports: Sequence[LayerReport], calibration: Calibration | None, model: str, begin: float
    ) -> QuantizeReport:
        """Put the final folder together, with its report."""
        total = self.partial.assemble(self._all_tensors())
        cuda = self.device.type == "cuda"
        report = QuantizeReport(
            model=model,
            output=str(self.partial.output),
            settings=self.config.as_dict(),
            versions=package_versions(),
            device=torch.cuda.get_device_name(self.device) if cuda else "CPU",
            calibration=None if calibration is None else calibration.as_dict(),
            layers=tuple(reports),
            plain=self.plan.plain,
            seconds=time.monotonic() - begin,
            resumed_layers=self.resumed,
            peak_device_bytes=torch.cuda.max_memory_allocated(self.device) if cuda else None,
            peak_cpu_bytes=peak_cpu_bytes(),
            bytes_before=sum(_bytes(spec.dtype, spec.shape) for spec in self.source.header.specs.values()),
            bytes_after=total,
        )
        quantization = quantization_config(self.config, self._plain_names(), self._head_name(), self._first_layers())
        extra = {"quantize_report.json": json.dumps(report.as_dict(), indent=2)}
        if quantization["quant_method"] == "gptq":
            extra["quantize_config.json"] = json.dumps(quantization, indent=2)  # where older loaders look
        self.partial.finish(
            {**self.source.config_fields(), "quantization_config": quantization}, self.source.path, extra
        )
        return report

    def _all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the final files: what is outside the layers first, then layer after layer."""
        inside: dict[str, list[str]] = {name: [] for name in self.names}
        outside: list[str] = []
        layer_of = {key: name for name, key in self.source.file_name.items()}
        for key in self.source.header.specs:
            match = layer_of.get(key, "").removeprefix(f"{self.layers}.").partition(".")[0]
            name = f"{self.layers}.{match}"
            inside.get(name, outside).append(key)
        yield from self.source.read_files(outside)
        quantized = {self.source.file_name[f"{name}.weight"] for name in self.plan.shapes}
        for index, name in enumerate(self.names):
            written = self.partial.read_layer(index)
            plain = [key for key in inside[name] if key not in written and key not in quantized]
            yield from self.source.read_files(plain)
            yield from written.items()

    def _plain_names(self) -> list[str]:
        """Weights inside decoder layers that stay plain, as the files call them."""
        names = [self.source.file_name.get(f"{name}.weight") for name in self.plan.plain]
        return [name.removesuffix(".weight") for name in names if name is not None]

    def _first_layers(self) -> list[str]:
        """The layers whose inputs fp8 leaves alone, as the files call them."""
        linears = [
            (layer, name) for layer in self.names[: self.config.activations_from] for name in self.plan.of_layer(layer)
        ]
        files = {
            self.source.file_name[f"{layer}.{name}.weight"].removesuffix(f".{name}.weight") for layer, name in linears
        }
        return sorted(files)

    def _head_name(self) -> str | None:
        head = self.source.model.get_output_embeddings()
        name = next((name for name, module in self.source.model.named_modules() if module is head), None)
        return (
            None if name is None else self.source.file_name.get(f"{name}.weight", f"{name}.weight")[: -len(".weight")]
        )


def _device(device: str | torch.device | None) -> torch.device:
    """`device`, or the first GPU, else the CPU; ValueError for one that holds no values here."""
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        target = torch.device("meta")
    if target.type == "meta" or (target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"device={str(device)!r} is not here; allowed: cpu, cuda, cuda:1 and so on, as there are GPUs")
    return target


def _calibration(
    config: QuantizeConfig,
    calibration: str | Path | Sequence[str] | Tensor | None,
    source: SourceModel,
    context: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Calibration | None:
    if not config.calibrated:
        if calibration is not None:
            raise ValueError(f"calibration was given, but method {config.method!r} looks at no activations")
        return None
    if calibration is None:
        raise ValueError(f"method {config.method!r} needs calibration: a text or JSONL file, a data set, or token ids")
    assert config.samples is not None and config.seqlen is not None
    seqlen = calibration.shape[-1] if isinstance(calibration, Tensor) else config.seqlen  # ids are taken as they are
    if context is not None and seqlen > context:
        raise ValueError(f"seqlen={seqlen} is more than the model's context of {context}")
    if tokenizer is None and not isinstance(calibration, Tensor):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"calibration text needs a tokenizer, and {source.path} has none: {error}") from error
    windows = load_calibration(calibration, tokenizer, samples=config.samples, seqlen=config.seqlen, seed=config.seed)
    embeddings: Any = source.model.get_input_embeddings()
    windows.check(embeddings.weight.shape[0])
    return windows


@contextmanager
def _files_of(model: str | Path | PreTrainedModel, output: Path) -> Iterator[tuple[str, str]]:
    """The path of a model's files and what a report calls it; those of a model in memory are written, and removed."""
    if not isinstance(model, PreTrainedModel):
        yield str(model), str(model)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.source-", dir=output.parent) as folder:
        model.save_pretrained(folder)
        yield folder, "a model in memory"


def _head_dim(config: Any) -> int | None:
    text = config.get_text_config(decoder=True)
    found = getattr(text, "head_dim", None)
    return int(found) if found else int(text.hidden_size) // int(text.num_attention_heads)


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return torch.empty(shape, dtype=torch_dtype(dtype), device="meta").nbytes


def _bytes_needed(source: SourceModel, plan: LinearPlan, config: QuantizeConfig) -> int:
    """Disk space: the quantized layers twice (apart, then in the final files), the rest once."""
    assert config.bits is not None
    packed = sum(n * k for n, k in plan.shapes.values()) * (4 if config.bits == 3 else config.bits) // 8
    quantized = {source.file_name[f"{name}.weight"] for name in plan.shapes}
    rest = sum(_bytes(s.dtype, s.shape) for key, s in source.header.specs.items() if key not in quantized)
    return int((2 * packed + rest) * _OVERHEAD)
