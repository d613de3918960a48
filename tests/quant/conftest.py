"""Quantized loading is switched on for these tests and off again after them; a small model to quantize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from model_zoo import VOCAB, tiny_model
from tiny_tokenizer import tiny_tokenizer

from hf_paged.quant import registry


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    registry.register()
    yield
    registry.unregister()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", intermediate_size=128).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "do_sample": true}')
    return folder
