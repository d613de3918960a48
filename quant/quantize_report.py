"""What quantizing a model did, layer by layer: kept with the model as `quantize_report.json`.

Errors are relative and squared: |x (W - Q)^T|^2 / |x W^T|^2 over the calibration tokens for a linear (over the weights
alone where a method has no activations, or no token reached it), |layer_Q(x) - layer(x)|^2 / |layer(x) - x|^2 for a
layer, x being what the layers quantized before it hand on.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers


@dataclass(frozen=True, kw_only=True)
class LinearReport:
    """One quantized linear."""

    name: str  # in the layer
    shape: tuple[int, int]  # (N, K)
    error: float
    tokens: int | None = None  # calibration tokens that reached it; None: none were asked for
    note: str | None = None  # what was done differently here, and why


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One decoder layer."""

    index: int
    name: str
    linears: tuple[LinearReport, ...]
    error: float | None  # of the layer's output; None: the method looks at no activations
    seconds: float

    @property
    def worst(self) -> LinearReport:
        return max(self.linears, key=lambda linear: linear.error)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> LayerReport:
        linears = tuple(LinearReport(**{**one, "shape": tuple(one["shape"])}) for one in fields["linears"])
        return cls(**{**fields, "linears": linears})


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """The whole run. Bytes are of tensors, not of files."""

    model: str
    output: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    calibration: Mapping[str, Any] | None  # source, samples, seqlen, seed, sha256
    layers: tuple[LayerReport, ...]
    plain: Mapping[str, str]  # weights of decoder layers that stay as they were -> why
    seconds: float  # of this process; a resumed run leaves out what was done before
    resumed_layers: int
    peak_device_bytes: int | None  # None on a CPU
    peak_cpu_bytes: int  # resident, of the whole process; pages of mapped files among it
    bytes_before: int
    bytes_after: int
    evaluation: Mapping[str, Any] | None = None  # perplexity before and after, where a text was given

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def notes(self) -> dict[str, list[str]]:
        """What was done differently somewhere, and for which linears."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            for linear in layer.linears:
                if linear.note is not None:
                    found.setdefault(linear.note, []).append(f"{layer.name}.{linear.name}")
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=2), encoding="utf-8")


def package_version() -> str:
    """Of this package; a checkout that is not installed has none."""
    try:
        return importlib.metadata.version("hf_paged")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled checkout"


def package_versions() -> dict[str, str]:
    """What a result depends on besides its settings."""
    return {"hf_paged": package_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def plot_errors(report: QuantizeReport, path: Path) -> None:
    """A bar per layer: its output's error, or its worst linear's. The ending of `path` says the image format.

    Raises:
        ValueError: matplotlib is missing, or does not know the ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs the package matplotlib: pip install 'hf_paged[eval]'") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    measured = all(layer.error is not None for layer in report.layers)
    errors = [layer.error if layer.error is not None else layer.worst.error for layer in report.layers]
    axes.bar([layer.index for layer in report.layers], errors)
    axes.set_yscale("log")
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("relative squared error" + (" of the output" if measured else " of the worst linear"))
    settings = report.settings
    axes.set_title(
        f"{Path(report.model).name}: {settings['method']}, {settings['bits']} bits, g{settings['group_size']}"
    )
    figure.savefig(path)


def peak_cpu_bytes() -> int:
    """The most memory that this process has held, pages of mapped files among it."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
