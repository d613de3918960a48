"""Both drivers of paged generation: tests that take `driver` run on each, and never on the other by accident."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged import paged_call

_ENGINE = ("engine_generation", "outputs", "sampler")
DRIVERS = ("loop", "engine") if all(importlib.util.find_spec(f"hf_paged.{name}") for name in _ENGINE) else ("loop",)


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each driver in turn, for calls that the engine can express; the loop serves those as well."""
    choose = paged_call.driver_for

    def forced(*args: Any) -> tuple[str, str]:
        chosen = choose(*args)
        assert chosen[0] == "engine" or request.param == "loop", f"the engine does not take this call: {chosen}"
        return (request.param, "chosen by the test")

    monkeypatch.setattr(paged_call, "driver_for", forced)
    return str(request.param)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and a loaded machine does not make them slower than that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
