"""The pipeline around the algorithms: exact files, a run that is stopped and resumed, and nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import VOCAB, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_paged
from hf_paged.quant import decoder_layers, layer_quantizers, partial_output
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import QuantizeReport
from hf_paged.quant.weight import QuantizedWeight, dequantize

CONFIG = QuantizeConfig(group_size=32, samples=6, seqlen=32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def ids(samples: int = 6, seqlen: int = 32) -> Tensor:
    return torch.randint(3, VOCAB, (samples, seqlen), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", intermediate_size=128).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "do_sample": true}')
    return folder


def quantize(
    model_path: Path | PreTrainedModel, output: Path, config: QuantizeConfig = CONFIG, **options: Any
) -> QuantizeReport:
    return hf_paged.quantize(
        model_path, config, ids() if config.calibrated else None, output=output, device="cpu", progress=False, **options
    )


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


def test_a_model_in_memory_gives_the_files_that_its_folder_gives(model_path: Path, tmp_path: Path) -> None:
    quantize(model_path, tmp_path / "from-files")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_paged.quantize(model, CONFIG, ids(), output=tmp_path / "from-memory", device="cpu", progress=False)
    assert same_weights(tmp_path / "from-files", tmp_path / "from-memory")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())  # left alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-files", "from-memory"]


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Stopped(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize(
    "settings",
    [{"method": "gptq"}, {"method": "gptq", "scale": True}, {"method": "awq"}, {"method": "rtn"}],
    ids=str,
)
def test_a_resumed_run_gives_the_files_of_one_that_was_never_stopped(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a model in fp16: norms that took scales go on as they were rounded for the file."""
    model_path = tmp_path / "model"
    tiny_model("qwen2", intermediate_size=128).half().save_pretrained(model_path)
    config = replace(CONFIG, **settings)
    quantize(model_path, tmp_path / "whole", config)
    write = partial_output.PartialOutput.write_layer

    def stopping(self: Any, tensors: Any, report: Any) -> None:
        write(self, tensors, report)
        if report.index == 1:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "write_layer", stopping)
        with pytest.raises(Stopped):
            quantize(model_path, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="holds an unfinished run"):
        quantize(model_path, tmp_path / "out", config)
    with pytest.raises(ValueError, match=r"was started with config\.seed=0, now it is 1"):
        quantize(model_path, tmp_path / "out", replace(config, seed=1), resume=True)
    report = quantize(model_path, tmp_path / "out", config, resume=True)
    assert report.resumed_layers == 2 and len(report.layers) == 3
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_other_weights_of_the_same_shapes_do_not_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a model of one training beside half a model of another would load without a word."""

    def stopped(*args: Any) -> None:
        raise Stopped

    monkeypatch.setattr(partial_output.PartialOutput, "assemble", stopped)
    model = tiny_model("llama", intermediate_size=128)
    for _ in range(2):  # the same weights do
        with pytest.raises(Stopped):
            quantize(model, tmp_path / "out", resume=True)
    for parameter in model.parameters():
        parameter.data *= 1.01
    with pytest.raises(ValueError, match="was started with model="):
        quantize(model, tmp_path / "out", resume=True)


def test_another_calibration_text_does_not_continue_a_run(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any) -> None:
        raise Stopped

    monkeypatch.setattr(partial_output.PartialOutput, "assemble", stopped)
    with pytest.raises(Stopped):
        quantize(model_path, tmp_path / "out")
    with pytest.raises(ValueError, match="was started with calibration="):
        hf_paged.quantize(model_path, CONFIG, ids() + 1, output=tmp_path / "out", device="cpu", resume=True)


def test_a_run_killed_without_warning_leaves_no_output_and_can_be_resumed(model_path: Path, tmp_path: Path) -> None:
    code = f"""
        import sys, time, torch
        sys.path.insert(0, {str(Path(__file__).parent)!r}); sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        torch.set_num_threads(1)
        from test_quantize import CONFIG, ids
        from hf_paged.quant import partial_output
        from hf_paged.quant.quantize import quantize
        write = partial_output.PartialOutput.write_layer
        def slow(self, tensors, report):
            write(self, tensors, report)
            print("layer", report.index, flush=True)
            time.sleep(60 if report.index == 1 else 0)
        partial_output.PartialOutput.write_layer = slow
        quantize({str(model_path)!r}, CONFIG, ids(), output={str(tmp_path / "out")!r}, device="cpu", progress=False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env={**os.environ}, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "layer 1":
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    with pytest.raises((ValueError, OSError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out.partial")
    assert quantize(model_path, tmp_path / "out", resume=True).resumed_layers == 2
    quantize(model_path, tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_only_one_layer_is_ever_materialised(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.quant.source_model import SourceModel

    most = [0]
    fill = SourceModel.fill

    def counting(self: Any, prefix: str, *args: Any) -> None:
        fill(self, prefix, *args)
        layers = self.model.model.layers
        held = sum(any(not p.is_meta for p in layer.parameters()) for layer in layers)
        most[0] = max(most[0], held)

    monkeypatch.setattr(SourceModel, "fill", counting)
    quantize(model_path, tmp_path / "out")
    assert most == [1]


def test_a_partial_folder_is_no_checkpoint_at_any_moment(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json is the last file of the whole folder, so that what Transformers finds there is complete."""
    order: list[str] = []
    write = partial_output._write_text

    def noting(path: Path, text: str) -> None:
        order.append(path.name)
        write(path, text)

    monkeypatch.setattr(partial_output, "_write_text", noting)
    quantize(model_path, tmp_path / "out")
    assert order[0] == "manifest.json" and order[-1] == "config.json"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn", "fp8"])
def test_a_gpu_gives_a_checkpoint_as_good_as_the_cpus(
    method: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, method=method, group_size=-1 if method == "fp8" else 32)
    calibration = ids() if config.calibrated else None
    reports = {}
    for where in ("cpu", "cuda", "offloaded"):
        if where == "offloaded":  # hidden states do not fit: they stay on the CPU between layers
            monkeypatch.setattr(decoder_layers, "_SHARE_ON_DEVICE", 0.0)
        reports[where] = hf_paged.quantize(
            model_path, config, calibration, output=tmp_path / where, progress=False,
            device="cpu" if where == "cpu" else "cuda",
        )  # fmt: skip
    assert reports["cuda"].peak_device_bytes and reports["cpu"].peak_device_bytes is None
    assert same_weights(tmp_path / "cuda", tmp_path / "offloaded")
    for one, other in zip(reports["cpu"].layers, reports["cuda"].layers, strict=True):
        for a, b in zip(one.linears, other.linears, strict=True):
            assert b.error == pytest.approx(a.error, rel=0.2), (a, b)  # near ties are rounded apart
    AutoModelForCausalLM.from_pretrained(tmp_path / "cuda", dtype=torch.float32, device_map="cuda")


def test_act_order_is_the_default_only_where_no_reader_must_reorder() -> None:
    """With groups that move it costs readers a gather: that must be asked for."""
    assert QuantizeConfig(method="gptq").resolved().act_order is True
    assert QuantizeConfig(method="gptq", static_groups=False).resolved().act_order is False
    assert QuantizeConfig(method="awq").resolved().act_order is False
