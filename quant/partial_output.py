"""A checkpoint while it is being written: beside its final place, one file per finished layer, and whole in one rename.

    OUT.partial/manifest.json          what is being made of what; another run may only continue the same
    OUT.partial/layer-00003.safetensors  a finished layer and its report; the name appears when the file is complete
    OUT.partial/whole/                 the final folder, config.json last; becomes OUT by a rename

So a kill at any point leaves no OUT, and at most one unfinished layer to do again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged.quant.quantize_report import LayerReport

_SHARD_BYTES = 2 * 2**30  # of one weight file: also the CPU memory that putting a file together takes
_WEIGHTS = (  # not copied
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack"),
    *(".ot", ".npz", ".tflite", ".mlmodel"),
)
_TEMPLATES = "additional_chat_templates"


class PartialOutput:
    """The folder OUT.partial of one run.

    Args:
        output: where the checkpoint goes; must not exist, or be empty.
        settings: everything the result depends on, as JSON.
        resume: continue a run that was stopped; without one to continue, start.

    Raises:
        ValueError: OUT is there already, an unfinished run is there and `resume` was not asked for, or it was started
            with other settings (the first that differs is named).
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.output = output
        self.folder = partial_folder(output)
        self._whole = self.folder / "whole"
        check_output(output)
        manifest = self.folder / "manifest.json"
        if self.folder.exists() and not resume:
            raise ValueError(
                f"{self.folder} holds an unfinished run: continue it with resume (--resume), or delete the folder"
            )
        if manifest.exists():
            _check_same(manifest, settings)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_text(manifest, json.dumps(settings, indent=2))

    @contextmanager
    def discarded_on(self, kind: type[Exception]) -> Iterator[None]:
        """An error of this kind would come again: nothing is kept for a resume."""
        try:
            yield
        except kind:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def finished(self, index: int) -> LayerReport | None:
        """The report of layer `index`, if an earlier run finished it."""
        path = self._layer(index)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as opened:
                return LayerReport.parse(json.loads(opened.metadata()["report"]))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise self.damaged(index, error) from error

    def damaged(self, index: int, error: Exception) -> OSError:
        """What to raise for a finished layer that cannot be used: the others stay for a resume."""
        return OSError(f"{self._layer(index)} is damaged, delete it and continue with --resume: {error}")

    def write_layer(self, tensors: Mapping[str, Tensor], report: LayerReport) -> None:
        """Keep a finished layer: tensors by their names in the final files."""
        _save(dict(tensors), self._layer(report.index), {"report": json.dumps(asdict(report))})

    def read_layer(self, index: int) -> dict[str, Tensor]:
        with safe_open(str(self._layer(index)), framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)

    def assemble(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Write the weight files of the whole, holding one of them in memory at a time; the bytes of all tensors."""
        shutil.rmtree(self._whole, ignore_errors=True)
        self._whole.mkdir()
        shards: list[list[str]] = []
        shard: dict[str, Tensor] = {}
        size = total = 0
        for name, tensor in tensors:
            count = tensor.numel() * tensor.element_size()
            if shard and size + count > _SHARD_BYTES:
                self._save_shard(shard, shards)
                shard, size = {}, 0
            shard[name] = tensor
            size += count
            total += count
        self._save_shard(shard, shards)
        self._name_shards(shards, total)
        return total

    def finish(self, config: Mapping[str, Any], source: str, extra: Mapping[str, str]) -> None:
        """Add what belongs to a model besides weights (`extra`: file name -> text), and rename it to OUT."""
        for path, place in _beside_weights(source):
            (self._whole / place).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, self._whole / place)
        for name, text in extra.items():
            _write_text(self._whole / name, text)
        _write_text(self._whole / "config.json", json.dumps(config, indent=2))
        check_output(self.output)
        os.replace(self._whole, self.output)
        shutil.rmtree(self.folder)

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def _save_shard(self, shard: dict[str, Tensor], shards: list[list[str]]) -> None:
        _save(shard, self._whole / f"shard-{len(shards)}", {"format": "pt"})
        shards.append(list(shard))

    def _name_shards(self, shards: Sequence[Sequence[str]], total: int) -> None:
        if len(shards) == 1:
            os.replace(self._whole / "shard-0", self._whole / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(shards):
            file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
            os.replace(self._whole / f"shard-{index}", self._whole / file)
            weight_map |= dict.fromkeys(names, file)
        listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_text(self._whole / "model.safetensors.index.json", json.dumps(listing, indent=2))


def _beside_weights(source: str) -> list[tuple[Path, Path]]:
    """Files of a model's folder or hub name that hold no weights, and their names in it: its tokenizer, templates,
    processors and code, whatever they are called."""
    folder = Path(source)
    if not folder.is_dir():
        weights = [f"*{suffix}" for suffix in _WEIGHTS]
        snapshot_download(source, allow_patterns=f"{_TEMPLATES}/*", ignore_patterns=weights)
        folder = Path(snapshot_download(source, ignore_patterns=["*/*", *weights]))  # the others hold weights, too
    found = sorted(path for path in [*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")] if path.is_file())
    return [
        (path, path.relative_to(folder))
        for path in found
        if not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)
    ]


def partial_folder(output: Path) -> Path:
    """Where the checkpoint of `output` lies while it is unfinished."""
    return output.with_name(output.name + ".partial")


def check_output(output: Path) -> None:
    """Refuse what a folder cannot be renamed to: something that is there, or below a file or a locked folder.

    Raises:
        ValueError: `output` has no name, is a file, a link, or a folder that holds something.
        OSError: it cannot be made where it shall be.
    """
    if not output.name:
        raise ValueError(f"output={str(output)!r} names no new folder (an empty name is '.')")
    if output.is_symlink():
        raise ValueError(f"output={str(output)!r} is a link; name the folder itself")
    if output.is_file():
        raise ValueError(f"output={str(output)!r} is a file; name a folder that is new or empty")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"output={str(output)!r} exists and is not empty; nothing is overwritten")
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OSError(f"output={str(output)!r} cannot be made: {parent} is no folder that may be written to")


def check_space(output: Path, needed: int) -> None:
    """Raise OSError when the disk of `output` has fewer than `needed` bytes left."""
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"output={str(output)!r} needs about {needed / 2**30:.2f} GiB, {parent} has {free / 2**30:.2f} GiB left"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the entries of mappings as "name.entry": a difference is one value, not a page of them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _check_same(manifest: Path, settings: Mapping[str, Any]) -> None:
    try:
        found = _flat(json.loads(manifest.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{manifest} is damaged, delete {manifest.parent} and start again: {error}") from error
    wanted = _flat(json.loads(json.dumps(settings)))
    for key in dict.fromkeys([*wanted, *found]):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{manifest.parent} was started with {key}={found.get(key)!r}, now it is {wanted.get(key)!r}: "
                "continue with the same settings, or delete the folder"
            )


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Complete under its name, or not there."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}; make room and continue with --resume") from error


def _write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
