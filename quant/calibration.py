"""Calibration: the token windows whose activations a method looks at, the same for the same source and seed.

A source is a text file (whole), a JSONL file (`text`, or `messages` for the chat template), the name of a Hugging Face
data set with the same columns, or texts and token windows given in Python. Texts are joined by an end-of-sequence
token, cut into windows of `seqlen` tokens, and `samples` of the windows are drawn without replacement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DATASET_SLACK = 4  # tokens read of a dataset, as a multiple of what is drawn: it need not be read whole


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Windows of token ids and where they come from."""

    input_ids: Tensor  # [samples, seqlen] int64, on the CPU
    source: str
    seed: int

    @property
    def sha256(self) -> str:
        """Of the token ids, as little-endian int64 with their shape before them."""
        shape = json.dumps(list(self.input_ids.shape)).encode()
        return hashlib.sha256(shape + self.input_ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        samples, seqlen = self.input_ids.shape
        return {
            "source": self.source,
            "samples": samples,
            "seqlen": seqlen,
            "seed": self.seed,
            "sha256": self.sha256,
        }

    def check(self, vocab_size: int) -> None:
        """Raise ValueError when a token has no row in an embedding of `vocab_size` rows."""
        low, high = int(self.input_ids.min()), int(self.input_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"calibration {self.source} holds token {high if high >= vocab_size else low}, the model's vocabulary "
                f"has {vocab_size} tokens: the tokenizer is not this model's"
            )


def load_calibration(
    source: str | Path | Tensor | Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    samples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
) -> Calibration:
    """Windows `[samples, seqlen]` of `source`.

    Args:
        source: a path to a text or JSONL file, a data set as `NAME[:CONFIG]` (its split train), a list of texts, or
            token ids `[samples, seqlen]`, which are taken as they are.
        tokenizer: the model's; token ids need none.

    Raises:
        ValueError: no text, too little of it, or a file that is not what its name says.
    """
    if isinstance(source, Tensor):
        return _given(source, seed)
    if tokenizer is None:
        raise ValueError("calibration text needs a tokenizer, and the model's folder has none; pass tokenizer=")
    needed = samples * seqlen
    name, texts = _open(source, tokenizer)
    streamed = isinstance(source, str | Path) and not Path(source).exists()
    limit = needed * _DATASET_SLACK if streamed else None
    ids = torch.tensor(list(_tokens(texts, tokenizer, limit)), dtype=torch.int64)
    windows = len(ids) // seqlen
    if windows < samples:
        fix = f"lower samples to {windows}" if windows else f"lower seqlen to {max(len(ids), 2)} or less"
        raise ValueError(
            f"calibration {name} has {len(ids):,} tokens, {samples} windows of {seqlen} need {needed:,}: "
            f"{fix}, or give more text"
        )
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))[:samples]
    return Calibration(input_ids=ids[: windows * seqlen].view(windows, seqlen)[order], source=name, seed=seed)


def _given(ids: Tensor, seed: int) -> Calibration:
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise ValueError(f"calibration ids: expected integers [samples, seqlen], found {ids.dtype} {[*ids.shape]}")
    return Calibration(input_ids=ids.to("cpu", torch.int64), source="token ids", seed=seed)


def _open(source: str | Path | Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[str, Iterable[str]]:
    """A name to print, and the texts."""
    if not isinstance(source, str | Path):
        return f"{len(source)} texts", _checked(source)
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"calibration={str(source)!r} is a folder; allowed: a text or JSONL file, a data set")
    if not path.exists() and (path.suffix or path.is_absolute()):
        raise ValueError(f"calibration={str(source)!r}: no such file; allowed: a text or JSONL file, a data set")
    if not path.exists():
        return str(source), (_text(row, tokenizer, str(source)) for row in _dataset(str(source)))
    if path.suffix in (".jsonl", ".ndjson"):
        return path.name, (_text(row, tokenizer, where) for row, where in _json_lines(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration {path}: expected UTF-8 text, found byte {error.start} that is none") from error
    if not text.strip():
        raise ValueError(f"calibration {path}: the file holds no text")
    return path.name, [text]


def _checked(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"calibration: expected texts, found {type(text).__name__}")
        yield text


def _json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise ValueError(f"calibration {path}:{number}: expected JSON in UTF-8, found {error}") from error
                yield row, f"{path}:{number}"


def _text(row: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """The text of one record: itself, its `text`, or its `messages` through the chat template."""
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping) and isinstance(row.get("text"), str):
        return str(row["text"])
    if isinstance(row, Mapping) and isinstance(row.get("messages"), list):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"calibration {where}: `messages` need a chat template, and the tokenizer has none")
        try:
            return str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        except Exception as error:  # a template is a program and fails as it likes
            raise ValueError(f"calibration {where}: the chat template refuses `messages`: {error}") from error
    found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"calibration {where}: expected a string, or an object with `text` or `messages`, found {found}")


def _dataset(name: str) -> Iterator[Any]:
    """Records of the split `train` of `NAME[:CONFIG]`, streamed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"calibration={name!r} is no file, and a data set needs the package datasets: pip install 'hf_paged[eval]'"
        ) from error
    repository, _, config = name.partition(":")
    try:
        return iter(load_dataset(repository, config or None, split="train", streaming=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"calibration={name!r} is neither a file nor a data set that can be read: {error}; a text or JSONL file "
            "needs no network"
        ) from error


def _tokens(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> Iterator[int]:
    """Token ids of all texts; from the second on after an end-of-sequence token. Chat templates bring their own."""
    special = tokenizer.bos_token is None or tokenizer.bos_token == ""
    count, between = 0, [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for index, text in enumerate(texts):
        has_bos = not special and text.startswith(str(tokenizer.bos_token))
        ids = tokenizer(text, verbose=False, add_special_tokens=not has_bos).input_ids
        for token in chain(between if index and ids[:1] != between else (), ids):
            count += 1
            yield token
        if limit is not None and count >= limit:
            return
