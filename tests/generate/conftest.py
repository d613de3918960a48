"""Both drivers of paged generation: tests that take `driver` run on each, and never on the other by accident."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged import paged_call


@pytest.fixture(params=["loop", "engine"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each driver in turn, for calls that the engine can express; the loop serves those as well."""
    choose = paged_call.driver_for

    def forced(*args: Any) -> tuple[str, str]:
        chosen = choose(*args)
        assert chosen[0] == "engine" or request.param == "loop", f"the engine does not take this call: {chosen}"
        return (request.param, "chosen by the test")

    monkeypatch.setattr(paged_call, "driver_for", forced)
    return str(request.param)
