"""Kernels whose programs wait for each other run one after another on a GPU.

Such a kernel (`layer_chain.py`) takes a place on every multiprocessor. Two at once, of engines on two streams, would
each find some of the places and wait for the other's for ever. Within a stream that cannot be: all programs of one have
their places before any kernel behind it is let start. Between streams of a process a turn begins, on the GPU, when the
one before it has ended. All other kernels leave their places without one of ours: none of this package waits for its
own programs for ever, and a collective only for its part on another GPU, which comes when the chain there has ended.
(A kernel of another stream that keeps a multiprocessor for more than a minute makes a chain trap.) Processes have a GPU
in turns, too, unless MPS runs them side by side: there such a kernel is launched cooperatively, which finds all places
or none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lasts: dict[int, _Last] = {}  # a GPU's, whoever uses it in this process


class _Last:
    """The turn that was given last on a GPU."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = torch.cuda.Event()


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """What is launched within, on the current stream of a GPU, begins when what was launched in the turn before it has
    ended. For one thread at a time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    last, stream = _lasts.get(index) or _lasts.setdefault(index, _Last()), torch.cuda.current_stream(device)
    with last.lock:
        stream.wait_event(last.ended)  # nothing before the first turn
        try:
            yield
        finally:
            last.ended.record(stream)
