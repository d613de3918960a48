"""Triton launches on the GPU that holds their operands, and what that GPU can do.

torch launches on the device of its operands, Triton on the current one: a model on cuda:1 would have its kernels on
cuda:0, where its memory is foreign or not to be read at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def cuda_capability(device: torch.device | int) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU, (0, 0) of any other: ROCm says (9, 4) for gfx942, which has neither the
    instructions nor the fp8 of a Hopper.
    """
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


@cache
def multiprocessors(device: torch.device | int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    import triton  # exists on Linux only

    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def on_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """`launcher` with the GPU of its first tensor as the current one."""

    @wraps(launcher)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(arg for arg in args if isinstance(arg, Tensor))
        if not tensor.is_cuda:  # Triton's interpreter
            return launcher(*args, **kwargs)
        with torch.cuda.device_of(tensor):
            return launcher(*args, **kwargs)

    return guarded
