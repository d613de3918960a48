"""Store the K and V rows of a step in the pages: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.layout import LayerKV


def write_kv(
    layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor, derived: dict[Any, Any] | None = None
) -> None:
    """Store `key` `[T, kv_heads, head_dim]` and `value` `[T, kv_heads, v_head_dim]` at `slot_mapping` `[T]` int64.

    A slot is block * block_size + offset; -1 stores nothing. Codes are those of
    `reference.quantize_rows` and `quantize_groups`. `derived` is that of the step's `AttentionMetadata`.
    """
    if key.is_cuda:
        from hf_paged.kernels.write_kernel import write_kv as launch  # Triton exists on Linux only

        launch(layer, key, value, slot_mapping)
    else:
        reference.write_kv(layer, key, value, slot_mapping, derived)
