"""`hf-paged calibrate` writes what `LLM` and `info` read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run, save_model

from hf_paged import LLM


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def test_the_file_of_a_text_serves_every_format_without_another_calibration(model_path: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "kv.safetensors"
    text.write_text("the cat sat on the mat and looked at the moon " * 20, encoding="utf-8")
    result = run("calibrate", model_path, "-o", file, "--text", text, "--max-tokens", 200)
    assert result.exit_code == 0, result.output
    assert "auto-quality" in result.stdout and "200 tokens of text" in result.stdout
    for kv_cache_dtype in ("fp8", "int8", "int4", "k=int8,v=int4", "auto-quality"):
        llm = LLM(str(model_path), kv_cache_dtype=kv_cache_dtype, kv_scales=str(file), num_blocks=20)
        if kv_cache_dtype != "auto-quality":
            assert llm.engine.kv_plan.source == "200 tokens of text"


def test_info_shows_what_a_file_protects_and_loads_no_weights(model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "kv.safetensors"
    assert run("calibrate", model_path, "-o", file).exit_code == 0
    plain = json.loads(run("info", model_path, "--json", "--no-protection").stdout)
    (model_path / "model.safetensors").rename(tmp_path / "away")
    try:
        known = json.loads(run("info", model_path, "--json", "--no-fusion", "--kv-scales", file).stdout)
    finally:
        (tmp_path / "away").rename(model_path / "model.safetensors")
    assert all(cost["protection"] is None for cost in plain["kv_cache"])
    assert all(isinstance(cost["protection"], str) for cost in known["kv_cache"])
    for before, after in zip(plain["kv_cache"], known["kv_cache"], strict=True):
        assert after["protection"] != "none" or after["bytes_per_token"] == before["bytes_per_token"]
    assert known["kv_cache"][-1]["bytes_per_token"] > plain["kv_cache"][-1]["bytes_per_token"], "of int4"


def test_a_text_that_is_too_short_and_a_file_that_is_none_end_in_one_line(model_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    for content, message in (("", "holds no text"), ("a", "at least 2 are needed")):
        text.write_text(content, encoding="utf-8")
        result = run("calibrate", model_path, "-o", tmp_path / "kv.safetensors", "--text", text)
        assert result.exit_code == 1 and message in result.output.replace("\n", " ")
        assert not (tmp_path / "kv.safetensors").exists()
    result = run("calibrate", model_path, "-o", tmp_path / "none" / "kv.safetensors")
    assert result.exit_code == 1 and "there is no folder" in result.output.replace("\n", " ")
    assert run("info", model_path, "--kv-scales", tmp_path / "none").exit_code == 2
