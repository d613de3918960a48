"""Decode attention over pages: one query per sequence. Chooses a kernel, launches it, joins what it shared.

`decode_registers.py` serves the shapes and formats that models use on GPUs, `decode_portable.py` every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.decode_config import DecodeConfig, choose_config
from hf_paged.kernels.decode_int4 import padded_heads
from hf_paged.kernels.decode_join import join_kernel
from hf_paged.kernels.decode_portable import decode_portable_kernel
from hf_paged.kernels.decode_registers import decode_registers_kernel
from hf_paged.kernels.layout import AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.tiles import LOG2_E

# So many KV heads of sequences are joined by a program each, with all heads that share one; fewer by more programs.
_MANY_HEADS = 128


@on_device
def decode_attention(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of the first `meta.num_decodes` rows of `query` `[T, heads, head_dim]`, into the same rows of `out`.

    Allocates only through torch (graph-safe) and never synchronises. Rows with `seq_lens` 0 become zeros. V's offset is
    added to the others where it is all that `layer.transform` does to the output (`value_offset_of`).
    """
    shares = attend_shares(
        query, layer, meta, out, scale=scale, window=window, softcap=softcap, sinks=sinks, config=config
    )
    offset = value_offset_of(layer)
    grid, shape = join_launch(shares, meta.num_decodes, layer.k.tensor.shape[1])
    join_kernel[grid](
        out,
        shares.partial,
        shares.lse,
        meta.seq_lens,
        shares.lse if sinks is None else sinks,
        shares.partial if offset is None else offset,
        meta.num_decodes,
        window or 0,
        shares.config.programs,
        WINDOW=window is not None,
        SINKS=0 if sinks is None else sinks.dim(),
        OFFSET=offset is not None,
        **shape,
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What the programs of a decode step leave of heads that they shared."""

    partial: Tensor  # [programs, 2, group, v_head_dim] fp32
    lse: Tensor  # [programs, 2, group] fp32, base 2
    config: DecodeConfig


def attend_shares(
    query: Tensor,
    layer: LayerKV,
    meta: AttentionMetadata,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Shares:
    """`decode_attention` but for the joining: heads that one program had whole are in `out`.

    Args:
        lse: `[num_decodes, heads]` fp32, for the base-2 log-sum-exps of these heads, which then have no sinks: these
            are not all their keys.
    """
    assert lse is None or sinks is None
    num_seqs, heads = meta.num_decodes, query.shape[1]
    k, v = layer.k.tensor, layer.v.tensor
    kv_heads, group = k.shape[1], heads // k.shape[1]
    bound = min(meta.max_seq_len, window) if window else meta.max_seq_len
    config = config or choose_config(query, layer, num_seqs, bound)
    partial = torch.empty((config.programs, 2, group, layer.v.head_dim), dtype=torch.float32, device=out.device)
    partial_lse = torch.empty((config.programs, 2, group), dtype=torch.float32, device=out.device)
    k_scale, v_scale = scale_of(layer.k), scale_of(layer.v)
    sinks_kind = 3 if lse is not None else 0 if sinks is None else sinks.dim()
    by_head = lse if lse is not None else query if sinks is None else sinks
    offset = None if lse is not None else value_offset_of(layer)
    operands = (
        out, partial, partial_lse, query, k, k_scale, v, v_scale, meta.block_tables, meta.seq_lens, by_head,
        partial if offset is None else offset,
    )  # fmt: skip
    strides = (*query.stride()[:2], *(x.stride(0) for x in (k, k_scale, v, v_scale, meta.block_tables)))
    numbers = (*base2_scale(scale, softcap), window or 0, num_seqs, kv_heads)
    arguments: tuple[Any, ...] = (*operands, *strides, *numbers)
    shape: dict[str, Any] = {
        "GROUP": group,
        "BLOCK_SIZE": layer.block_size,
        "TILE": config.tile,
        "LEAST": config.least,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks_kind,
        "OFFSET": offset is not None,
    }
    if config.in_registers:
        _launch_registers(arguments, shape, layer, config)
    else:
        _launch_portable(arguments, shape, query, layer, config)
    return Shares(partial=partial, lse=partial_lse, config=config)


def _launch_registers(arguments: tuple[Any, ...], shape: dict[str, Any], layer: LayerKV, config: DecodeConfig) -> None:
    int4 = isinstance(layer.k, GroupPages) or isinstance(layer.v, GroupPages)
    decode_registers_kernel[(config.programs,)](
        *arguments,
        **shape,
        K_DIM=layer.k.head_dim,
        V_DIM=layer.v.head_dim,
        N=padded_heads(shape["GROUP"]) if int4 else 8 if shape["GROUP"] <= 8 else 16,
        INT4=int4,
        OVERLAP=config.overlap,
        WAITS=config.waits,
        num_warps=1,
        maxnreg=config.max_registers,
        **({"launch_pdl": True} if config.waits else {}),
    )


def _launch_portable(
    arguments: tuple[Any, ...], shape: dict[str, Any], query: Tensor, layer: LayerKV, config: DecodeConfig
) -> None:
    decode_portable_kernel[(config.programs,)](
        *arguments,
        **shape,
        ROWS=max(16, triton.next_power_of_2(shape["GROUP"])),
        **page_constants(query, layer),
        BYTE_PERMUTE=config.byte_permute and query.is_cuda,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def join_launch(shares: Shares, num_seqs: int, kv_heads: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and constants of a joining kernel: one program for the heads of a KV head, more for a long sequence's."""
    config, (group, v_dim) = shares.config, shares.partial.shape[2:]
    heads, h_block, columns = group, triton.next_power_of_2(group), triton.next_power_of_2(v_dim)
    parts = triton.next_power_of_2(triton.cdiv(config.programs, num_seqs * kv_heads))  # of a head, about
    if parts >= 16:  # all of them at once: 64 values for a lane of at most four warps
        if num_seqs * kv_heads < _MANY_HEADS:
            heads = h_block = 1
        columns = min(columns, 32)
        step = min(parts, 256 // h_block)
        num_warps = max(step * h_block * columns // 2048, 1)
    else:  # a warp holds four parts of 1,024 values
        columns = min(columns, max(1024 // h_block, 32))
        step = max(min(4096 // (h_block * columns), 8), 1)
        num_warps = 1
    shape = {
        "GROUP": group,
        "HEADS": heads,
        "H_BLOCK": h_block,
        "V_DIM": v_dim,
        "COLUMNS": columns,
        "TILE": config.tile,
        "LEAST": config.least,
        "STEP": step,
        "OVERLAP": config.overlap,
        "num_warps": num_warps,
        **({"launch_pdl": True} if config.overlap else {}),
    }
    return (kv_heads * group // heads, num_seqs, triton.cdiv(v_dim, columns)), shape


def page_constants(query: Tensor, layer: LayerKV) -> dict[str, Any]:
    """What Triton's attention kernels are compiled for: K and V, each in its own format."""
    constants: dict[str, Any] = {}
    for side, pages in (("K", layer.k), ("V", layer.v)):
        constants |= {
            f"{side}_DIM": pages.head_dim,
            f"{side}_BLOCK": channel_block(pages.head_dim),
            f"{side}_SCALED": not isinstance(pages, PlainPages),
            f"{side}_INT4": isinstance(pages, GroupPages),
            f"{side}_DOT": dot_dtype(query, pages),
        }
    return constants


def channel_block(head_dim: int) -> int:
    """Channels of a tile that tl.dot takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def value_offset_of(layer: LayerKV) -> Tensor | None:
    """V's offset, `[kv_heads, v_head_dim]` fp32, where adding it is all that `KVTransform.output` does; else None."""
    return None if layer.transform is None or layer.transform.rotates_v else layer.transform.v_offset


def base2_scale(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factor of q . k and cap of the base-2 scores, as the kernels take them."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale * LOG2_E * 2 / softcap, softcap * LOG2_E)


def dot_dtype(query: Tensor, pages: Pages) -> tl.dtype:
    """fp32 wherever the query or the pages are fp32; fp16 for 8-bit codes, exact there; else the pages' own dtype."""
    if query.dtype == torch.float32 or pages.tensor.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if pages.tensor.dtype == torch.bfloat16 else tl.float16


def scale_of(pages: Pages) -> Tensor:
    """Scales of coded pages, for kernels; plain pages have none and pass themselves."""
    return pages.data if isinstance(pages, PlainPages) else pages.scale
