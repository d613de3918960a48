"""Quantized loading is switched on for these tests and off again after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers

from hf_paged.quant import registry


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    registry.register()
    yield
    registry.unregister()
