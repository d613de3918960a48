"""How decode attention is launched: which kernel, tile and number of programs serve a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hf_paged.kernels import decode_int4, decode_registers
from hf_paged.kernels.layout import LayerKV
from hf_paged.kernels.on_device import cuda_capability, multiprocessors

# Up to so many it pays to start early: 0.8 us a layer less for one sequence, 1.4 for 16. Then it runs with the shared
# memory of the product before it and so little L1, which costs 64 long sequences up to 34.
_FEW_TOKENS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Launch choices of the decode kernel; `eval/kernels_bench.py` sweeps them."""

    tile: int  # tokens per tile, at most block_size
    programs: int = 1  # that share the work
    least: int = 2  # tiles of a share, at least
    num_warps: int = 4
    num_stages: int = 3
    byte_permute: bool = True  # int8 -> fp16 by inline assembly (CUDA only)
    in_registers: bool = False  # the kernel of `decode_registers.py`, one warp per program
    max_registers: int | None = None  # per thread, for that kernel
    overlap: bool = False  # joining begins while the last shares are read (compute capability 9.0)
    waits: bool = False  # the kernel itself starts before the one before it has ended, and waits for it


def choose_config(query: Tensor, layer: LayerKV, num_seqs: int, max_seq_len: int) -> DecodeConfig:
    """Tile and programs from what a captured graph fixes: what the GPU holds at once, or as many as there is work."""
    k, v = layer.k.tensor, layer.v.tensor
    kv_heads, sms = k.shape[1], multiprocessors(query.device) if query.is_cuda else 1
    heads = num_seqs * kv_heads
    overlap = query.is_cuda and cuda_capability(query.device)[0] >= 9
    tile = min(layer.block_size, 64 if k.shape[3] * k.element_size() <= 256 else 32)
    num_warps = 2 if tile <= 32 else 4
    stage = tile * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
    per_sm = max(1, min(12 // num_warps, 200_000 // (2 * stage)))
    config = DecodeConfig(tile=tile, num_warps=num_warps, overlap=overlap)
    int4 = decode_int4.fits(query, layer)
    if int4:
        tile, registers = decode_int4.launch(layer, query.shape[1] // kv_heads)
        per_sm = 4 * (512 // registers)
        config = DecodeConfig(tile=tile, in_registers=True, max_registers=registers, overlap=overlap)
    elif decode_registers.fits(query, layer):
        tile, registers, per_sm = decode_registers.launch(layer)
        config = DecodeConfig(tile=tile, in_registers=True, max_registers=registers, overlap=overlap)
    if config.in_registers:  # 32 tokens at least: one sequence of 600 takes 8.0 us, with 64 of them 9.5
        waits = overlap and num_seqs * max_seq_len <= _FEW_TOKENS
        config = replace(config, least=max(1, 32 // config.tile), waits=waits)
        if waits and heads * -(-max_seq_len // 16) <= 2 * per_sm * sms:  # one tile each, or a few have two
            config = replace(config, tile=min(config.tile, 16), least=1)
    programs = max(1, min(per_sm * sms, -(-heads * -(-max_seq_len // config.tile) // config.least)))
    # More heads than programs: as many as take some whole ones each. int8, 256 x 1,024 tokens, 8 KV heads: 1,024 of
    # 1,584 programs, the others idle, take 153 us, 1,024 of 1,056 take 141.
    whole = -(-heads // -(-heads // programs))
    # Of 8. 4-bit programs wait for more than memory: 303 -> 426 us. So do those of one query head in 8 bits: fp8, 64 x
    # 2,048 tokens, 32 heads, 1,584 programs take 252 us, 1,024 of them 266, of ragged lengths 178 and 191.
    busy = 7 if int4 or (k.element_size() == 1 and query.shape[1] == kv_heads) else 5
    if config.in_registers and heads > programs and whole * 8 >= programs * busy:
        programs = whole
    return replace(config, programs=programs)
