"""A damaged file of `hf-paged calibrate` is refused by name: a cache smoothed by noise would fail nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_zoo import tiny_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_paged import LLM
from hf_paged.kv_calibration import FORMATS, calibrate
from hf_paged.kv_scales import KVMix, LayerScales, load_kv_scales, save_kv_scales
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel

MIX = KVMix(
    kv_cache_dtype="int4", error_budget=0.1, skip_layers=(), perplexity_budget=0.005, perplexity_change=0.001,
    bytes_per_token=64.0,
)  # fmt: skip
Damage = Callable[[dict[str, Tensor], dict[str, str]], None]


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    return PackedModel(build_view(tiny_model("llama")))


@pytest.fixture
def path(packed: PackedModel, tmp_path: Path) -> Path:
    save_kv_scales(replace(calibrate(packed, FORMATS, FORMATS), mix=MIX), tmp_path / "kv.safetensors")
    return tmp_path / "kv.safetensors"


def _first(tensors: dict[str, Tensor], part: str) -> str:
    return next(name for name in tensors if name.endswith(part))


def _nan(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors[_first(tensors, "offset")][0, 0] = float("nan")


def _zero_factor(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    name = _first(tensors, "offset")
    tensors[name.replace("offset", "factor")] = torch.zeros_like(tensors[name])


def _half(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    name = _first(tensors, "offset")
    tensors[name] = tensors[name].half()


def _unknown_tensor(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["layers.0.k.int3.offset"] = tensors[_first(tensors, "offset")].clone()


def _far_layer(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["layers.77.k.int8.offset"] = torch.zeros(3)


def _set(key: str, value: object) -> Damage:
    def damage(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        metadata[key] = value if isinstance(value, str) else json.dumps(value)

    return damage


def _errors(value: object) -> Damage:
    def damage(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        errors = json.loads(metadata["errors"])
        errors["0"]["k"] = value
        metadata["errors"] = json.dumps(errors)

    return damage


def _no_probe(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["probed"]


@pytest.mark.parametrize(
    "damage",
    [
        _no_probe, _nan, _zero_factor, _half, _unknown_tensor, _far_layer,
        _set("errors", "{"), _set("errors", []),
        _set("mix", "{}"), _set("mix", {**vars(MIX), "kv_cache_dtype": "int3"}),
        _set("mix", {**vars(MIX), "error_budget": "x"}), _set("mix", {**vars(MIX), "more": 1}),
        _errors({"int8": float("nan")}), _errors({"int8": "0.1"}), _errors({"int3": 0.1}), _errors(None),
    ],
)  # fmt: skip
def test_damage_of_any_kind_is_told_with_the_files_name(packed: PackedModel, path: Path, damage: Damage) -> None:
    with safe_open(path, "pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"kv\.safetensors"):
        load_kv_scales(path, packed)


def test_metadata_without_a_key_is_told(packed: PackedModel, path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for key in ("errors", "source"):
        save_file(tensors, path, {name: value for name, value in metadata.items() if name != key})
        with pytest.raises(ValueError, match=key):
            load_kv_scales(path, packed)


def test_a_file_cut_short_is_told(packed: PackedModel, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"kv\.safetensors"):
        load_kv_scales(path, packed)


def test_a_format_that_the_file_does_not_hold_is_not_served_unsmoothed(packed: PackedModel, path: Path) -> None:
    scales = load_kv_scales(path, packed)
    layers = {
        index: LayerScales(keys={"int8": layer.keys["int8"]}, values={"int8": layer.values["int8"]})
        for index, layer in scales.layers.items()
    }
    save_kv_scales(replace(scales, layers=layers, mix=None), path)
    LLM(tiny_model("llama"), kv_cache_dtype="int8", kv_scales=str(path), num_blocks=8)
    with pytest.raises(ValueError, match="holds no K in fp8; it has int8"):
        LLM(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=str(path), num_blocks=8)


def test_a_file_that_cannot_be_written_leaves_the_old_one(packed: PackedModel, path: Path) -> None:
    scales, before = load_kv_scales(path, packed), path.read_bytes()
    (path.parent / "kv.safetensors.unfinished").mkdir()  # stands for a disk that is full
    with pytest.raises(OSError, match="cannot write"):
        save_kv_scales(scales, path)
    assert path.read_bytes() == before
