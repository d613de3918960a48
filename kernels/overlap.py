"""Programmatic launch: on Hopper and later a kernel's launch hides behind the kernels before it.

Every program first lets the next kernel start and only then waits for the one before. So a chain of kernels starts as
early as multiprocessors have room, several kernels ahead, and a product's first weights are on their way while small
kernels before it still wait: 1 to 3 microseconds per layer less than waiting first. Whoever starts so waits for a
kernel that itself waited, hence for all before it; but until then nothing that a kernel of the step writes may be read,
however long ago that one was launched. Decode attention of many tokens alone does not wait: it is launched in the
ordinary way, after the kernel before it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hf_paged.kernels.on_device import cuda_capability


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """First in every program, before it reads or writes what another kernel touches."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch on the tensor's device: `OVERLAP` for the kernel, and for Triton what goes with it."""
    if tensor.is_cuda and _can_overlap(tensor.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return cuda_capability(device)[0] >= 9
