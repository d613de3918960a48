"""Bad use of the command line ends in one line and no traceback, before the work that it would spoil."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB
from tiny_tokenizer import tiny_tokenizer
from transformers import T5Config
from typer.testing import CliRunner, Result

from hf_paged import LLM, cli_support
from hf_paged.cli import app
from hf_paged.quant import quantize as quantization


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result, code: int, message: str) -> None:
    assert isinstance(result.exception, SystemExit), result.exception
    output = " ".join(result.output.split())
    assert result.exit_code == code and message in output, output


@pytest.mark.parametrize("device", ["gpu", "meta"])
@pytest.mark.parametrize("command", [("generate", "{}", "hi"), ("calibrate", "{}", "-o", "none.safetensors")])
def test_a_device_that_holds_nothing_is_refused(model_path: Path, command: tuple[str, ...], device: str) -> None:
    arguments = [str(model_path) if word == "{}" else word for word in command]
    refused(run(*arguments, "--device", device), 1, f"device='{device}' is no device to run on")
    assert not Path("none.safetensors").exists()


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "quantize", lambda *_, **__: pytest.fail("a model was quantized"))
    plot = tmp_path / "folder.png"
    plot.mkdir()
    result = run("quantize", model_path, "-o", tmp_path / "out", "--method", "rtn", "--plot", plot)
    refused(result, 1, "folder.png cannot be written")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--perplexity-budget", "inf"), 2, "kv_perplexity_budget=inf"),
        (("--text", "{binary}"), 1, "is no UTF-8 text"),
        (("--text", "{folder}"), 2, "is a directory"),
        (("--max-tokens", "100"), 2, "--max-tokens 100 is of a text"),
    ],
)
def test_calibrate_refuses_and_leaves_no_file(
    model_path: Path, tmp_path: Path, options: tuple[str, str], code: int, message: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    name, value = options[0], options[1].format(binary=tmp_path / "binary", folder=tmp_path)
    refused(run("calibrate", model_path, "-o", tmp_path / "kv.safetensors", name, value), code, message)
    assert not (tmp_path / "kv.safetensors").exists()


@pytest.mark.parametrize("option", ["--kv-error-budget", "--kv-scales"])
def test_generate_takes_a_calibration_and_a_budget_as_eval_does(model_path: Path, tmp_path: Path, option: str) -> None:
    """Every call calibrated anew, though README advertises the file that saves it."""
    paged = ("generate", model_path, "a", "--raw", "--max-tokens", "2", "--kv-cache-dtype", "int8")
    if option == "--kv-error-budget":
        refused(run(*paged, option, "often"), 2, "kv_error_budget='often' is not allowed")
        assert run(*paged, option, "0.5").exit_code == 0
    else:
        file = tmp_path / "kv.safetensors"
        refused(run(*paged, option, file), 2, "there is no file")
        assert run("calibrate", model_path, "-o", file).exit_code == 0
        assert run(*paged, option, file).exit_code == 0


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "1e-300"])
def test_a_rate_at_which_no_request_comes_is_refused(model_path: Path, rate: str) -> None:
    refused(run("bench", "online", model_path, "--rate", rate), 2, "allowed: requests per second")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", "1"), "load=1.0 is not allowed"),
        (("--load", "0.5", "--rate", "2"), "allowed: one of them"),
        (("--arrivals", "513"), "allowed: the 512 requests of ragged512"),
    ],
)
def test_arrivals_that_contradict_one_another_are_refused(
    model_path: Path, options: tuple[str, ...], message: str
) -> None:
    refused(run("bench", "online", model_path, *options), 2, message)


def test_a_cold_start_of_two_formats_is_refused(model_path: Path) -> None:
    """The second would find what the first had compiled."""
    refused(run("bench", "start", model_path, "--cold", "--kv-cache-dtype", "auto,int8"), 2, "allowed: one")


def test_latency_of_one_token_has_no_time_between_tokens(model_path: Path) -> None:
    refused(run("bench", "latency", model_path, "--new-tokens", "1"), 2, "--new-tokens")


def test_a_data_set_without_a_name_is_refused(model_path: Path) -> None:
    pytest.importorskip("datasets")
    refused(run("eval", "divergence", model_path, "--dataset", ""), 1, "dataset='' is not allowed")


def test_a_context_shorter_than_the_default_window_is_no_error(model_path: Path, tmp_path: Path) -> None:
    """The text is: what is refused is named, and it is not an option that nobody gave."""
    (tmp_path / "short.txt").write_text("hello")
    for command in ("divergence", "kv-error"):
        refused(run("eval", command, model_path, "--text", tmp_path / "short.txt"), 1, "fewer than one window of 256")
    refused(run("eval", "kv-error", model_path, "--text", tmp_path / "short.txt", "--tokens", 300), 1, "tokens=300")


def test_a_picture_that_fails_costs_no_result(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots = pytest.importorskip("hf_paged.eval.plots")

    def disk_full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(plots, "plot_perplexity", disk_full)
    (tmp_path / "text.txt").write_text(tiny_tokenizer(VOCAB).decode(list(range(3, 60))), encoding="utf-8")
    options = ("--window", 16, "--kv-cache-dtype", "auto", "--json", "--plot", tmp_path / "plot.png")
    result = run("eval", "perplexity", model_path, "--text", tmp_path / "text.txt", *options)
    refused(result, 1, "no space left on device")
    assert '"perplexity"' in result.stdout


def test_a_prompt_that_is_too_long_is_told_once(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers said before that it "will result in indexing errors"."""
    told: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *words: told.append(words[0]))
    llm = LLM(model_path, num_blocks=8)
    llm.tokenizer.model_max_length = 8
    (output,) = llm.generate("a" * 1000, use_tqdm=False)
    assert output.error is not None and told == []


