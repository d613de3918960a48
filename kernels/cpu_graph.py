"""A step on a CPU that is recorded once and run again without its Python: to a CPU what a CUDA graph is to a GPU.

A graph is a list of kernel launches and of torch's operations, over memory that stays where it is. What a step of few
rows computes is not changed by it, to the bit. Refused is what depends on values: reading one back into Python, and
shapes that follow from values.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_paged.kernels.cpu_launch import recorded_to

_READS = {"tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}


class CpuGraph:
    """Whatever runs under `capture()`, to be run again by `replay()` on what the same memory then holds."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []
        self._memory = _Memory()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record and run.

        Raises:
            RuntimeError: the work depends on values.
        """
        operations = _Operations(self._steps, self._memory)
        with torch.inference_mode(), _ReadsRefused(), operations, recorded_to(self._steps):
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step()


class _ReadsRefused(TorchFunctionMode):
    """Those that never become an operation."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise RuntimeError(f"Tensor.{func.__name__} reads a value")
        return func(*args, **(kwargs or {}))


class _Memory:
    """Memory of a graph. Lent again once nobody holds it, so that layer after layer works in the same, in the cache."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by bytes
        self._all: list[np.ndarray] = []

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._free[num_bytes]
        if not free:
            free.append(np.empty(num_bytes, np.uint8))
            self._all.append(free[0])
        block = free.pop()
        lent = block.view()  # lives as long as the tensor's storage does
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)


class _Operations(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], Any]], memory: _Memory) -> None:
        super().__init__()
        self._steps, self._memory = steps, memory

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        _check_shapes(func, given)
        if func is torch.ops.aten.new_empty.default:
            assert kwargs.get("device") in (None, args[0].device), kwargs
            return self._memory.lend(args[1], kwargs.get("dtype") or args[0].dtype)
        again = partial(func, *args, **kwargs)
        out = again()
        if func._schema.is_mutable:
            self._steps.append(again)
            return out
        inputs = {_storage(x) for x in given if isinstance(x, Tensor)}
        results = tree_leaves(out)
        if any(isinstance(x, Tensor) and x.numel() and _storage(x) not in inputs for x in results):  # no mere view
            self._steps.append(partial(_run_into, again, results))
        return out


def _run_into(again: Callable[[], Any], results: list[Any]) -> None:
    for old, new in zip(results, tree_leaves(again()), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _check_shapes(func: Any, given: list[Any]) -> None:
    """Refuse an operation whose result is no tensor of a known shape."""
    indexed = func is torch.ops.aten.index.Tensor and not any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in given[1:]
    )
    dynamic = torch.Tag.dynamic_output_shape in func.tags and not indexed
    reads = torch.Tag.data_dependent_output in func.tags or func is torch.ops.aten.is_nonzero.default
    if dynamic or reads:
        raise RuntimeError(f"{func} depends on values")
