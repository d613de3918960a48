"""bf16 engines on a CPU, with Numba's kernels where they are there and without."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_engine import run, tiny_llama

from hf_paged.kernels import cpu_launch


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_without_numba_runs_and_meets_none_of_its_kernels(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba is an extra, which CI has. (In fp32, where tokens are compared, there are no kernels of it anyway.)"""
    torch.manual_seed(0)
    model = tiny_llama().bfloat16()
    monkeypatch.setattr(cpu_launch, "_available", lambda: False)
    monkeypatch.setattr(cpu_launch, "launch", lambda *args: pytest.fail("a kernel of an extra that is not there"))
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_scales": "off"}
    assert [len(row) for row in run(model, **options)] == [24] * 6


def test_a_numba_that_does_not_work_here_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numba refuses a NumPy that is too new when it is imported: not in the middle of a forward of somebody's."""
    monkeypatch.setitem(sys.modules, "hf_paged.kernels.cpu_kernels", None)
    monkeypatch.delattr("hf_paged.kernels.cpu_kernels", raising=False)
    monkeypatch.setattr(cpu_launch.importlib.util, "find_spec", lambda name: object())
    cpu_launch._available.cache_clear()
    try:
        assert not cpu_launch.has_kernels(torch.bfloat16)
    finally:
        cpu_launch._available.cache_clear()
    if sys.platform == "linux":
        assert "Numba does not work here" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_does_not_follow_torchs_default_dtype(dtype: torch.dtype) -> None:
    """A caller may have set it for models that it builds; settings of rows are fp32, and pages what they are."""
    torch.manual_seed(0)
    model = tiny_llama()
    expected = run(model, kv_cache_dtype="int8")
    torch.set_default_dtype(dtype)
    try:
        assert run(model, kv_cache_dtype="int8") == expected
    finally:
        torch.set_default_dtype(torch.float32)
