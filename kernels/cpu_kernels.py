"""Numba kernels of a bf16 model on a CPU: RMSNorm with its residual, gated activation, RoPE and page write, decoding.

Each is a function of one address, of 64-bit words: how many tasks are taken, then its arguments in the order in which
its launcher in `cpu_fused.py` or `cpu_attention.py` names them; addresses are bytes, strides elements. Its threads take
tasks until there are none (`cpu_launch.py`), so that rows of any lengths keep all of them busy. The word before is how
many threads are in a kernel that allocates: not 0 in the end if one of them failed.

All of it is one file, longer than others: Numba keeps what it compiled beside a kernel's file and compiles anew when
*that file* changes. A change of what kernels share, in a file of its own, would leave old code in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

NORM_ROWS = 16  # rows to a task
COLUMNS = 16  # of a product to a task: the lanes of a vector
_FAST = {"reassoc", "contract", "nsz", "arcp"}  # not "nnan": a row that could not be stored is NaN, and stays it


def _kernel(body: Callable[[int], None], fastmath: set[str] = _FAST) -> Any:
    def compiled(cache: bool) -> Any:
        return cfunc(types.void(types.int64), fastmath=fastmath, error_model="numpy", cache=cache)(body)

    try:
        return compiled(cache=True)
    except RuntimeError:  # no folder may be written
        return compiled(cache=False)


def _inline(body: Callable[..., Any]) -> Any:
    return njit(inline="always", fastmath=_FAST, error_model="numpy")(body)


def _arrays_of(element: Any) -> Any:
    """Makes an array of a shape out of an address."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), generate

    return _inline(lambda address, shape: carray(pointer(address), shape))


_int64s, _int32s, _int8s, _float32s = map(_arrays_of, (types.int64, types.int32, types.int8, types.float32))
_bfloat16s = _arrays_of(types.uint16)  # read with `_wide`, written with `_narrow`


