"""The one packed weight all kernels read: its tiles, and what it means in plain torch.

Codes (2, 4 or 8 bits; other widths live in the next wider field) are cut into tiles of 64 output rows by `512 / bits`
input channels. A tile is 64 rows of 16 int32 words, 4 KiB in one piece, so a warp's 16-byte loads are contiguous
however large K is. Inside a word, bits `[bits * j, bits * (j + 1))` of its low and its high half hold two neighbouring
channels of slice j:

    channel in tile = 32 * j + 2 * pair + half,   pair = word // 4 + 4 * (word % 4)

One and-or therefore yields two 16-bit floats (magic exponent), already side by side in the register that the matrix
instruction wants, and slice j is multiplied with 32 contiguous activations. The order of the words makes the four that
a lane of `mma` or `wgmma` needs (pairs t, t + 4, t + 8, t + 12 for lane t of a row) one 16-byte load. Input channels
are stored sorted by group (`perm`), so act-order costs a gather of the activations and nothing else. Padding rows and
channels hold code 0 and are never read into a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_N = 64
TILE_WORDS = 16
SLICE = 32  # channels of one slice


def tile_k(bits: int) -> int:
    """Input channels per tile."""
    return SLICE * 16 // bits


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """y = x[:, perm] @ ((codes - zeros) * scales).T. A `zeros` of None is `2 ** (code_bits - 1)`, a `perm` of None the
    identity.

    With experts every tensor has one more leading dimension.
    """

    packed: Tensor  # [N / 64, K / tile_k, 64, 16] int32 (rounded up)
    scales: Tensor  # [groups, N] fp16, bf16 or fp32
    zeros: Tensor | None  # [groups, N] uint8
    perm: Tensor | None  # [K] int32, the input channel stored at each packed position
    field_bits: int  # width of a stored field: 2, 4 or 8
    code_bits: int  # width of the code: as field_bits, or less
    group_size: int
    in_features: int
    out_features: int

    @property
    def middle(self) -> int:
        return 1 << (self.code_bits - 1)


def field_bits(code_bits: int) -> int:
    """Width of the field that holds a code of 2 to 8 bits."""
    return next(width for width in (2, 4, 8) if code_bits <= width)


def packed_shape(in_features: int, out_features: int, bits: int) -> tuple[int, int, int, int]:
    return -(-out_features // TILE_N), -(-in_features // tile_k(bits)), TILE_N, TILE_WORDS


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """`[N, K]` uint8 codes -> tiles `[N / 64, K / tile_k, 64, 16]` int32."""
    n, k = codes.shape
    rows, columns, _, _ = packed_shape(k, n, bits)
    padded = torch.nn.functional.pad(codes, (0, columns * tile_k(bits) - k, 0, rows * TILE_N - n))
    fields = padded.view(rows, TILE_N, columns, 16 // bits, TILE_WORDS, 2)
    words = torch.zeros((rows, columns, TILE_N, TILE_WORDS), dtype=torch.int32, device=codes.device)
    for j in range(16 // bits):
        for half in range(2):
            words |= fields[:, :, :, j, :, half].transpose(1, 2).to(torch.int32) << (bits * j + 16 * half)
    return _words_of_lanes(words)


def _words_of_lanes(words: Tensor) -> Tensor:
    """Word 4 t + i holds pair t + 4 i; the same permutation brings them back."""
    return words.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)


def unpack_codes(packed: Tensor, bits: int, in_features: int, out_features: int) -> Tensor:
    """The inverse of `pack_codes`: `[N, K]` uint8."""
    rows, columns = packed.shape[:2]
    shape = (rows, TILE_N, columns, 16 // bits, TILE_WORDS, 2)
    fields = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    words = _words_of_lanes(packed).transpose(1, 2)
    for j in range(16 // bits):
        for half in range(2):
            fields[:, :, :, j, :, half] = (words >> (bits * j + 16 * half)) & ((1 << bits) - 1)
    return fields.view(rows * TILE_N, columns * tile_k(bits))[:out_features, :in_features]


def dequantize_reference(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """`[N, K]` weights in packed (sorted) channel order: the fp32 product, rounded once to `dtype`."""
    codes = unpack_codes(weight.packed, weight.field_bits, weight.in_features, weight.out_features)
    group = torch.arange(weight.in_features, device=codes.device) // weight.group_size
    zeros = weight.middle if weight.zeros is None else weight.zeros.float()[group].t()
    return ((codes.float() - zeros) * weight.scales.float()[group].t()).to(dtype)


def packed_linear_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """The definition: `[M, K]` -> `[M, N]`, fp32 weights and accumulation, one rounding to the dtype of `x`."""
    gathered = x if weight.perm is None else x[:, weight.perm.long()]
    out = gathered.float() @ dequantize_reference(weight, torch.float32).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
