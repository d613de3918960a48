"""Bit fields inside integer words: the only place that shifts and masks a file's words.

A word holds `32 // bits` fields, lowest bits first, and idle bits where they do not fill it (compressed-tensors);
GPTQ's 3-bit fields form, 32 of them, one 96-bit little-endian string over three words, and in newer compressed-tensors
those of any width lie so. Planar words (`gptq_p`) cut each field into planes of 4, 2 and 1 bits and hold, for every 32
fields, the words of the low plane, then those of the next. Everything runs on the tensor's device, one field position
and some rows at a time, so that the peak is one byte per field and little more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column held by each nibble of an AWQ word, low to high
_AWQ_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
_PIECE = 1 << 20  # fields that are worth a launch
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # bits of each plane, low to high
PLANAR_BITS = tuple(_PLANES)  # other widths have one plane: the ordinary words


def words_for(count: int, bits: int) -> int:
    """How many int32 words hold `count` fields of `bits` bits (widths that do not divide a word go in blocks of 32)."""
    return -(-count * bits // 32) if 32 % bits == 0 else -(-count // 32) * bits


def row_pieces(rows: int, columns: int, multiple: int = 1) -> int:
    """How many rows of a matrix to work on at once: an eighth, but not so few that the launches count."""
    most = max(-(-rows // 8), _PIECE // max(columns, 1))
    return -(-most // multiple) * multiple


def unpack_rows(words: Tensor, unpack: Callable[[Tensor], Tensor], fields: Tensor) -> Tensor:
    """Fill `fields` `[R, C]` (which it returns) with `unpack(words)`, `[R, W]`, some rows at a time."""
    step = row_pieces(*fields.shape)
    for begin in range(0, len(words), step):
        fields[begin : begin + step] = unpack(words[begin : begin + step].contiguous())
    return fields


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """`[..., W]` int32 -> `[..., count]` uint8 fields, in file order. Fields beyond `count` are padding and are
    dropped.
    """
    if bits == 3:
        return _unpack_across(words, bits)[..., :count].contiguous()
    return unpack_whole(words, bits, count)


def unpack_whole(words: Tensor, bits: int, count: int) -> Tensor:
    """As `unpack_words`, where no field of any width straddles two words."""
    per_word = 32 // bits
    fields = words.new_empty((*words.shape, per_word), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for i in range(per_word):
        fields[..., i] = (words >> (bits * i)) & mask
    return fields.flatten(-2)[..., :count].contiguous()


def pack_words(fields: Tensor, bits: int) -> Tensor:
    """`[..., count]` uint8 -> `[..., words_for(count)]` int32; the inverse of `unpack_words`, padding with zero
    fields.
    """
    if bits == 3:
        return _pack_across(fields, bits)
    return pack_whole(fields, bits)


def whole_words_for(count: int, bits: int) -> int:
    """How many int32 words hold `count` fields that never straddle two words."""
    return -(-count // (32 // bits))


def pack_whole(fields: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_whole`, padding with zero fields."""
    width = whole_words_for(fields.shape[-1], bits)
    fields = torch.nn.functional.pad(fields, (0, width * (32 // bits) - fields.shape[-1]))
    fields = fields.unflatten(-1, (width, 32 // bits))
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=fields.device)
    for i in range(32 // bits):
        words |= fields[..., i].to(torch.int32) << (bits * i)
    return words


def dense_words_for(count: int, bits: int) -> int:
    """How many int32 words hold `count` fields that lie bit to bit."""
    return -(-count * bits // 32)


def unpack_dense(words: Tensor, bits: int, count: int) -> Tensor:
    """As `unpack_words`, where fields of any width lie bit to bit and the last words that hold none are left out."""
    padded = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    return _unpack_across(padded, bits)[..., :count].contiguous()


def pack_dense(fields: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_dense`."""
    return _pack_across(fields, bits)[..., : dense_words_for(fields.shape[-1], bits)].contiguous()


def unpack_planar(words: Tensor, bits: int, count: int) -> Tensor:
    """`[..., W]` int32 planar words -> `[..., count]` uint8 fields."""
    if bits not in _PLANES:
        return unpack_words(words, bits, count)
    blocks = words.unflatten(-1, (-1, bits))
    fields = words.new_zeros((*blocks.shape[:-1], 32), dtype=torch.uint8)
    offset = 0
    for width in _PLANES[bits]:
        fields |= unpack_words(blocks[..., offset : offset + width], width, 32) << offset
        offset += width
    return fields.flatten(-2)[..., :count].contiguous()


def pack_planar(fields: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_planar`, padding with zero fields."""
    if bits not in _PLANES:
        return pack_words(fields, bits)
    padded = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % 32)).unflatten(-1, (-1, 32))
    planes, offset = [], 0
    for width in _PLANES[bits]:
        planes.append(pack_words((padded >> offset) & ((1 << width) - 1), width))
        offset += width
    return torch.cat(planes, dim=-1).flatten(-2)


def unpack_awq_words(words: Tensor) -> Tensor:
    """`[R, C]` AWQ int32 words -> `[R, 8 * C]` uint8 in column order (4 bits, nibbles interleaved)."""
    nibbles = unpack_words(words, 4, words.shape[-1] * 8).unflatten(-1, (-1, 8))
    return nibbles[..., list(_AWQ_INVERSE)].flatten(-2)


def pack_awq_words(fields: Tensor) -> Tensor:
    """`[R, C]` uint8 in column order, C a multiple of 8 -> `[R, C / 8]` AWQ int32 words."""
    return pack_words(fields.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)


def unpack_interleaved(words: Tensor) -> Tensor:
    """AWQ `gemv_fast` and llm-awq: `[N / 4, K]` int16 -> `[N, K]` uint8.

    Four rows are interleaved per 64 columns; within 32 columns the pairs go 0,1,8,9,16,17,24,25,..., and every eight
    values are stored as 0,2,4,6,1,3,5,7 (AutoAWQ `pack_intweight(interleave=4, kstride=64)`).
    """
    quarter, columns = words.shape
    fields = torch.stack([(words >> (4 * i)) & 15 for i in range(4)], dim=-1).to(torch.uint8)  # [N/4, K, 4]
    fields = fields.view(quarter, columns // 64, 4, 64).transpose(1, 2).reshape(quarter * 4, columns // 32, 4, 2, 4)
    fields = fields.transpose(3, 4).reshape(quarter * 4, columns // 32, 4, 4, 2)
    return fields.transpose(2, 3).reshape(quarter * 4, columns)


def pack_interleaved(fields: Tensor) -> Tensor:
    """The inverse of `unpack_interleaved`: `[N, K]` uint8 (N % 4 == 0, K % 64 == 0) -> `[N / 4, K]` int16."""
    rows, columns = fields.shape
    fields = fields.view(rows, columns // 32, 4, 4, 2).transpose(2, 3).reshape(rows, columns // 32, 4, 4, 2)
    fields = fields.transpose(3, 4).reshape(rows // 4, 4, columns // 64, 64).transpose(1, 2)
    fields = fields.reshape(rows // 4, columns, 4).to(torch.int32)
    word = fields[..., 0] | fields[..., 1] << 4 | fields[..., 2] << 8 | fields[..., 3] << 12
    return word.to(torch.int16)


def _unpack_across(words: Tensor, bits: int) -> Tensor:
    """`[..., bits * B]` int32 -> `[..., 32 * B]` uint8: 32 fields in as many words as a field has bits."""
    low = words.unflatten(-1, (-1, bits)).to(torch.int64) & 0xFFFFFFFF
    fields = words.new_empty((*low.shape[:-1], 32), dtype=torch.uint8)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        value = low[..., word] >> shift
        if shift > 32 - bits:  # the field straddles two words
            value = value | (low[..., word + 1] << (32 - shift))
        fields[..., i] = value & ((1 << bits) - 1)
    return fields.flatten(-2)


def _pack_across(fields: Tensor, bits: int) -> Tensor:
    """The inverse of `_unpack_across`, padding with zero fields."""
    padded = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % 32))
    blocks = padded.unflatten(-1, (-1, 32)).to(torch.int64)
    words = torch.zeros((*blocks.shape[:-1], bits), dtype=torch.int64, device=fields.device)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        words[..., word] |= (blocks[..., i] << shift) & 0xFFFFFFFF
        if shift > 32 - bits:
            words[..., word + 1] |= blocks[..., i] >> (32 - shift)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).flatten(-2)
