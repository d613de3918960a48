"""`hf-paged quantize`: bad use, what it prints and writes, and perplexity before and after."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from model_zoo import VOCAB, tiny_model
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner, Result

import hf_paged
from hf_paged.cli import app
from hf_paged.quant.partial_output import PartialOutput

TEXT = "".join(chr(33 + (7 * i * i + i) % 80) for i in range(1200))
SMALL = ("--group-size", 32, "--samples", 4, "--seqlen", 32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf_paged.register()  # other tests undo it; --evaluate loads what was written


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli-quantize") / "tiny"
    tiny_model("llama", intermediate_size=128, num_hidden_layers=2).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def text(model_path: Path) -> Path:
    return model_path.parent / "text.txt"


def test_a_run_prints_each_layers_error_and_what_became_of_the_bytes(
    model_path: Path, text: Path, tmp_path: Path
) -> None:
    result = run(model_path, "-o", tmp_path / "out", "--calibration", text, *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "worst linear" in result.stdout and re.search(r"0\.[1-9] MiB became 0\.\d MiB", result.stdout)
    assert re.search(r"^layer 1/2: error \S+, \S+ s, ETA \d+ s\nlayer 2/2: .* ETA 0 s$", result.stderr, re.MULTILINE)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_log_is_told_what_is_at_work_when_a_layer_takes_long(
    model_path: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ takes minutes per layer on a CPU: a silent log looks like a hang."""
    monkeypatch.setattr("hf_paged.quant.quantize_progress._SILENCE", 0.0)
    result = run(model_path, "-o", tmp_path / "out", "--method", "awq", "--calibration", text, *SMALL)
    assert result.exit_code == 0, result.stderr
    told = [line.removeprefix("layer 2/2: ") for line in result.stderr.splitlines() if line.startswith("layer 2/2: ")]
    linears = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert [one for one in told if one in linears] == linears
    assert "inputs of mlp.down_proj" in told and "scales of self_attn.q_proj" in told


def test_a_method_that_looks_at_no_activations_prints_no_empty_column(model_path: Path, tmp_path: Path) -> None:
    result = run(model_path, "-o", tmp_path / "out", "--method", "fp8")
    assert result.exit_code == 0, result.stderr
    assert "its error" in result.stdout and not re.search(r"layer\s+┃\s+error", result.stdout)


def test_evaluate_measures_both_models_as_they_load_and_the_report_keeps_it(
    model_path: Path, text: Path, tmp_path: Path
) -> None:
    result = run(
        model_path, "-o", tmp_path / "out", "--method", "rtn", "--group-size", 32, "--evaluate", text, "--json"
    )
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    found = printed["evaluation"]
    assert found["text"] == "text.txt" and found["tokens"] > 1000
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"] * (1 + found["change"]))
    assert found["change"] != 0


def test_plot_draws_a_picture_and_refuses_endings_before_work(model_path: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--calibration", text, *SMALL, "--plot")
    result = run(model_path, "-o", tmp_path / "out", *options, tmp_path / "errors.svg")
    assert result.exit_code == 0, result.stderr
    assert "<svg" in (tmp_path / "errors.svg").read_text()
    refused = run(
        model_path, "-o", tmp_path / "other", "--calibration", text, *SMALL, "--plot", tmp_path / "errors.xyz"
    )
    assert refused.exit_code == 2 and not (tmp_path / "other").exists()


def test_ctrl_c_says_where_the_finished_layers_are_and_how_to_go_on(
    model_path: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    options = (model_path, "-o", tmp_path / "out", "--calibration", text, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(PartialOutput, "assemble", interrupted)
        result = run(*options)
    assert result.exit_code == 130 and not (tmp_path / "out").exists()
    assert "out.partial: --resume continues" in " ".join(result.stderr.split()) and "interrupted" in result.stderr
    result = run(*options, "--resume", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["resumed_layers"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "marlin"), "method='marlin'"),
        (("--method", "rtn", "--samples", 4), "samples=4 is not allowed"),
        (("--method", "fp8", "--calibration", "x"), "--calibration does not go with --method fp8"),
        (("--method", "awq", "--act-order"), "act_order=True"),
        (("--skip", "("), "no regular expression"),
        ((), "--method gptq needs --calibration"),
        (("--method", "awq"), "--method awq needs --calibration"),
    ],
    ids=str,
)
def test_bad_use_is_told_apart_from_failure(
    options: tuple[object, ...], message: str, model_path: Path, tmp_path: Path
) -> None:
    result = run(model_path, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_failures_are_one_line(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    result = run(model_path, "-o", tmp_path / "empty", "--method", "rtn", "--group-size", 32)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: output=") and "is a file; name a folder" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert run(tmp_path / "nowhere", "-o", tmp_path / "out", "--method", "rtn").exit_code == 1


def test_a_text_too_short_to_evaluate_on_is_refused_before_work(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    result = run(model_path, "-o", tmp_path / "out", "--method", "fp8", "--evaluate", tmp_path / "short")
    assert result.exit_code == 1 and "has 3 tokens" in result.stderr
    assert not list(tmp_path.glob("out*"))
