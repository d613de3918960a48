"""Programmatic launch: on Hopper and later a kernel's launch hides behind the end of the kernel before it."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """First in every program, before it reads or writes what another kernel touches; the next kernel may start, too."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch on the tensor's device: `OVERLAP` for the kernel, and for Triton what goes with it."""
    if tensor.is_cuda and _can_overlap(tensor.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