@pytest.mark.parametrize("command", ["generate", "info"])
def test_a_model_that_is_not_there_is_one_line_not_a_traceback(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path / "nowhere", *(["hi"] if command == "generate" else []))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "nowhere" in result.stderr


def test_a_path_that_is_no_folder_is_not_asked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_text("")
    for path in ("model.gguf", "my/models/llama", "llama/"):
        with pytest.raises(OSError, match=f"no model folder {path}"):
            cli_support.existing(path)


@pytest.mark.parametrize("command", ["generate", "info"])
def test_a_model_that_writes_no_text_is_told_without_a_list_of_all_others(command: str, tmp_path: Path) -> None:
    T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    result = run(command, tmp_path, *(["hi"] if command == "generate" else []))
    assert result.exit_code == 1
    assert "T5Config" in result.stderr and len(result.stderr) < 700


def test_a_hub_without_the_model_is_asked_once_and_the_model_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers retries six times without a network, for a minute, and its error names no model."""
    asked: list[str] = []

    def answer(name: str, **_: Any) -> None:
        asked.append(name)
        if "missing" in name:
            raise OSError("404 Client Error\nmore")

    monkeypatch.setattr("huggingface_hub.model_info", answer)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: file if "kept" in name else None)
    assert [cli_support.existing(name) for name in ("gpt2", "org/kept")] == ["gpt2", "org/kept"]
    with pytest.raises(OSError, match=r"no folder org/missing here, and the hub gave no such model: 404 Client Error$"):
        cli_support.existing("org/missing")
    assert asked == ["gpt2", "org/missing"]


@pytest.mark.parametrize(
    "options", [["--workload", "c4"], ["--prompt-tokens", "9..3"], ["--prompt-tokens", "few"], ["--new-tokens", "0"]]
)
def test_bench_refuses_a_workload_it_does_not_know(options: list[str]) -> None:
    refused(run("bench", "throughput", "smollm2", *options), 2, "number >= 1" if options[1] in ("few", "0") else "")


def test_a_gpu_that_is_not_here_is_told_in_one_line_not_by_an_assertion_of_torch(model_path: Path) -> None:
    for command in (["generate", model_path, "a"], ["bench", "latency", model_path]):
        for device in ("cuda:99", "cuda:x"):
            result = run(*command, "--device", device)
            assert result.exit_code == 1
            assert result.stderr.startswith(f"error: device='{device}' is no")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_kernels_without_a_gpu_are_refused_by_name_not_by_an_option_that_nobody_gave() -> None:
    refused(run("bench", "kernels"), 1, "bench kernels measures a CUDA GPU")


@pytest.mark.parametrize("command", [("generate", "{}", "a"), ("info", "{}")])
@pytest.mark.parametrize("damage", [lambda _: b"no weights", lambda whole: whole[:-1000]], ids=["other", "cut off"])
def test_a_damaged_weight_file_is_told_in_one_line(
    model_path: Path, tmp_path: Path, damage: Callable[[bytes], bytes], command: tuple[str, ...]
) -> None:
    """`info` printed its table of a file that no other command could load."""
    damaged = shutil.copytree(model_path, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(damage((model_path / "model.safetensors").read_bytes()))
    result = run(*(str(damaged) if word == "{}" else word for word in command))
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    "command", [("generate", "{}", "a"), ("info", "{}"), ("eval", "kv-error", "{}", "--text", "{}/config.json")]
)
def test_a_label_that_is_no_mapping_is_named(model_path: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """It ended in 30 lines of Transformers' and "'list' object has no attribute 'to_dict'"."""
    labelled = shutil.copytree(model_path, tmp_path / "labelled")
    config = json.loads((labelled / "config.json").read_text())
    (labelled / "config.json").write_text(json.dumps(config | {"quantization_config": [1]}))
    refused(run(*(word.format(labelled) for word in command)), 1, "quantization_config is [1]; expected a JSON object")
    with pytest.raises(ValueError, match=r"quantization_config is \[1\]"):
        LLM(labelled)
