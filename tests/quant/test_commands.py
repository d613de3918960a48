"""Every way in takes a packed checkpoint by its path: the commands, and `LLM`."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_zoo import VOCAB, prompts, tiny_model
from quant_files import Cell, write_model
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

from hf_paged import LLM, SamplingParams
from hf_paged.cli import app

CELLS = {"awq": Cell(kind="awq_gemm"), "gptq act-order": Cell(act_order=True)}


@pytest.fixture(scope="module", params=CELLS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    write_model(tiny_model("llama"), path, CELLS[request.param])
    for place in (path, path / "dense"):
        tiny_tokenizer(VOCAB).save_pretrained(place)
    (path / "text.txt").write_text("a bad cab faced a fab deed " * 40)
    return path


COMMANDS = {
    "generate": ["generate", "{model}", "abc", "--max-tokens", "4", "--kv-cache-dtype", "int8"],
    "info": ["info", "{model}"],
    "perplexity": ["eval", "perplexity", "{model}", "--text", "{model}/text.txt", "--window", "32",
                   "--max-windows", "2"],
    "throughput": ["bench", "throughput", "{model}", "--workload", "b2", "--prompt-tokens", "8", "--new-tokens", "3",
                   "--repeats", "1", "--device", "cpu"],
    "latency": ["bench", "latency", "{model}", "--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1",
                "--device", "cpu"],
    "calibrate": ["calibrate", "{model}", "-o", "{model}/kv.safetensors"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_packed_checkpoint(command: str, folder: Path) -> None:
    arguments = [argument.replace("{model}", str(folder)) for argument in COMMANDS[command]]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_an_engine_of_the_path_gives_the_tokens_of_the_dequantized_weights(folder: Path) -> None:
    options = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    rows = [row.tolist() for row in prompts((9, 12, 7))]
    results = [
        [output.outputs[0].token_ids for output in LLM(str(path), dtype="float32").generate(rows, options)]
        for path in (folder, folder / "dense")
    ]
    assert results[0] == results[1]
