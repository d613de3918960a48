"""`hf-paged bench kernels` and what it measures with."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.cli import app
from hf_paged.eval.kernels_bench import KernelBench, build, bytes_per_token

CASE = ["--shape", "gqa4", "--batch", "2", "--context", "200"]


@pytest.mark.parametrize(("name", "value"), [("shapes", "mqa"), ("formats", "int3")])
def test_an_unknown_name_is_refused_with_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        KernelBench(**{name: (value,)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the error without a GPU")
def test_without_a_gpu_the_command_ends_in_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *CASE])
    assert result.exit_code == 1
    assert "measures a CUDA GPU" in result.output


@pytest.mark.gpu
def test_rotated_pages_are_disjoint_and_bytes_are_codes_and_scales() -> None:
    """A cache that serves the second call would flatter every figure."""
    _, layer, metas, traffic = build(2, 200, 1, 8, 2, 64, torch.int8, 32)
    tables = torch.stack([meta.block_tables for meta in metas])
    assert len(tables) > 1
    assert tables.unique().numel() == tables.numel()
    assert bytes_per_token(layer.k) == 2 * (64 + 2)
    assert traffic == 2 * 2 * (64 + 2) * 2 * 200


@pytest.mark.gpu
def test_the_command_prints_a_table_and_one_json_line() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--what", "decode", "--format", "int8", *CASE])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["kernel"], row["format"], row["context"]) for row in rows] == [("decode", "int8", 200)]
    assert rows[0]["percent"] > 0
