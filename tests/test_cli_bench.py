"""`hf-paged bench`: what each command measures, and the JSON line that it ends with."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from command_line import run, save_model

from hf_paged.eval.workload import make_workload


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def test_bench_memory_shows_the_promised_waste_from_the_real_block_pool() -> None:
    result = run("bench", "memory", "--new-tokens", "64", "--new-tokens", "512")
    assert result.exit_code == 0, result.stderr
    records = json.loads(result.stdout.splitlines()[-1])["caches"]
    for new_tokens in (64, 512):
        caches = {record["cache"]: record for record in records if record["new_tokens"] == new_tokens}
        # Half a block of 32 in requests of about 1,150 tokens is 1.4%; a padded batch of 256..2048 wastes over a third.
        assert caches["paged, block size 32"]["run_share"] <= 0.016
        assert caches["dense, padded"]["run_share"] > 0.3
        shares = [cache["run_share"] for name, cache in caches.items() if name != "dense, padded"]
        assert shares == sorted(shares)
    assert caches["paged, block size 128"]["peak_share"] < 0.04  # of longer requests half a block is less


def test_bench_throughput_measures_its_systems_and_ends_with_json(model_path: Path) -> None:
    result = run(
        "bench", "throughput", model_path, "--workload", "ragged3", "--prompt-tokens", "8..24", "--new-tokens", "4",
        "--baseline", "dense", "--baseline", "native", "--repeats", "1", "--kv-cache-dtype", "int8",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    systems = [(row["system"], row["kv_cache"]) for row in record["results"]]
    natives = [("native, bounded", "auto"), ("native, tuned", "auto")]
    assert systems == [("hf_paged", "int8"), ("dense", "auto"), *natives]
    assert all(0 < row["tokens_per_s"] < row["ceiling"] for row in record["results"])


def test_bench_throughput_takes_formats_and_workloads_and_tells_each_decode_step(
    model_path: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "speed.png"
    result = run(
        "bench", "throughput", model_path, "--workload", "b1", "--workload", "ragged3", "--prompt-tokens", "8..24",
        "--new-tokens", "4", "--sampled", "--repeats", "1", "--kv-cache-dtype", "auto,int8", "--plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["results"]
    kinds = [(row["kv_cache"], row["workload"], row["system"]) for row in rows]
    assert kinds == list(product(("auto", "int8"), ("b1", "ragged3"), ("hf_paged", "hf_paged, sampled")))
    assert all(row["step_ceiling"] > 0 and row["prefill"] > 0 for row in rows)
    assert picture.stat().st_size > 0


def test_a_shape_can_have_packed_weights_of_its_own_and_a_model_cannot(model_path: Path) -> None:
    result = run("bench", "throughput", model_path, "--weight-bits", "4", "--workload", "b1")
    assert result.exit_code == 1
    assert "weight_bits=4" in result.stderr


def test_workloads_that_let_different_numbers_run_need_an_engine_each(model_path: Path) -> None:
    result = run("bench", "throughput", model_path, "--workload", "ragged129", "--workload", "burst")
    assert result.exit_code == 1
    assert "an engine each" in result.stderr


def test_bench_latency_ends_with_json(model_path: Path) -> None:
    options = ("--prompt-tokens", "16", "--new-tokens", "6", "--repeats", "1", "--num-blocks", "16", "--dense")
    result = run("bench", "latency", model_path, *options)
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert [row["system"] for row in record["results"]] == ["hf_paged", "dense"]
    assert all(row["ceiling"] < row["p50"] <= row["p99"] for row in record["results"])
    assert all(row["first_ceiling"] < row["first_token"] for row in record["results"])


def test_bench_online_reports_percentiles_over_all_requests(model_path: Path) -> None:
    options = ("--workload", "ragged3", "--prompt-tokens", "8..16", "--new-tokens", "2..5", "--rate", "50")
    result = run("bench", "online", model_path, *options)
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])["results"][0]
    assert row["rate"] == 50
    assert 0 < row["first_p50"] <= row["first_p99"]
    assert 0 < row["between_p50"] <= row["between_p99"]


def test_bench_online_of_one_token_gives_no_time_between_tokens(model_path: Path) -> None:
    """It said 0.0 ms, which is the best that a reader of the table can find."""
    options = ("--workload", "b2", "--prompt-tokens", "8", "--new-tokens", "1")
    result = run("bench", "online", model_path, *options)
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])["results"][0]
    assert (row["between_p50"], row["between_p99"], row["between"]) == (None, None, None)
    assert row["first_p50"] > 0
    result = run("bench", "online", model_path, *options, "--plot", model_path / "plot.svg")
    assert result.exit_code == 2 and "two new tokens" in result.stderr
    assert not (model_path / "plot.svg").exists()


def test_bench_online_takes_its_rate_from_that_of_all_at_once(model_path: Path) -> None:
    options = ("--workload", "ragged4", "--prompt-tokens", "8..16", "--new-tokens", "2..5", "--load", "0.5")
    result = run("bench", "online", model_path, *options, "--arrivals", "3")
    assert result.exit_code == 0, result.stderr
    at_once, arriving = json.loads(result.stdout.splitlines()[-1])["results"]
    assert (at_once["requests"], at_once["rate"], arriving["requests"], arriving["ceiling"]) == (4, None, 3, None)
    tokens = sum(make_workload("ragged4", prompt_tokens="8..16", new_tokens="2..5").output_lens)
    assert arriving["rate"] == pytest.approx(0.5 * at_once["tokens_per_s"] / (tokens / 4))
    assert at_once["tokens_per_s"] < at_once["ceiling"]


def test_bench_steps_times_decodes_alone_and_beside_a_prompt(model_path: Path) -> None:
    options = ("--running", "1", "--running", "3", "--prompt-tokens", "8", "--beside", "4", "--kv-cache-dtype", "int8")
    result = run("bench", "steps", model_path, *options)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["results"]
    assert [(row["running"], row["beside"]) for row in rows] == [(1, 0), (1, 4), (3, 0), (3, 4)]
    assert all(0 < row["ceiling"] < row["wall"] for row in rows)


def test_bench_start_tells_when_the_first_token_came_and_what_fits(model_path: Path) -> None:
    result = run("bench", "start", model_path, "--kv-cache-dtype", "auto,int8", "--num-blocks", "9")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["results"]
    assert [(row["kv_cache"], row["kv_tokens"]) for row in rows] == [("auto", 256), ("int8", 256)]
    assert all(0 < row["engine"] < row["first_token"] for row in rows)