@intrinsic
def _add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Add to a word that all threads share; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, args[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@_inline
def _next_task(address):
    return _add(address, 1)


@_inline
def _wide(x):
    """fp32 of the bits of a bf16."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@_inline
def _scale(x):
    """fp32 of the bits of an fp16 that is not negative and, if not finite, NaN."""
    exact = np.uint32(np.uint32(x) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    return exact if x < 0x7C00 else np.float32(np.nan)


def _value(x):
    """fp32 of a bf16's bits, or of a code."""


@overload(_value, inline="always")
def _value_of(x):
    return (lambda x: _wide(x)) if x == types.uint16 else (lambda x: np.float32(x))


@_inline
def _narrow(x):
    """The bits of the nearest bf16, half to even. A NaN stays one: those of arithmetic have no low bits to carry."""
    word = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(word + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_inline
def _float(word):
    """The fp32 behind `cpu_launch.bits`."""
    return np.int32(word).view(np.float32)


# Taylor coefficients of 2^x: for |x| <= 1/2 the value is off by at most 1.2e-7 of it, two steps of fp32
_C6, _C5, _C4, _C3, _C2, _C1 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in (6, 5, 4, 3, 2, 1))
_LOG2E, _HALF, _ONE, _LOWEST = (np.float32(x) for x in (math.log2(math.e), 0.5, 1.0, -126.0))


@_inline
def _exp(x):
    """e^x in fp32 for x <= 88; below -87 fp32's smallest normal number."""
    scaled = max(x * _LOG2E, _LOWEST)
    whole = np.floor(scaled + _HALF)
    f = scaled - whole
    power = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _ONE
    return power * np.int32(np.int32(np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@_kernel
def add_rms_norm(address):
    """A task is NORM_ROWS rows: `reference_fused.add_rms_norm`, or `rms_norm` where there is no residual."""
    words = _int64s(address, 12)
    x_at, x_stride, residual_at, weight_at, sum_at, out_at = words[1], words[2], words[3], words[4], words[5], words[6]
    num_rows, n, eps, offset, cast_first = words[7], words[8], _float(words[9]), _float(words[10]), words[11]
    weight = _bfloat16s(weight_at, n)
    while True:
        first = _next_task(address) * NORM_ROWS
        if first >= num_rows:
            break
        for row in range(first, min(first + NORM_ROWS, num_rows)):
            x = _bfloat16s(x_at + 2 * row * x_stride, n)
            if residual_at != 0:
                residual = _bfloat16s(residual_at + 2 * row * n, n)
                added = _bfloat16s(sum_at + 2 * row * n, n)
                for d in range(n):
                    added[d] = _narrow(_wide(x[d]) + _wide(residual[d]))
                x = added
            square = np.float32(0)
            for d in range(n):
                square += _wide(x[d]) * _wide(x[d])
            mean = square / np.float32(n) + eps
            scale = np.float32(0) if mean == np.float32(np.inf) else _ONE / np.sqrt(mean)
            out = _bfloat16s(out_at + 2 * row * n, n)
            if cast_first:
                for d in range(n):
                    out[d] = _narrow(_wide(_narrow(_wide(x[d]) * scale)) * _wide(weight[d]))
            else:
                for d in range(n):
                    out[d] = _narrow(_wide(x[d]) * scale * (_wide(weight[d]) + offset))


@_kernel
def silu_times(address):
    """A task is a row: `reference_fused.gated_activation` of kind "silu"."""
    words = _int64s(address, 8)
    gate_at, gate_stride, up_at, up_stride, out_at = words[1], words[2], words[3], words[4], words[5]
    num_rows, n = words[6], words[7]
    while True:
        row = _next_task(address)
        if row >= num_rows:
            break
        gate, up = _bfloat16s(gate_at + 2 * row * gate_stride, n), _bfloat16s(up_at + 2 * row * up_stride, n)
        out = _bfloat16s(out_at + 2 * row * n, n)
        for d in range(n):
            x = _wide(gate[d])
            activation = np.float32(0) if x < np.float32(-88) else x / (_ONE + _exp(min(-x, np.float32(88))))
            out[d] = _narrow(_wide(_narrow(activation)) * _wide(up[d]))


@_inline
def _rounded_up(x):
    """The bits of the smallest fp16 that is not below `x` >= 0, those of NaN where there is none."""
    if not x <= np.float32(65504):
        return np.uint16(0x7E00)
    if x < np.float32(2.0**-14):
        return np.uint16(np.ceil(x * np.float32(2.0**24)))
    return np.uint16(
        np.uint32(np.uint32(np.float32(x).view(np.uint32) + np.uint32(0x1FFF)) >> np.uint32(13)) - np.uint32(112 << 10)
    )


@_inline
def _store(row, pages_at, place, scales_at, scale_place):
    """`row` fp32 as bf16, or where there are scales as codes of `reference.quantize_rows`."""
    n = row.shape[0]
    if scales_at == 0:
        values = _bfloat16s(pages_at + 2 * place, n)
        for d in range(n):
            values[d] = _narrow(row[d])
    else:
        magnitudes, largest = row.view(np.uint32), np.uint32(0)  # of all fp32, a NaN's bits are the largest
        for d in range(n):
            largest = max(largest, np.uint32(magnitudes[d] & np.uint32(0x7FFFFFFF)))
        scale = _rounded_up(np.uint32(largest).view(np.float32) / np.float32(127))
        _bfloat16s(scales_at + 2 * scale_place, 1)[0] = scale
        codes, divisor = _int8s(pages_at + place, n), _scale(scale) if scale != 0 else _ONE
        if scale < 0x7C00:
            for d in range(n):
                codes[d] = np.int8(np.rint(row[d] / divisor))
        else:
            for d in range(n):
                codes[d] = np.int8(0)


@_inline
def _rotate(row, x, cos, sin):
    """Rotary embedding of the first channels of `x`, bf16, rounded to that, to `row`, fp32."""
    half = cos.shape[0]
    for d in range(half):
        a, b = _wide(x[d]), _wide(x[half + d])
        row[d] = _wide(_narrow(a * cos[d] - b * sin[d]))
        row[half + d] = _wide(_narrow(b * cos[d] + a * sin[d]))
    for d in range(2 * half, x.shape[0]):
        row[d] = _wide(x[d])


def _rope_write(address):
    """A task is a token: `reference_fused.rope_write` without norms and rotations, to bf16 and int8 pages."""
    words = _int64s(address, 29)
    q_at, k_at, v_at, q_stride, k_stride, v_stride = words[1], words[2], words[3], words[4], words[5], words[6]
    cos_at, sin_at, half, out_at, slots_at = words[7], words[8], words[9], words[10], words[11]
    k_pages, v_pages, k_block, v_block, block_size = words[12], words[13], words[14], words[15], words[16]
    tokens, heads, kv_heads, head_dim, v_dim = words[17], words[18], words[19], words[20], words[21]
    k_scales, k_scale_block, v_scales, v_scale_block = words[22], words[23], words[24], words[25]
    offset_at, factor_at, v_offset_at = words[26], words[27], words[28]
    slots = _int64s(slots_at, tokens)
    _add(address - 8, 1)
    row, v_row = np.empty(head_dim, np.float32), np.empty(v_dim, np.float32)
    while True:
        token = _next_task(address)
        if token >= tokens:
            break
        cos, sin = _float32s(cos_at + 4 * token * half, half), _float32s(sin_at + 4 * token * half, half)
        slot = slots[token]
        block = slot // block_size
        lane = slot - block * block_size
        for head in range(heads + kv_heads if slot >= 0 else heads):
            of_query = head < heads
            kv_head = head // (heads // kv_heads) if of_query else head - heads
            x_at = q_at + 2 * (token * q_stride + head * head_dim)
            x = _bfloat16s(x_at if of_query else k_at + 2 * (token * k_stride + kv_head * head_dim), head_dim)
            _rotate(row, x, cos, sin)
            if factor_at != 0:
                at = 4 * kv_head * head_dim
                factor, offset = _float32s(factor_at + at, head_dim), _float32s(offset_at + at, head_dim)
                for d in range(head_dim):
                    row[d] = row[d] * factor[d] if of_query else (row[d] - offset[d]) / factor[d]
            if of_query:
                _store(row, out_at, (token * heads + head) * head_dim, 0, 0)
            else:
                place = kv_head * block_size + lane
                _store(row, k_pages, block * k_block + place * head_dim, k_scales, block * k_scale_block + place)
        for head in range(kv_heads if slot >= 0 else 0):
            x = _bfloat16s(v_at + 2 * (token * v_stride + head * v_dim), v_dim)
            for d in range(v_dim):
                v_row[d] = _wide(x[d])
            if v_offset_at != 0:
                offset = _float32s(v_offset_at + 4 * head * v_dim, v_dim)
                for d in range(v_dim):
                    v_row[d] -= offset[d]
            place = head * block_size + lane
            _store(v_row, v_pages, block * v_block + place * v_dim, v_scales, block * v_scale_block + place)
    _add(address - 8, -1)


rope_write = _kernel(_rope_write, _FAST - {"arcp"})  # codes are those of a division


@_kernel
def add_offset(address):
    """A task is a token: `KVTransform.output` without a rotation, in place."""
    words = _int64s(address, 7)
    out_at, offset_at, tokens, heads, kv_heads, n = words[1], words[2], words[3], words[4], words[5], words[6]
    while True:
        token = _next_task(address)
        if token >= tokens:
            break
        for head in range(heads):
            out = _bfloat16s(out_at + 2 * (token * heads + head) * n, n)
            offset = _float32s(offset_at + 4 * (head // (heads // kv_heads)) * n, n)
            for d in range(n):
                out[d] = _narrow(_wide(out[d]) + offset[d])


@_inline
def _dots(q, keys, scores, at):
    """`scores[:, at + t]` of every key t, `keys` `[count, head_dim]`, bf16 or codes."""
    for t in range(keys.shape[0]):
        for g in range(q.shape[0]):
            dot = np.float32(0)
            for d in range(q.shape[1]):
                dot += q[g, d] * _value(keys[t, d])
            scores[g, at + t] = dot


@_inline
def _times_scales(scores, at, scales_at, count):
    scales = _bfloat16s(scales_at, count)  # fp16, in fact: words of as many bits
    for t in range(count):
        scale = _scale(scales[t])
        for g in range(scores.shape[0]):
            scores[g, at + t] *= scale


@_inline
def _softmax(scores, count):
    for g in range(scores.shape[0]):
        top = scores[g, 0]
        for t in range(1, count):
            top = max(top, scores[g, t])
        total = np.float32(0)
        for t in range(count):
            p = _exp(scores[g, t] - top)
            scores[g, t] = p
            total += p
        for t in range(count):
            scores[g, t] /= total


@_inline
def _add_values(out, values, probs, at):
    """Add `values` `[count, v_head_dim]`, each by its `probs[:, at + t]`, to `out` `[group, v_head_dim]`."""
    fours = values.shape[0] // 4 * 4
    for g in range(out.shape[0]):
        for t in range(0, fours, 4):  # four at once: the sums are loaded and stored less often
            a, b, c, e = probs[g, at + t], probs[g, at + t + 1], probs[g, at + t + 2], probs[g, at + t + 3]
            for d in range(out.shape[1]):
                first = a * _value(values[t, d]) + b * _value(values[t + 1, d])
                out[g, d] += first + (c * _value(values[t + 2, d]) + e * _value(values[t + 3, d]))
        for t in range(fours, values.shape[0]):
            for d in range(out.shape[1]):
                out[g, d] += probs[g, at + t] * _value(values[t, d])


@_kernel
def decode_attention(address):
    """A task is a KV head of a sequence: a key is widened once for the query heads that share it.

    Pages are bf16, or int8 where there are scales.
    """
    words = _int64s(address, 24)
    q_at, k_at, v_at, k_block, v_block, out_at = words[1], words[2], words[3], words[4], words[5], words[6]
    tables_at, width, lens_at, scratch_at, longest = words[7], words[8], words[9], words[10], words[11]
    num_seqs, kv_heads, group, head_dim, v_dim = words[12], words[13], words[14], words[15], words[16]
    block_size, window, scale = words[17], words[18], _float(words[19])
    k_scales, k_scale_block, v_scales, v_scale_block = words[20], words[21], words[22], words[23]
    seq_lens = _int32s(lens_at, num_seqs)
    _add(address - 8, 1)
    q, total = np.empty((group, head_dim), np.float32), np.empty((group, v_dim), np.float32)
    while True:
        task = _next_task(address)
        if task >= num_seqs * kv_heads:
            break
        seq = task // kv_heads
        head = task - seq * kv_heads
        table = _int32s(tables_at + 4 * seq * width, width)
        scores = _float32s(scratch_at + 4 * task * group * longest, (group, longest))
        rows = _bfloat16s(q_at + 2 * task * group * head_dim, (group, head_dim))
        for g in range(group):
            for d in range(head_dim):
                q[g, d] = _wide(rows[g, d]) * scale
            for d in range(v_dim):
                total[g, d] = np.float32(0)
        stop = np.int64(seq_lens[seq])
        start = max(stop - window, 0) if window > 0 else 0
        for values_now in range(2 if stop > start else 0):
            if values_now:
                _softmax(scores, stop - start)
            for j in range(start // block_size, (stop + block_size - 1) // block_size):
                first, last = max(j * block_size, start), min((j + 1) * block_size, stop)
                lane, at, count = head * block_size + first - j * block_size, first - start, last - first
                block = np.int64(table[j])
                if values_now and v_scales != 0:
                    _times_scales(scores, at, v_scales + 2 * (block * v_scale_block + lane), count)
                    _add_values(total, _int8s(v_at + block * v_block + lane * v_dim, (count, v_dim)), scores, at)
                elif values_now:
                    values = _bfloat16s(v_at + 2 * (block * v_block + lane * v_dim), (count, v_dim))
                    _add_values(total, values, scores, at)
                elif k_scales != 0:
                    _dots(q, _int8s(k_at + block * k_block + lane * head_dim, (count, head_dim)), scores, at)
                    _times_scales(scores, at, k_scales + 2 * (block * k_scale_block + lane), count)
                else:
                    keys = _bfloat16s(k_at + 2 * (block * k_block + lane * head_dim), (count, head_dim))
                    _dots(q, keys, scores, at)
        out = _bfloat16s(out_at + 2 * task * group * v_dim, (group, v_dim))
        for g in range(group):
            for d in range(v_dim):
                out[g, d] = _narrow(total[g, d])
    _add(address - 8, -1)


def _accumulate(rows: int) -> Any:
    """The product of a few rows, as vectors in registers: what Numba's loops do not become."""

    @intrinsic
    def accumulate(typing_context: Any, x_at: Any, w_at: Any, out_at: Any, pairs: Any) -> Any:
        """`x` `[K, rows]` fp32 times `w` `[K / 2, 16, 2]` bf16, to `out` `[rows, 16]` fp32."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> None:
            x_at, w_at, out_at, pairs = args
            long, word = ir.IntType(64), ir.IntType(32)
            words, floats = ir.VectorType(word, COLUMNS), ir.VectorType(ir.FloatType(), COLUMNS)

            def at(address: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

            def every(value: Any) -> Any:
                vector = builder.insert_element(ir.Constant(floats, ir.Undefined), value, ir.Constant(word, 0))
                return builder.shuffle_vector(vector, vector, ir.Constant(words, [0] * COLUMNS))

            sums = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * COLUMNS)) for _ in range(rows)]
            with cgutils.for_range(builder, pairs) as loop:
                both = builder.load(at(w_at, builder.mul(loop.index, long(4 * COLUMNS)), words), align=4)
                low = builder.bitcast(builder.shl(both, ir.Constant(words, [16] * COLUMNS)), floats)
                high = builder.bitcast(builder.and_(both, ir.Constant(words, [0xFFFF0000] * COLUMNS)), floats)
                first = builder.mul(loop.index, long(2 * 4 * rows))
                for half, weights in enumerate((low, high)):
                    for row, total in enumerate(sums):
                        place = builder.add(first, long(4 * (half * rows + row)))
                        x = every(builder.load(at(x_at, place, ir.FloatType()), align=4))
                        product = builder.fmul(x, weights, flags=("contract",))
                        builder.store(builder.fadd(product, builder.load(total), flags=("contract",)), total)
            for row, total in enumerate(sums):
                builder.store(builder.load(total), at(out_at, long(4 * COLUMNS * row), floats), align=4)

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return accumulate


_one_row, _four_rows, _eight_rows, _sixteen_rows = map(_accumulate, (1, 4, 8, 16))  # a register for each


@_kernel
def linear(address):
    """A task is some pieces of 16 columns, whose weights stay in the cache for all rows; `at_once` are in registers."""
    words = _int64s(address, 11)
    x_at, x_stride, w_at, bias_at, out_at = words[1], words[2], words[3], words[4], words[5]
    num_rows, n, k, at_once, pieces = words[6], words[7], words[8], words[9], words[10]
    groups = (num_rows + at_once - 1) // at_once
    _add(address - 8, 1)
    x, total = np.zeros((groups, k, at_once), np.float32), np.empty((at_once, COLUMNS), np.float32)
    for row in range(num_rows):
        values = _bfloat16s(x_at + 2 * row * x_stride, k)
        for d in range(k):
            x[row // at_once, d, row % at_once] = _wide(values[d])
    while True:
        start = _next_task(address) * pieces * COLUMNS
        if start >= n:
            break
        for first in range(start, min(start + pieces * COLUMNS, n), COLUMNS):
            width = min(COLUMNS, n - first)
            for group in range(groups):
                x_group, w, sums = x.ctypes.data + 4 * group * k * at_once, w_at + 2 * first * k, total.ctypes.data
                if at_once == 16:
                    _sixteen_rows(x_group, w, sums, k // 2)
                elif at_once == 8:
                    _eight_rows(x_group, w, sums, k // 2)
                elif at_once == 4:
                    _four_rows(x_group, w, sums, k // 2)
                else:
                    _one_row(x_group, w, sums, k // 2)
                for row in range(group * at_once, min((group + 1) * at_once, num_rows)):
                    out = _bfloat16s(out_at + 2 * (row * n + first), width)
                    if bias_at != 0:
                        bias = _bfloat16s(bias_at + 2 * first, width)
                        for d in range(width):
                            total[row - group * at_once, d] += _wide(bias[d])
                    for d in range(width):
                        out[d] = _narrow(total[row - group * at_once, d])
    _add(address - 8, -1)
