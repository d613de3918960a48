"""Texts to score: from a file or by the name of a data set, as token ids, and cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged.config import refuse

# Names people use -> path and configuration on the hub. Rows are joined as the GPTQ line of papers joins them.
DATASETS = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"), "wikitext": ("Salesforce/wikitext", None)}


def read_text(path: Path) -> str:
    """A UTF-8 file.

    Raises:
        ValueError: it is no UTF-8 text, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def dataset_text(name: str, split: str = "test") -> str:
    """The rows of a data set's column `text`, joined with blank lines: WikiText-2 "the standard way".

    Args:
        name: `wikitext2`, or anything that `datasets.load_dataset` takes, with ":CONFIG" after it where there are more.

    Raises:
        ValueError: `datasets` is not installed or cannot read the data set, or there is no column `text`.
        OSError: there is no such data set, or no way to it.
    """
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError('a data set by name needs the package datasets: pip install "hf_paged[eval]"') from error
    path, _, config = name.partition(":")
    if not path.strip("/ "):
        refuse("dataset", name, "NAME[:CONFIG], such as wikitext2")
    path, default = DATASETS.get(path, (path, None))
    try:
        rows = load_dataset(path, config or default, split=split)
    except DatasetsError as error:
        raise ValueError(f"data set {name!r} could not be read: {error}") from error
    except OSError as error:
        raise OSError(f"data set {name!r} is not here: {error}; a file of its text will do (--text FILE)") from error
    if "text" not in rows.column_names:
        raise ValueError(f"data set {name!r} has no column 'text'; it has {', '.join(rows.column_names)}")
    return "\n\n".join(rows["text"])


def token_ids_of(tokenizer: Any, text: str) -> list[int]:
    """The ids of a whole text, with what the tokenizer adds by itself (a BOS, if it does) and nothing else."""
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of a text; its first `num_context` tokens (at least 1) are read but not scored."""

    token_ids: list[int]
    num_context: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_context


def windows_of(
    token_ids: Sequence[int], window: int, stride: int | None = None, limit: int | None = None
) -> list[Window]:
    """Full windows of `window` tokens, `stride` apart (None = `window`, no overlap), at most `limit` of them.

    No token is scored twice. Without overlap the first token of each window is not scored, the way of the papers; with
    it, each window after the first scores its last `stride` tokens. What is left at the end is dropped.

    Raises:
        ValueError: the text is shorter than one window, or a window or stride that scores nothing.
    """
    check_windows(window, stride, limit)
    stride = stride or window
    if len(token_ids) < window:
        raise ValueError(f"the text has {len(token_ids)} tokens, fewer than one window of {window}: lower the window")
    starts = range(0, len(token_ids) - window + 1, stride)[:limit]
    return [
        Window(
            token_ids=list(token_ids[start : start + window]),
            num_context=1 if start == 0 else max(1, window - stride),
        )
        for start in starts
    ]


def check_windows(window: int, stride: int | None, limit: int | None, context: int | None = None) -> None:
    """Refuse, without a text, what `windows_of` would refuse, and a window longer than a model's context."""
    if window < 2 or (context is not None and window > context):
        refuse("window", window, "2 tokens or more" if context is None else f"2..{context}, the context of the model")
    if stride is not None and not 1 <= stride <= window:
        refuse("stride", stride, f"1..{window}, the window")
    if limit is not None and limit < 1:
        refuse("limit", limit, "1 window or more")


def context_of(config: Any) -> int | None:
    """The tokens that a model was made for, by its config; None = it does not say."""
    context: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context
