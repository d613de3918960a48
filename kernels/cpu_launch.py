"""How Numba's kernels run on a CPU: on torch's own threads.

They are reached through the entry that GCC calls for a parallel region. Threads of another pool would wait for those,
which spin for a while after each of torch's operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import struct
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@cache
def _available() -> bool:
    """Whether Numba works here (the extra `cpu`) and torch's threads can be reached."""
    if sys.platform != "linux" or importlib.util.find_spec("numba") is None or _openmp() is None:
        return False
    try:
        from hf_paged.kernels import cpu_kernels  # noqa: F401
    except Exception as error:  # a Numba that refuses this NumPy or Python, say
        logger.warning("bf16 models run without CPU kernels: Numba does not work here (%s)", error)
        return False
    logger.info("bf16 models on this CPU run through Numba's kernels")
    return True


@cache
def _openmp() -> Any:
    """The OpenMP library that torch has loaded; its name differs from build to build."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = {found[5] for found in fields if len(found) == 6 and "libgomp" in Path(found[5]).name}
    beside_torch = Path(torch.__file__).resolve().parent
    for path in sorted(loaded, key=lambda path: beside_torch not in Path(path).parents):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            return library
    return None


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether there are CPU kernels for values of `dtype`."""
    return dtype == torch.bfloat16 and _available()


def on_cpu(x: Tensor) -> bool:
    """Whether `x` is one for the CPU kernels."""
    return x.device.type == "cpu" and has_kernels(x.dtype)


_recorded: ContextVar[list[Callable[[], Any]] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recorded_to(steps: list[Callable[[], Any]]) -> Iterator[None]:
    """Append every launch of this thread to `steps`: called again, each is the same launch."""
    token = _recorded.set(steps)
    try:
        yield
    finally:
        _recorded.reset(token)


def launch(kernel: Any, tasks: int, *arguments: int) -> None:
    """Run a kernel of `cpu_kernels.py` on as many threads as torch uses, and at most one for a task.

    Raises:
        MemoryError: a thread found none.
    """
    words = (ctypes.c_int64 * (len(arguments) + 2))(0, 0, *arguments)
    _run(kernel, tasks, words)
    if (steps := _recorded.get()) is not None:
        steps.append(lambda: _run(kernel, tasks, words))


def _run(kernel: Any, tasks: int, words: Any) -> None:
    words[0] = words[1] = 0
    threads = min(torch.get_num_threads(), tasks)
    address = ctypes.addressof(words) + 8
    if threads > 1:
        _openmp().GOMP_parallel(kernel.address, address, threads, 0)
    elif threads:
        kernel.ctypes(address)
    if words[0]:  # what is raised in a kernel does not get out of it
        raise MemoryError(f"the CPU kernel {kernel.__name__} ran out of memory")


def bits(x: float) -> int:
    """`x` in fp32, as an argument."""
    word: int = struct.unpack("i", struct.pack("f", x))[0]
    return word
