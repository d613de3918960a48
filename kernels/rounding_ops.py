"""The steps of GPTQ, of coordinate descent and of AWQ's search: kernels on a GPU, their definitions elsewhere."""

from __future__ import annotations

from torch import Tensor

from hf_paged.kernels.descent_reference import descent_block_reference
from hf_paged.kernels.gptq_reference import GptqBlock, gptq_block_reference
from hf_paged.kernels.range_reference import range_products_reference

BLOCK = 128  # columns of a block, at most


def gptq_block(block: GptqBlock, codes: Tensor, residual: Tensor) -> None:
    """`gptq_block_reference` for at most BLOCK columns."""
    assert block.target.shape[0] <= BLOCK, block.target.shape
    if not block.target.is_cuda:
        gptq_block_reference(block, codes, residual)
        return
    from hf_paged.kernels.gptq_block import gptq_block_launch  # Triton exists on Linux only

    gptq_block_launch(block, codes, residual)


def descent_block(
    gradient: Tensor, coupling: Tensor, scales: Tensor, group: Tensor, top: int, codes: Tensor, moved: Tensor
) -> None:
    """`descent_block_reference` for at most BLOCK columns."""
    assert gradient.shape[0] <= BLOCK, gradient.shape
    if not gradient.is_cuda:
        descent_block_reference(gradient, coupling, scales, group, top, codes, moved)
        return
    from hf_paged.kernels.descent_block import descent_block_launch

    descent_block_launch(gradient, coupling, scales, group, top, codes, moved)


def range_products(
    values: Tensor, inverse: Tensor, block: Tensor, wanted: Tensor, scales: Tensor, zeros: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """`range_products_reference`; the kernel takes an `inverse` that is the same for all output channels."""
    if values.is_cuda and inverse.shape[1] == 1:
        from hf_paged.kernels.range_products import MOST_COLUMNS, range_products_launch

        if len(values) <= MOST_COLUMNS:
            return range_products_launch(values, block * inverse * inverse.t(), wanted, scales, zeros, top)
    return range_products_reference(values, inverse, block, wanted, scales, zeros, top)
