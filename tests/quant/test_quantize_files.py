"""The files that `hf_paged.quantize` writes: what an independent reader finds in them, and that they load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from quantize_runs import CONFIG, ids, quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_paged.quant import layer_quantizers, partial_output
from hf_paged.quant.weight import QuantizedWeight, dequantize

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# The reader of the tests: words are bit strings, as the formats define them; nothing of the package's own packing.


def fields(words: Tensor, bits: int) -> np.ndarray:
    """[R, W] int32 -> [R, fields] of `bits` bits, lowest first (3 bits: over three words)."""
    stream = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    usable = stream.shape[1] // bits * bits
    planes = stream[:, :usable].reshape(words.shape[0], -1, bits)
    return (planes << np.arange(bits)).sum(-1)


def read_gptq(tensors: dict[str, Tensor], bits: int, zero_offset: int) -> Tensor:
    codes = torch.from_numpy(fields(tensors["qweight"].t().contiguous(), bits)).t()[: len(tensors["g_idx"])]
    zeros = torch.from_numpy(fields(tensors["qzeros"], bits))[:, : codes.shape[1]] + zero_offset
    group = tensors["g_idx"].long()
    return ((codes - zeros[group]).half() * tensors["scales"][group]).t()


def read_awq(tensors: dict[str, Tensor], group_size: int) -> Tensor:
    def columns(words: Tensor) -> Tensor:
        nibbles = fields(words, 4).reshape(words.shape[0], -1, 8)
        return torch.from_numpy(nibbles[:, :, np.argsort(AWQ_ORDER)].reshape(words.shape[0], -1))

    group = torch.arange(tensors["qweight"].shape[0]) // group_size
    codes, zeros = columns(tensors["qweight"]), columns(tensors["qzeros"])[group]
    return ((codes - zeros).half() * tensors["scales"][group]).t()


def read_int8(tensors: dict[str, Tensor]) -> Tensor:
    scales = tensors["weight_scale"]  # [N, groups]
    codes = torch.from_numpy(fields(tensors["weight_packed"], 8)).view(*scales.shape, -1)
    assert tensors["weight_shape"].tolist() == [len(codes), codes[0].numel()]
    return ((codes - 128).to(scales.dtype) * scales[..., None]).flatten(1)


def tensors_of(folder: Path, module: str) -> dict[str, Tensor]:
    state = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{module}."): value for name, value in state.items() if name.startswith(f"{module}.")}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, QuantizedWeight]]:
    """What the algorithms decided, before it was packed: (name in the layer, weight) in order."""
    found: list[tuple[str, QuantizedWeight]] = []
    add = layer_quantizers.LayerResult.add

    def watched(self: Any, name: str, weight: Any, *args: Any) -> None:
        found.append((name, weight))
        add(self, name, weight, *args)

    monkeypatch.setattr(layer_quantizers.LayerResult, "add", watched)
    return found


@pytest.mark.parametrize(
    ("settings", "quant_method"),
    [
        ({"method": "gptq"}, "gptq"),
        ({"method": "gptq", "bits": 3, "sym": False}, "gptq"),
        ({"method": "gptq", "bits": 8}, "gptq"),
        ({"method": "gptq", "act_order": True, "static_groups": False}, "gptq"),
        ({"method": "gptq", "act_order": True}, "gptq"),
        ({"method": "rtn", "bits": 2, "sym": False, "mse": True}, "gptq"),
        ({"method": "rtn", "group_size": -1}, "gptq"),
        ({"method": "awq"}, "awq"),
        ({"method": "awq", "sym": True}, "awq"),
        ({"method": "awq", "bits": 3}, "gptq"),
        ({"method": "rtn", "format": "awq"}, "awq"),
        ({"method": "int8", "group_size": None}, "compressed-tensors"),
        ({"method": "int8"}, "compressed-tensors"),
    ],
    ids=str,
)
def test_an_independent_reader_of_the_format_finds_bit_for_bit_what_was_decided(
    settings: dict[str, Any],
    quant_method: str,
    model_path: Path,
    tmp_path: Path,
    kept: list[tuple[str, QuantizedWeight]],
) -> None:
    quantize(model_path, tmp_path / "out", replace(CONFIG, **settings))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == quant_method
    assert len(kept) == 21
    seen: dict[str, int] = {}
    for name, weight in kept:
        layer = seen[name] = seen.get(name, -1) + 1
        tensors = tensors_of(tmp_path / "out", f"model.layers.{layer}.{name}")
        if quant_method == "awq":
            found = read_awq(tensors, 32)
        elif quant_method == "compressed-tensors":
            found = read_int8(tensors)
        else:
            found = read_gptq(tensors, config["bits"], 1 if config["checkpoint_format"] == "gptq" else 0)
        assert torch.equal(found, dequantize(weight))
        assert quant_method == "compressed-tensors" or tensors["scales"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_with_zero_points_load_in_16_bits(dtype: torch.dtype, model_path: Path, tmp_path: Path) -> None:
    """torch's default dtype is then the model's, and what looks at zero points computes in it unless told otherwise."""
    quantize(model_path, tmp_path / "out", replace(CONFIG, method="rtn", sym=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert torch.isfinite(model(ids(1), use_cache=False).logits).all()


def test_the_config_says_what_the_files_hold(model_path: Path, tmp_path: Path) -> None:
    def written(**settings: Any) -> dict[str, Any]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        quantize(model_path, out, replace(CONFIG, **settings))
        config: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
        return config

    gptq = written(act_order=True, static_groups=False, skip=("layers.1.mlp.down_proj",))
    assert {k: gptq[k] for k in ("bits", "group_size", "sym", "desc_act", "checkpoint_format")} == {
        "bits": 4, "group_size": 32, "sym": True, "desc_act": True, "checkpoint_format": "gptq",
    }  # fmt: skip
    assert gptq["dynamic"] == {r"-:^model\.layers\.1\.mlp\.down_proj$": {}}
    assert written(act_order=True)["desc_act"] is False  # static groups: the file is in the natural order
    assert written(sym=False)["checkpoint_format"] == "gptq_v2"  # v1 readers disagree about a zero point of 0
    awq = written(method="awq", skip=("o_proj",))
    assert awq["version"] == "gemm" and awq["zero_point"] is True
    assert awq["modules_to_not_convert"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
    fp8 = written(method="fp8", group_size=-1, skip=("o_proj",))
    assert fp8["format"] == "float-quantized" and fp8["ignore"][0] == "lm_head" and len(fp8["ignore"]) == 4


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_layers_of_fp8_keep_inputs_of_16_bits(first: int, model_path: Path, tmp_path: Path) -> None:
    """The rounding of a token's embedding is the same wherever the token stands: it does not average out."""
    config = replace(CONFIG, method="fp8", group_size=-1, activations_from=first, skip=("k_proj",))
    quantize(model_path, tmp_path / "out", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    rounded = {n: m.layout.dynamic for n, m in model.named_modules() if hasattr(m, "layout")}
    assert len(rounded) == 18
    assert all(dynamic == (int(name.split(".")[2]) >= first) for name, dynamic in rounded.items())
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) == 1 + (first > 0)
    for group in list(groups.values())[1:]:
        assert group["targets"] == [rf"re:^model\.layers\.{i}\." for i in range(first)]
        assert group["weights"] == groups["group_0"]["weights"] and group["input_activations"] is None


