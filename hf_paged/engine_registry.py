"""The engines behind `generate()`: one per living model, sized by the largest call so far, used by one call at a time.

A second call of the same size captures and compiles nothing. An engine is rebuilt when its model changed or a call does
not fit, and cached prefixes never outlive a call: weights may have been written in place since.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from hf_paged.config import EngineConfig, refuse
from hf_paged.engine import Engine
from hf_paged.model_view import ModelFingerprint

_LENGTH_STEP = 1024  # max_model_len is a multiple of it, so that calls of similar length share captured graphs


@dataclass(frozen=True, kw_only=True)
class _Size:
    """What an engine holds."""

    num_rows: int
    max_model_len: int
    pool_tokens: int

    def holds(self, other: _Size) -> bool:
        return all(getattr(self, name) >= getattr(other, name) for name in vars(other))

    def union(self, other: _Size) -> _Size:
        return _Size(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})


class _Slot:
    """The engine of one model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None  # thread whose call is running
        self.engine: Engine | None = None
        self.size = _Size(num_rows=0, max_model_len=0, pool_tokens=0)
        self.structure: int | None = None
        self.config: EngineConfig | None = None


class EngineRegistry:
    """Engines of living models, held no longer than the models are."""

    def __init__(self) -> None:
        self._slots: weakref.WeakKeyDictionary[PreTrainedModel, _Slot] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def lease(
        self, model: PreTrainedModel, config: EngineConfig, *, num_rows: int, max_length: int
    ) -> Iterator[Engine]:
        """The model's engine for one call of `num_rows` sequences of at most `max_length` tokens.

        Raises:
            RuntimeError: this thread is inside a paged call on the model (a processor or a streamer called generate).
        """
        rows_in_blocks = num_rows * math.ceil(max_length / config.block_size)
        size = _Size(
            num_rows=num_rows,
            max_model_len=_rounded_length(model, max_length),
            pool_tokens=0 if config.num_blocks is not None else rows_in_blocks * config.block_size,
        )
        with self._lock:
            slot = self._slots.setdefault(model, _Slot())
        with _held(slot):
            _prepare(slot, model, config, size)
            assert slot.engine is not None
            yield slot.engine

    def release(self, model: PreTrainedModel) -> None:
        """Free the model's engine once no call runs on it; the next call makes another.

        Raises:
            RuntimeError: this thread is inside a paged call on the model.
        """
        slot = self._slots.get(model)
        if slot is not None:
            with _held(slot):
                slot.engine = None

    def clear(self) -> None:
        with self._lock:
            self._slots.clear()


@contextmanager
def _held(slot: _Slot) -> Iterator[None]:
    """One thread at a time, and not twice."""
    if slot.owner == threading.get_ident():
        raise RuntimeError("generate() or release() was called on a model from inside its own paged generate() call")
    with slot.lock:
        slot.owner = threading.get_ident()
        try:
            yield
        finally:
            slot.owner = None


def _prepare(slot: _Slot, model: PreTrainedModel, config: EngineConfig, size: _Size) -> None:
    """Let the slot's engine serve a call, with a new engine if the present one cannot."""
    same = slot.structure == ModelFingerprint(model).structure and slot.config == config
    if slot.engine is None or not same or not slot.size.holds(size):
        kept = slot.size if same and slot.engine is not None else size
        slot.engine = None  # its blocks are free before the new ones are taken
        wanted = kept.union(size)
        sized = replace(config, max_num_seqs=wanted.num_rows, max_model_len=wanted.max_model_len)
        slot.engine = Engine(model, sized, pool_tokens=wanted.pool_tokens or None)
        slot.size = wanted  # only now: a size that could not be had must not be asked for again
        slot.structure, slot.config = ModelFingerprint(model).structure, config  # taken late: fusion moves weights
    slot.engine.scheduler.reset_prefix_cache()
    slot.engine.follow_weights()


def _rounded_length(model: PreTrainedModel, max_length: int) -> int:
    """The next multiple of `_LENGTH_STEP`, but no more positions than the model has unless the call asks for them."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    rounded = math.ceil(max_length / _LENGTH_STEP) * _LENGTH_STEP
    return rounded if limit is None else max(min(rounded, limit), max_length)


ENGINES = EngineRegistry()


def release(model: PreTrainedModel) -> None:
    """Free what `generate(cache_implementation="paged")` keeps for the next call on `model`: pages, captured steps.

    A call that runs in another thread ends first. The next call makes all of it again.

    Raises:
        ValueError: not a model.
        RuntimeError: called from inside a paged call on the model.
    """
    if not isinstance(model, PreTrainedModel):
        refuse("model", model, "a Transformers model")
    ENGINES.release(model)
