"""Whether a model still finds what stands far back: passkey retrieval by length and depth, through the pages.

A text of `length` tokens tells a five-digit key once, `depth` of the way down, and ends with the question for it (the
task of Mohtashami and Jaggi, 2023). The key counts as retrieved when every one of its tokens is the likeliest, given
those before it: just when greedy decoding would write it. The key's mean log-probability tells formats apart where all
or none of the keys are retrieved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_paged.config import refuse
from hf_paged.eval.figures import CacheFigures, facts_of
from hf_paged.eval.scoring import ScoringEngine, TokenScores, score_windows
from hf_paged.eval.texts import Window, context_of

INTRODUCTION = "There is important information hidden in a lot of irrelevant text. Find it and remember it."
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True, kw_only=True)
class RetrievalCell:
    """All trials of one length and depth."""

    length: int  # tokens, the key included
    depth: float  # 0 = at the start of the text, 1 = just before the question
    retrieved: float  # share of the trials
    logprob: float  # mean over the tokens of the keys


@dataclass(frozen=True, kw_only=True)
class RetrievalResult(CacheFigures):
    """One KV cache."""

    trials: int  # per cell
    cells: tuple[RetrievalCell, ...]  # by length, then depth

    @property
    def retrieved(self) -> float:
        """Share of all trials."""
        return sum(cell.retrieved for cell in self.cells) / len(self.cells)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One text that ends with the key it hides; the key is what the window scores."""

    length: int
    depth: float
    window: Window


def make_cases(
    tokenizer: Any, *, lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int, filler: str = FILLER
) -> list[Case]:
    """The texts of all trials by length, then depth, always the same for one seed.

    Args:
        filler: the irrelevant text; sentences of it are repeated as far as needed.

    Raises:
        ValueError: a length that does not hold introduction, needle and question, or a depth outside 0..1.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            refuse("depth", depth, "0..1")
    if trials < 1:
        refuse("trials", trials, "1 or more")
    if not filler.strip():
        raise ValueError("the filler text is empty")
    sentences = [_ids(tokenizer, " " + sentence) for sentence in re.split(r"(?<=[.!?])\s+", filler.strip())]
    return [
        _case(tokenizer, sentences, length, depth, random.Random(f"{seed} {length} {depth} {trial}"))
        for length in lengths
        for depth in depths
        for trial in range(trials)
    ]


def _case(tokenizer: Any, sentences: list[list[int]], length: int, depth: float, rng: random.Random) -> Case:
    key = str(rng.randrange(10_000, 100_000))
    start = tokenizer(INTRODUCTION).input_ids  # with the tokenizer's own BOS, if it has one
    needle, question = _ids(tokenizer, NEEDLE.format(key=key)), _ids(tokenizer, QUESTION)
    asked = _ids(tokenizer, f"{QUESTION} {key}")
    while asked[: len(question)] != question:  # the last token of the question joins the key
        question = question[:-1]
    room = length - len(start) - len(needle) - len(asked)
    if room < 0:
        refuse("length", length, f"{length - room} tokens or more: introduction, key and question")
    first = rng.randrange(len(sentences))
    before: list[int] = []
    hay: list[int] = []
    i = 0
    while len(hay) < room:
        hay += sentences[(first + i) % len(sentences)]
        if len(hay) <= depth * room:  # the needle follows a whole sentence
            before = list(hay)
        i += 1
    after = hay[len(before) : room]
    ids = [*start, *before, *needle, *after, *asked]
    assert len(ids) == length
    window = Window(token_ids=ids, num_context=length - len(asked) + len(question))
    return Case(length=length, depth=depth, window=window)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def measure_retrieval(
    model: PreTrainedModel,
    cases: Sequence[Case],
    *,
    kv_cache_dtype: str = "auto",
    chunk: int | None = None,
    progress: Callable[[int], object] | None = None,
    **engine_options: Any,
) -> RetrievalResult:
    """Retrieval of every case through the pages of one format.

    Args:
        cases: of `make_cases`.
        chunk: tokens computed per step.
        progress: told the number of keys' tokens whenever some were scored.
        engine_options: fields of `EngineConfig`.

    Raises:
        ValueError: a case longer than the model's context, or an option that is not allowed.
    """
    longest, context = max(case.length for case in cases), context_of(model.config)
    if context is not None and longest > context:
        refuse("length", longest, f"at most {context}, the context of this model")
    engine = ScoringEngine(model, max_tokens=longest - 1, chunk=chunk, kv_cache_dtype=kv_cache_dtype, **engine_options)
    scores = score_windows(engine, [case.window for case in cases], progress)
    return RetrievalResult(
        **facts_of(engine, kv_cache_dtype),
        trials=_trials(cases),
        cells=_cells(cases, scores),
    )


def _trials(cases: Sequence[Case]) -> int:
    return sum((case.length, case.depth) == (cases[0].length, cases[0].depth) for case in cases)


def _cells(cases: Sequence[Case], scores: Sequence[TokenScores]) -> tuple[RetrievalCell, ...]:
    members: dict[tuple[int, float], list[TokenScores]] = {}
    for case, score in zip(cases, scores, strict=True):
        members.setdefault((case.length, case.depth), []).append(score)
    return tuple(
        RetrievalCell(
            length=length,
            depth=depth,
            retrieved=sum(bool(score.is_top1.all()) for score in found) / len(found),
            logprob=sum(float(score.logprobs.mean()) for score in found) / len(found),
        )
        for (length, depth), found in members.items()
    )
