"""Calibration windows: the same for the same source and seed, from every kind of source, or an error that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB
from tiny_tokenizer import tiny_tokenizer

from hf_paged.quant.calibration import load_calibration
from hf_paged.quant.quantize_config import QuantizeConfig

TEXT = "".join(chr(33 + (7 * i * i + i) % 80) for i in range(4000))
CHAT = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer(VOCAB)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_same_text_and_seed_give_the_same_windows_and_hash(text: Path, tokenizer: Any) -> None:
    one, again = (load_calibration(text, tokenizer, samples=8, seqlen=64, seed=3) for _ in range(2))
    other = load_calibration(text, tokenizer, samples=8, seqlen=64, seed=4)
    assert torch.equal(one.input_ids, again.input_ids) and one.sha256 == again.sha256
    assert one.sha256 != other.sha256
    assert one.input_ids.shape == (8, 64) and one.input_ids.dtype == torch.int64


def test_windows_are_pieces_of_the_text_and_none_is_drawn_twice(text: Path, tokenizer: Any) -> None:
    found = load_calibration(text, tokenizer, samples=62, seqlen=64)
    pieces = {TEXT[start : start + 64] for start in range(0, 62 * 64, 64)}
    assert {tokenizer.decode(window) for window in found.input_ids} == pieces


def test_the_hash_tells_shapes_apart(tokenizer: Any) -> None:
    ids = torch.arange(3, 35)
    one, other = (load_calibration(ids.view(shape), None) for shape in ((2, 16), (4, 8)))
    assert one.sha256 != other.sha256


def test_records_are_separated_by_the_end_of_sequence_token(tmp_path: Path, tokenizer: Any) -> None:
    lines = [{"text": "abc"}, "defg", {"text": "hi", "other": 1}]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = load_calibration(path, tokenizer, samples=1, seqlen=11).input_ids[0].tolist()
    expected = [*tokenizer("abc").input_ids, 2, *tokenizer("defg").input_ids, 2, *tokenizer("hi").input_ids]
    assert found == expected
    assert load_calibration(["abc", "defg", "hi"], tokenizer, samples=1, seqlen=11).input_ids[0].tolist() == expected


def test_messages_go_through_the_chat_template_and_get_no_second_bos(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hey"}]}))
    found = load_calibration(path, tokenizer, samples=1, seqlen=9).input_ids[0]
    assert found.tolist() == [1, *tokenizer("user:hey").input_ids]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"text": "a"}\n{"text":', r"bad\.jsonl:2: expected JSON"),
        ("keys.jsonl", '{"prompt": "a"}', r"keys\.jsonl:1: expected a string, or an object .* found \['prompt'\]"),
        ("chat.jsonl", '{"messages": []}', r"chat\.jsonl:1: `messages` need a chat template"),
    ],
)
def test_a_damaged_record_is_named_by_its_line(
    name: str, content: str, message: str, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / name, tokenizer, samples=1, seqlen=2)


def test_text_without_a_tokenizer_and_texts_that_are_none_are_refused(text: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        load_calibration(text, None)
    with pytest.raises(ValueError, match="expected texts, found int"):
        load_calibration([1, 2], tokenizer)  # type: ignore[list-item]


def test_a_data_set_is_read_by_name_and_only_as_far_as_needed(tmp_path: Path, tokenizer: Any) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": TEXT[i : i + 40]} for i in range(0, 4000, 40)]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    read = []
    load = datasets.load_dataset

    def counting(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name == "org/set"
        for row in load("json", data_files=str(folder / "train.jsonl"), split="train", streaming=True):
            read.append(row)
            yield row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", counting)
        found = load_calibration("org/set", tokenizer, samples=2, seqlen=32)
    assert found.source == "org/set" and found.input_ids.shape == (2, 32)
    assert len(read) < 10


def test_a_name_that_is_neither_file_nor_data_set_says_so(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"'wikitext' is no file, and a data set needs the package datasets"):
        load_calibration("wikitext", tokenizer)


@pytest.mark.parametrize(
    ("context", "samples", "seqlen"), [(None, 128, 2048), (32_768, 128, 2048), (1024, 256, 1024), (10**6, 128, 2048)]
)
def test_windows_fit_the_context_and_hold_as_many_tokens_in_all(context: int | None, samples: int, seqlen: int) -> None:
    """2048 tokens are more than small models were made for: a default must not be refused."""
    found = QuantizeConfig().resolved(context)
    assert (found.samples, found.seqlen) == (samples, seqlen)
    asked = QuantizeConfig(samples=3, seqlen=5000).resolved(context)
    assert (asked.samples, asked.seqlen) == (3, 5000)