def test_everything_that_belongs_to_the_model_comes_along(model_path: Path, tmp_path: Path) -> None:
    report = quantize(model_path, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "quantize_report.json",
        "model.safetensors",
    } <= names
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no partial folder left
    saved = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert saved == json.loads(json.dumps(report.as_dict()))
    assert [layer["index"] for layer in saved["layers"]] == [0, 1, 2]
    assert all(0 < layer["error"] < 0.2 and len(layer["linears"]) == 7 for layer in saved["layers"])
    assert saved["calibration"]["samples"] == 6 and len(saved["calibration"]["sha256"]) == 64
    assert saved["bytes_after"] < saved["bytes_before"]
    source, out = load_file(model_path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(source[name], out[name])


def test_what_tokenizers_and_processors_are_made_of_comes_along_whatever_it_is_called(
    model_path: Path, tmp_path: Path
) -> None:
    """A list of names left out Mistral's tokenizer, processors of images, and the code of a model."""
    source = Path(shutil.copytree(model_path, tmp_path / "source"))
    kept = ("tekken.json", "preprocessor_config.json", "modeling_own.py", "additional_chat_templates/tool.jinja")
    for name in kept:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    left = ("training_args.bin", "original.pth", ".gitattributes", "rust_model.ot", "model.ckpt", "model.onnx_data")
    for name in left:
        (source / name).write_text("not this")
    quantize(source, tmp_path / "out", replace(CONFIG, method="rtn"))
    out = tmp_path / "out"
    assert all((out / name).read_text() == name for name in kept)
    assert not {*left} & {path.name for path in out.iterdir()}
    assert json.loads((out / "quantize_report.json").read_text())["model"] == str(source)


def test_no_more_is_fetched_from_the_hub_than_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders beside the model (original weights, exports) may be larger than it."""
    copied = ["README.md", "additional_chat_templates/tool.jinja", "modeling_own.py", "tekken.json", "vocab.txt"]
    other = ["original/params.json", "original/tokenizer.model", "onnx/config.json", "runs/a/log", "figures/b.png"]
    weights = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.gguf", "onnx/m.onnx"]
    weights += ["additional_chat_templates/adapter.safetensors"]

    def snapshot_download(source: str, **patterns: Any) -> str:
        assert source == "somebody/model"
        for name in filter_repo_objects([*copied, *other, *weights], **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(partial_output, "snapshot_download", snapshot_download)
    found = partial_output._beside_weights("somebody/model")
    assert sorted(place.as_posix() for _, place in found) == copied
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == copied


def test_large_models_are_written_as_shards_that_load(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(model_path, tmp_path / "whole")
    monkeypatch.setattr(partial_output, "_SHARD_BYTES", 40_000)
    quantize(model_path, tmp_path / "shards")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32) for n in ("whole", "shards"))
    with torch.no_grad():
        assert torch.equal(one(ids(), use_cache=False).logits, many(ids(), use_cache=False).logits)
