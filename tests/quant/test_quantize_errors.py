"""What cannot be quantized is refused in words before any work, and nothing half-written is left behind."""

from __future__ import annotations

import errno
import json
import math
import resource
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB, tiny_model
from safetensors.torch import load_file, save_file
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import hf_paged
from hf_paged.quant import partial_output
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import QuantizeReport
from hf_paged.quant.source_model import SourceModel

CONFIG = QuantizeConfig(group_size=32)


def ids(samples: int = 4, seqlen: int = 32) -> Tensor:
    return torch.randint(3, VOCAB, (samples, seqlen), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", intermediate_size=128, num_hidden_layers=2).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(model_path: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(model_path, tmp_path / "model"))


def quantize(model: Any, output: Path, config: QuantizeConfig = CONFIG, calibration: Any = None) -> QuantizeReport:
    if calibration is None and config.calibrated:
        calibration = ids()
    return hf_paged.quantize(model, config, calibration, output=output, device="cpu", progress=False)


def edit(folder: Path, name: str, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    state[name] = change(state[name])
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("weights were read before the error")

    monkeypatch.setattr(SourceModel, "read", read)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "marlin"}, "method='marlin' is not allowed; allowed: awq | gptq | rtn | fp8 | int8"),
        ({"bits": 5}, "bits=5 is not allowed"),
        ({"group_size": 0}, "group_size=0 is not allowed; allowed: an integer >= 1, or -1"),
        ({"samples": 0}, "samples=0 is not allowed"),
        ({"damping": 0.0}, "damping=0.0 is not allowed"),
        ({"skip": "o_proj"}, "skip='o_proj' is not allowed; allowed: a sequence"),
        ({"skip": ("(",)}, "skip='\\(' is no regular expression"),
        ({"method": "fp8", "bits": 4}, "bits=4 is not allowed; allowed: 8 with method='fp8'"),
        ({"method": "fp8", "group_size": 128}, "group_size=128 is not allowed"),
        ({"method": "int8", "sym": False}, "sym=False is not allowed"),
        ({"method": "awq", "act_order": True}, "act_order=True is not allowed"),
        ({"method": "fp8", "mse": True}, "mse=True is not allowed"),
        ({"method": "rtn", "asymmetry": 0.5}, "asymmetry=0.5 is not allowed"),
        ({"method": "awq", "mse": True}, "mse=True is not allowed"),
        ({"method": "rtn", "scale": True}, "scale=True is not allowed"),
        ({"method": "awq", "bits": 3, "format": "awq"}, "awq files hold 4 bits"),
        ({"method": "gptq", "sym": False, "format": "gptq"}, "gptq_v2 with sym=False"),
        ({"method": "fp8", "format": "gptq"}, "compressed-tensors with method fp8"),
        ({"method": "gptq", "format": "compressed-tensors"}, "compressed-tensors with method fp8"),
    ],
    ids=str,
)
def test_settings_that_no_file_can_hold_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizeConfig(**settings)


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize(
    ("settings", "calibration", "message"),
    [
        ({}, "missing", "method 'gptq' needs calibration"),
        ({"method": "rtn"}, "ids", "method 'rtn' looks at no activations"),
        ({"seqlen": 300}, "text", "seqlen=300 is more than the model's context of 256"),
        ({"samples": 40, "seqlen": 32}, "text", "has 1,000 tokens, 40 windows of 32 need 1,280: lower samples to 31"),
        ({"samples": 1, "seqlen": 256}, "short", "has 10 tokens, 1 windows of 256 need 256: lower seqlen to 10"),
        ({}, "empty", "the file holds no text"),
        ({}, "/nowhere/text.txt", "no such file"),
        ({}, "binary", "expected UTF-8 text"),
        ({}, "foreign", "holds token 96, the model's vocabulary has 96 tokens: the tokenizer is not this model's"),
        ({}, "one-dimensional", "expected integers \\[samples, seqlen\\]"),
        ({"skip": ("o_poj",)}, "ids", "skip='o_poj' matches no linear"),
        ({"skip": ("proj",)}, "ids", "no linear is left to quantize"),
        ({"method": "awq", "group_size": 48}, "ids", "does not divide the 64 input channels of model.layers.0"),
        ({"method": "awq", "group_size": 48}, "ids", "group_size=32 does"),
        ({"method": "int8", "group_size": 48}, "missing", "does not divide the 64 input channels"),
        ({"method": "rtn", "group_size": 100_000}, "missing", "group_size=100000 is more than the 128 input channels"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_any_weight_is_read(
    settings: dict[str, Any], calibration: str, message: str, model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("abc!?" * 200)
    (tmp_path / "short").write_text("0123456789")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    source: Any = {
        "ids": ids(),
        "missing": None,
        "foreign": ids() + 1 + (95 - ids().max()),
        "one-dimensional": ids()[0],
    }
    source = source.get(calibration, tmp_path / calibration) if calibration in source else tmp_path / calibration
    with pytest.raises(ValueError, match=message):
        hf_paged.quantize(
            model_path, replace(CONFIG, **settings), source, output=tmp_path / "out", device="cpu", progress=False
        )
    assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("no_weights_read")
def test_models_that_cannot_be_quantized_are_refused_before_any_weight_is_read(changed: Path, tmp_path: Path) -> None:
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ValueError, match=r"is quantized already \(gptq\)"):
        quantize(changed, tmp_path / "out")
    (changed / "config.json").write_text(json.dumps(config))
    (changed / "model.safetensors").rename(changed / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected model\.safetensors"):
        quantize(changed, tmp_path / "out")
    (changed / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="found 0 bytes"):
        quantize(changed, tmp_path / "out")
    with pytest.raises(OSError):
        quantize(tmp_path / "nowhere", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="T5"):
        quantize(tmp_path / "t5", tmp_path / "out")


def test_a_tensor_of_another_shape_is_named(changed: Path, tmp_path: Path) -> None:
    edit(changed, "model.layers.1.mlp.up_proj.weight", lambda weight: weight[:64].clone())
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: expected \[128, 64\], found \[64"
    ):
        quantize(changed, tmp_path / "out")


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn", "fp8"])
def test_a_nan_in_a_weight_is_named_and_leaves_nothing(method: str, changed: Path, tmp_path: Path) -> None:
    def damage(weight: Tensor) -> Tensor:
        weight[3, 5] = float("nan")
        return weight

    edit(changed, "model.layers.1.self_attn.v_proj.weight", damage)
    group_size = -1 if method == "fp8" else 32
    with pytest.raises(ValueError, match=r"model\.layers\.1: .*self_attn\.[qv]_proj: .*NaN"):
        quantize(changed, tmp_path / "out", replace(CONFIG, method=method, group_size=group_size))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_channels_that_no_token_excites_are_rounded_and_stay_finite(method: str, changed: Path, tmp_path: Path) -> None:
    def silence(weight: Tensor) -> Tensor:
        weight[:9] = 0
        return weight

    edit(changed, "model.layers.0.input_layernorm.weight", silence)
    edit(changed, "model.layers.1.mlp.up_proj.weight", silence)
    report = quantize(changed, tmp_path / "out", replace(CONFIG, method=method))
    assert all(0 <= linear.error < 0.1 for layer in report.layers for linear in layer.linears)
    plain, out = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (changed, tmp_path / "out"))
    with torch.no_grad():
        error = (plain(ids()).logits - out(ids()).logits).norm() / plain(ids()).logits.norm()
    assert error < 0.5


def test_a_group_size_that_does_not_divide_leaves_gptq_a_short_last_group(model_path: Path, tmp_path: Path) -> None:
    quantize(model_path, tmp_path / "out", replace(CONFIG, group_size=48))
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["model.layers.0.mlp.up_proj.scales"].shape[0] == 2  # 64 = 48 + 16
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


def test_skip_is_the_remedy_for_a_group_size_that_does_not_divide(model_path: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, method="awq", group_size=128)
    with pytest.raises(ValueError, match="--skip"):
        quantize(model_path, tmp_path / "out", config)
    report = quantize(model_path, tmp_path / "out", replace(config, skip=("self_attn", "up_proj", "gate_proj")))
    assert {linear.name for layer in report.layers for linear in layer.linears} == {"mlp.down_proj"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, nn.Linear)


def test_sizes_that_words_cannot_hold_stay_plain_and_are_reported(tmp_path: Path) -> None:
    tiny_model("llama", head_dim=20, intermediate_size=128, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    report = quantize(tmp_path / "model", tmp_path / "out")
    assert "40 output channels are no multiple of 32" in report.plain["model.layers.0.self_attn.k_proj"]
    assert "80 input channels are no multiple of 32" in report.plain["model.layers.1.self_attn.o_proj"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert isinstance(loaded.model.layers[0].self_attn.k_proj, nn.Linear)


def test_an_output_that_holds_something_is_never_touched(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        quantize(model_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "precious").unlink()
    quantize(model_path, tmp_path / "out")  # an empty folder is fine
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize("output", ["", ".", "/"])
def test_an_output_without_a_name_is_told_as_that(output: str, model_path: Path) -> None:
    """An empty one is the current folder, which "exists and is not empty", or has no name to add ".partial" to."""
    with pytest.raises(ValueError, match=r"output='[./]' names no new folder \(an empty name is '.'\)"):
        quantize(model_path, Path(output))


def test_a_disk_that_is_too_small_is_told_before_work(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(partial_output.shutil, "disk_usage", lambda folder: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(OSError, match=r"needs about 0\.00 GiB.*has 0\.00 GiB left"):
        quantize(model_path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_disk_that_fills_up_keeps_what_was_finished_for_a_resume(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = partial_output.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if "layer-00001" in path.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(partial_output, "save_file", full)
        with pytest.raises(OSError, match=r"No space left on device.*--resume"):
            quantize(model_path, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out.partial").iterdir())
    assert names == ["layer-00000.safetensors", "manifest.json"]
    report = hf_paged.quantize(
        model_path, CONFIG, ids(), output=tmp_path / "out", device="cpu", progress=False, resume=True
    )
    assert report.resumed_layers == 1


def test_a_folder_that_somebody_fills_meanwhile_costs_no_finished_layer(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assemble = partial_output.PartialOutput.assemble

    def slow(self: partial_output.PartialOutput, tensors: Any) -> int:
        output.mkdir()
        (output / "precious").write_text("mine")
        return assemble(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "assemble", slow)
        with pytest.raises(ValueError, match="exists and is not empty"):
            quantize(model_path, output)
    assert [path.name for path in output.iterdir()] == ["precious"]
    (output / "precious").unlink()
    report = hf_paged.quantize(model_path, CONFIG, ids(), output=output, device="cpu", progress=False, resume=True)
    assert report.resumed_layers == 2


def test_a_write_that_the_system_refuses_is_an_error_with_the_files_name(model_path: Path, tmp_path: Path) -> None:
    """A real limit on the size of a file: safetensors raises an error type of its own."""
    code = f"""
        import resource, signal, sys, torch
        from pathlib import Path
        from hf_paged.quant.partial_output import _save
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
        try:
            _save({{"x": torch.zeros(10_000)}}, Path({str(tmp_path)!r}) / "file", {{}})
        except OSError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert f"cannot write {tmp_path}/file" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_no_token_reaches_are_rounded_and_reported(method: str, tmp_path: Path) -> None:
    model = tiny_model("mixtral", intermediate_size=128, num_hidden_layers=2, num_local_experts=5)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight  # scores x, 2 x, -x, -2 x and 0: two of the others are always above 0
            router.copy_(torch.tensor([1.0, 2, -1, -2, 0])[:, None] * router[0])
    model.save_pretrained(tmp_path / "model")
    report = quantize(tmp_path / "model", tmp_path / "out", replace(CONFIG, method=method))
    assert any("no calibration token" in note for note in report.notes())
    linears = [linear for layer in report.layers for linear in layer.linears]
    assert all(math.isfinite(linear.error) for linear in linears)
    silent = [linear.error for linear in linears if linear.tokens == 0]
    half_step = 8 / 15 / 2  # of 4 bits over 8 standard deviations; their output is 0, and nothing is a share of that
    assert silent and 0 < max(silent) < half_step**2
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)


def test_two_lists_as_long_as_the_decoder_are_not_guessed_between(tmp_path: Path) -> None:
    from hf_paged.quant.decoder_layers import find_decoder_layers

    model = tiny_model("llama", num_hidden_layers=2)
    assert find_decoder_layers(model) == "model.layers"
    model.model.tower = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="found 2"):
        find_decoder_layers(model)


def test_a_model_whose_layers_share_weights_is_refused() -> None:
    from hf_paged.quant.decoder_layers import find_decoder_layers

    model = tiny_model("llama", num_hidden_layers=2)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ValueError, match="uses one decoder layer several times"):
        find_decoder_layers(model)
