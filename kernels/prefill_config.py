"""How prefill attention is launched: rows, keys per step, warps and stages of a program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hf_paged.kernels.layout import LayerKV
from hf_paged.kernels.on_device import shared_memory


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Launch choices of the prefill kernel; `eval/kernels_bench.py` sweeps them."""

    rows: int  # queries times heads of one KV head per program
    tile: int  # keys per step
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread
    byte_permute: bool = True  # int8 -> fp16 by inline assembly (CUDA only)


def choose_config(layer: LayerKV, query: Tensor, group: int) -> PrefillConfig:
    """Tile sizes that fit registers and the 100 KB of shared memory of the smallest supported GPU (sm86)."""
    head_dim = max(layer.k.head_dim, layer.v.head_dim)
    if query.dtype == torch.float32 or layer.k.tensor.dtype == torch.float32:
        return PrefillConfig(rows=max(32, triton.next_power_of_2(group)), tile=32, num_warps=4, num_stages=1)
    narrow = min(layer.k.tensor.element_size(), layer.v.tensor.element_size()) == 1  # widened in every tile
    if narrow or group > 128:
        rows = max(64, triton.next_power_of_2(group))
        return PrefillConfig(rows=rows, tile=64 if head_dim <= 128 else 32, num_warps=4, num_stages=2)
    if head_dim <= 128:  # two such programs on a multiprocessor: one multiplies while the other takes exponentials
        return PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=2, max_registers=128)
    if head_dim <= 256 and query.is_cuda and shared_memory(query.device) >= 200 << 10:
        return PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=2)
    return PrefillConfig(rows=max(64, triton.next_power_of_2(group)), tile=32, num_warps=4, num_stages=2)
