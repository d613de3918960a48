"""`hf-paged eval`: bad use costs no model load, and what is printed is what was measured."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from model_zoo import VOCAB, prompts, tiny_model
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner, Result

from hf_paged import cli_eval_support as support
from hf_paged.cli import app
from hf_paged.eval import scoring
from hf_paged.eval.perplexity import measure_perplexity
from hf_paged.eval.texts import dataset_text, token_ids_of

LENGTH = 200


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(tiny_tokenizer(VOCAB).decode(prompts((LENGTH,), seed=3)[0]), encoding="utf-8")
    return file


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "load", lambda *_: pytest.fail("a model was loaded before the options were checked"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-cache-dtype", "auto,int3"], "kv_cache_dtype='int3'"),
        (["--kv-cache-dtype", "k=int8,auto"], "kv_cache_dtype='k=int8'"),
        (["--block-size", "48"], "block_size=48"),
        (["--window", "300"], "window=300 is not allowed; allowed: 2..256"),
        (["--window", "64", "--stride", "65"], "stride=65 is not allowed; allowed: 1..64"),
        (["--window", "64", "--stride", "0"], "stride=0"),
        (["--kv-error-budget", "-1"], "kv_error_budget=-1.0"),
        (["--kv-error-budget", "some"], "kv_error_budget='some'"),
        (["--plot", "out.gif"], "out.gif is not allowed; allowed: a file that ends in .png"),
        (["--plot", "nowhere/out.png"], "there is no folder nowhere"),
        (["--dataset", "wikitext2"], "one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("nothing_loads")
def test_bad_use_is_named_before_a_model_is_loaded(
    model_path: Path, text_path: Path, options: list[str], message: str
) -> None:
    result = run("perplexity", model_path, "--text", text_path, *options)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", ["perplexity", "divergence"])
def test_a_text_is_needed_and_must_be_text(model_path: Path, tmp_path: Path, command: str) -> None:
    assert run(command, model_path).exit_code == 2
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    result = run(command, model_path, "--text", binary, "--window", 64)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "is no UTF-8 text" in result.stderr


def test_formats_come_in_lists_and_a_pair_is_one_format() -> None:
    assert support.formats_of(["auto,fp8", "k=int8,v=auto,int8"], "auto") == ["auto", "fp8", "k=int8,v=auto", "int8"]
    assert support.formats_of(None, "auto,fp8") == ["auto", "fp8"]
    assert support.formats_of(["int8, int8"], "auto") == ["int8"]


def test_recent_adds_each_quantized_format_with_its_current_block_in_16_bits(model_path: Path, text_path: Path) -> None:
    """Two formats of one name and other figures would be taken for noise; chunks of 70 tokens are cut at blocks."""
    options = ("--text", text_path, "--window", 100, "--max-windows", 1, "--chunk", 70)
    formats = ("--kv-cache-dtype", "int4", "--kv-scales", "off", "--recent", "--dtype", "float32")
    done = run("divergence", model_path, *options, *formats, "--json")
    plain, recent = json.loads(done.stdout)["results"]
    assert (plain["kv_recent_block"], recent["kv_recent_block"]) == (False, True)
    assert recent["bytes_per_token"] == plain["bytes_per_token"] and recent["mean_kl"] < plain["mean_kl"]
    assert "recent block" in run("perplexity", model_path, *options, *formats).stdout


def test_naive_adds_each_quantized_format_without_smoothing(model_path: Path, text_path: Path) -> None:
    options = ("--text", text_path, "--window", 64, "--max-windows", 1, "--kv-cache-dtype", "auto,int8", "--naive")
    rows = json.loads(run("perplexity", model_path, *options, "--json").stdout)["results"]
    assert [(row["kv_cache_dtype"], row["kv_scales"]) for row in rows] == [
        ("auto", "auto"), ("int8", "auto"), ("int8", "off"),
    ]  # fmt: skip
    for command in ("perplexity", "divergence"):
        assert "int8 naive" in run(command, model_path, *options).stdout


def test_perplexity_writes_one_line_of_json_with_what_was_measured(
    model_path: Path, text_path: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    result = run(
        "perplexity", model_path, model_path, "--text", text_path, "--window", 64, "--stride", 32,
        "--kv-cache-dtype", "auto,k=int8,v=fp8", "--json", "--plot", plot,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    rows = json.loads(result.stdout)["results"]
    assert [row["kv_cache_dtype"] for row in rows] == ["auto", "k=int8,v=fp8"]
    ids = token_ids_of(tiny_tokenizer(VOCAB), text_path.read_text())
    assert len(ids) == LENGTH
    measured = measure_perplexity(tiny_model("llama"), ids, window=64, stride=32, kv_cache_dtype="k=int8,v=fp8")
    assert rows[1]["perplexity"] == pytest.approx(measured.perplexity, rel=1e-6)
    assert (rows[1]["window"], rows[1]["stride"], rows[1]["num_tokens"]) == (64, 32, measured.num_tokens)
    assert rows[0]["change"] == 0.0 != rows[1]["change"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_perplexity_and_divergence_print_tables_that_state_their_windows(model_path: Path, text_path: Path) -> None:
    result = run("perplexity", model_path, "--text", text_path, "--window", 64, "--kv-cache-dtype", "int8,auto")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "189 tokens scored, 3 windows of 64, stride 64" in words
    assert words.count("±") == 3, "the base, here auto, has no change"
    result = run("divergence", model_path, "--text", text_path, "--window", 64, "--worst", 2)
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "windows of 64, stride 64" in words
    assert "worst tokens" in words


def test_divergence_writes_its_worst_tokens_into_json(model_path: Path, text_path: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    options = ("--text", text_path, "--window", 64, "--worst", 2)
    result = run("divergence", model_path, *options, "--json", "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "<svg" in plot.read_text()
    rows = json.loads(result.stdout)["results"]
    assert [row["kv_cache_dtype"] for row in rows] == ["fp8", "int8"]
    assert all(len(row["worst"]) == 2 and row["mean_kl"] > 0 for row in rows)


def test_longcontext_prints_a_cell_for_every_length_and_depth(model_path: Path, tmp_path: Path) -> None:
    options = ("--lengths", "220,256", "--depths", "0,50,100", "--trials", 1, "--kv-cache-dtype", "auto,int8")
    plot = tmp_path / "map.svg"
    result = run("longcontext", model_path, *options, "--json", "--plot", plot)
    assert result.exit_code == 0, result.stderr
    for row in json.loads(result.stdout)["results"]:
        cells = [(cell["length"], cell["depth"]) for cell in row["cells"]]
        assert cells == [(length, depth) for length in (220, 256) for depth in (0.0, 0.5, 1.0)]
    assert "<svg" in plot.read_text()
    assert run("longcontext", model_path, *options).stdout.count("0% -") == 2 * 6


def test_longcontext_has_lengths_for_a_short_context(model_path: Path) -> None:
    """A quarter of 256 tokens has no room for the key and its question, and nobody asked for it."""
    result = run("longcontext", model_path, "--trials", 1, "--depths", "50", "--kv-cache-dtype", "auto", "--json")
    assert result.exit_code == 0, result.stderr
    assert [cell["length"] for cell in json.loads(result.stdout)["results"][0]["cells"]] == [256]


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--lengths", "512"], "--lengths 512"), (["--depths", "101"], "--depths '101'"), (["--lengths", "a"], "'a'")],
    ids=["length", "depth", "no-number"],
)
def test_a_length_or_depth_that_cannot_be_is_named(model_path: Path, options: list[str], message: str) -> None:
    result = run("longcontext", model_path, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_kv_error_shows_every_layer_and_head(model_path: Path, text_path: Path, tmp_path: Path) -> None:
    plot = tmp_path / "map.png"
    options = ("--text", text_path, "--tokens", 100, "--kv-cache-dtype", "int8,k=int8,v=auto")
    result = run("kv-error", model_path, *options, "--json", "--plot", plot)
    assert result.exit_code == 0, result.stderr
    results = json.loads(result.stdout)["results"]
    assert list(results) == ["int8", "k=int8,v=auto"]
    for errors in results.values():
        assert [(error["layer_idx"], len(error["key"]), len(error["output"])) for error in errors] == [
            (0, 2, 4), (1, 2, 4), (2, 2, 4),
        ]  # fmt: skip
    assert plot.stat().st_size > 10_000
    assert run("kv-error", model_path, *options).stdout.count("%") == 2 * 3 * 3
    assert run("kv-error", model_path, "--text", text_path, "--tokens", 300).exit_code == 1


def test_ctrl_c_ends_with_130_and_no_traceback(
    model_path: Path, text_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "target_logprobs", interrupt)
    result = run("perplexity", model_path, "--text", text_path, "--window", 64)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


def test_a_data_set_is_read_by_name_and_joined_with_blank_lines(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "test.jsonl").write_text('{"text": "a\\n"}\n{"text": ""}\n{"text": "b"}\n')
    (tmp_path / "train.jsonl").write_text('{"text": "c"}\n')
    assert dataset_text(str(tmp_path)) == "a\n\n\n\n\nb"
    other = tmp_path / "other"
    other.mkdir()
    (other / "test.jsonl").write_text('{"words": "a"}\n')
    with pytest.raises(ValueError, match=r"no column 'text'; it has words"):
        dataset_text(str(other))
    (other / "test.jsonl").write_text("{")
    with pytest.raises(ValueError, match="could not be read"):
        dataset_text(str(other))


def test_a_data_set_that_cannot_be_fetched_leaves_a_way_out(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, nothing_loads: None
) -> None:
    """Offline, `datasets` gives up after half a minute and says that it could not reach the hub."""
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'Salesforce/wikitext' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    result = run("perplexity", model_path, "--dataset", "wikitext2")
    message = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "reach 'Salesforce/wikitext'" in message and "(--text FILE)" in message


def test_without_datasets_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"hf_paged\[eval\]"):
        dataset_text("wikitext2")
