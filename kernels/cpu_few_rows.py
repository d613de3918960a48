"""A product of few bf16 rows on a CPU, in fp32 instructions: those for bf16 do half the work where no matrix unit is.

The weight lies as a vector of 16 columns reads it, two rows of each at once, and is widened on its way into registers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels import cpu_kernels
from hf_paged.kernels.cpu_kernels import COLUMNS
from hf_paged.kernels.cpu_launch import launch

_TASKS = 8  # for each thread: so many that all are done at about the same time, each long enough to read in one stream


def in_columns(weight: Tensor) -> Tensor:
    """`weight` `[N, K]`, K even, as `[N / 16, K / 2, 16, 2]`, N filled up with zeros."""
    whole = F.pad(weight, (0, 0, 0, -weight.shape[0] % COLUMNS))
    return whole.view(-1, COLUMNS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def few_rows_linear(x: Tensor, columns: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    """`x` `[..., K]` bf16 times a weight of `out_features` rows transposed, `columns` of `in_columns`, plus `bias`."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty((*x.shape[:-1], out_features))
    at_once = next((some for some in (1, 4, 8) if len(rows) <= some), 16)
    pieces = max(len(columns) // (_TASKS * torch.get_num_threads()), 1)
    launch(
        cpu_kernels.linear, -(-len(columns) // pieces), rows.data_ptr(), rows.stride(0), columns.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), len(rows), out_features, k, at_once, pieces,
    )  # fmt: skip
    return out
