"""Tiles of 4-bit pages as operands of `mma.m16n8k16`, inside registers: the parts of `decode_int4.py`, beside those of
`register_tiles.py` for 8 bits.

A row of `head_dim` codes is `head_dim / 8` 32-bit words for loading and WIDTH = `head_dim / 4` 16-bit words of four
codes for the matrix unit. Codes 0 and 2 of word w are the channels 2 w and 2 w + 1 ("low"), codes 1 and 3 the same plus
`head_dim / 2` ("high"), see `layout.GroupPages`. Each of the four makes a tensor of its own. Products of the two halves
stand in two columns, (head, low) and (head, high): a lane has both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_paged.kernels.register_tiles import code_values, plus_offset, run_of

CODE_UNIT = gl.constexpr(2.0**24)  # a code read as fp16 bits is code / CODE_UNIT


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def int4_k_layout(tile, words):
    """A lane holds a quarter of a row, consecutive words, of tokens lane // 4 + 8 i."""
    run = words // 4
    registers = [[0, 1 << i] for i in range(_log2(run))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, words])


@gluon.constexpr_function
def int4_v_layout(tile, words, pairs_first):
    """A lane holds an eighth of a row, consecutive words, of tokens 2 (lane % 4) + {0, 1} + 8 i."""
    run = words // 8
    consecutive = [[0, 1 << i] for i in range(_log2(run))]
    more = [[1 << i, 0] for i in range(3, _log2(tile))]
    registers = [[1, 0], *consecutive, *more] if pairs_first else [*consecutive, [1, 0], *more]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, words])


@gluon.constexpr_function
def int4_scale_layout(tile, groups):
    """Four lanes hold the scales and zeros of one row, of rows lane // 4 + 8 i: the rows of a product."""
    registers = [[0, 1 << i] for i in range(_log2(groups))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [], [], [tile, groups])


@gluon.constexpr_function
def head_layout(rows, heads):
    """`[rows, heads]` where a lane holds head lane % 4 of rows lane // 4 + 8 i: one half of a product's columns."""
    registers = [[0, 4 << i] for i in range(_log2(heads // 4))] + [[1 << i, 0] for i in range(3, _log2(rows))]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [], [], [rows, heads])


@gluon.jit
def row_words(ptr, block, row, stride, TILE: gl.constexpr, ROW: gl.constexpr, L: gl.constexpr):
    """Pointers to TILE rows of ROW 32-bit words, from row `row` of a block on."""
    t = gl.arange(0, TILE, layout=gl.SliceLayout(1, L))
    w = gl.arange(0, ROW, layout=gl.SliceLayout(0, L))
    first = ptr + (block.to(gl.int64) * stride + row * ROW)
    # split so that all loads of a lane are constants away from one address
    return first + (t % 8 * ROW)[:, None] + w[None, :] + (t // 8 * (8 * ROW))[:, None]


@gluon.jit
def short_words(words):
    """`[TILE, WORDS]` 32-bit words as `[TILE, 2 * WORDS]` 16-bit ones."""
    short = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    return short.reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def int4_codes(words):
    """Two 16-bit words -> four fp16 pairs: codes 0 and 2 of each times 2^-24, codes 1 and 3 times 2^-20."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        shr.u32 a, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, a, 0x000F000F;
        and.b32 $3, a, 0x00F000F0;
        }
        """,
        "=&r,=&r,=r,=r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def int4_k_operand(x, TILE: gl.constexpr, WIDTH: gl.constexpr, A: gl.constexpr):
    """`[TILE, WIDTH]` as left operand: word RUN c + 4 s + 2 h + e becomes column 16 s + 8 h + 2 c + e, in place."""
    x = x.reshape([TILE, 4, WIDTH // 16, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([TILE, WIDTH])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def int4_v_operand(x, TILE: gl.constexpr, WIDTH: gl.constexpr, A: gl.constexpr):
    """`[TILE, WIDTH]` as transposed left operand: word RUN r + x becomes row 8 x + r, in place."""
    x = x.reshape([TILE, 8, WIDTH // 8]).permute([2, 1, 0]).reshape([WIDTH, TILE])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def scales_of_rows(pairs, TILE: gl.constexpr, GROUPS: gl.constexpr, H: gl.constexpr):
    """Scale and zero of the low and of the high codes of each row, `[TILE]` fp32; one group serves both."""
    L: gl.constexpr = gl.SliceLayout(1, H)
    if GROUPS == 2:
        low, high = gl.split(pairs)
        low_scale, low_zero = _scale_and_zero(gl.convert_layout(low, L))
        high_scale, high_zero = _scale_and_zero(gl.convert_layout(high, L))
    else:
        low_scale, low_zero = _scale_and_zero(gl.convert_layout(pairs.reshape([TILE]), L))
        high_scale, high_zero = low_scale, low_zero
    return low_scale, low_zero, high_scale, high_zero


@gluon.jit
def _scale_and_zero(pair):
    """Two fp16 in 32 bits as fp32."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        }
        """,
        "=r,=r,r",
        [pair],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves(x, H: gl.constexpr):
    """`[M, 2 N]`, columns (head, half) -> low and high `[M, N]`."""
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.convert_layout(low, H, assert_trivial=True), gl.convert_layout(high, H, assert_trivial=True)


@gluon.jit
def columns(low, high, L: gl.constexpr):
    """The reverse of `halves`, in layout L."""
    x = gl.join(low, high)
    if len(low.shape) == 2:
        x = x.reshape([low.shape[0], 2 * low.shape[1]])
    else:
        x = x.reshape([2 * low.shape[0]])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def int4_queries(q_ptr, stride, scale, K_DIM: gl.constexpr, GROUP: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr):
    """Right operands for the tensors of `int4_codes`, sums over the channels of each column, and units.

    Columns are zero where they meet the other half's codes, so no product mixes two scales. Rows are the columns of
    `int4_k_operand`. Sums and units `[2 N]`; products times the unit are base-2 scores / CODE_UNIT.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    column = gl.arange(0, 2 * N, layout=gl.SliceLayout(0, B))
    row = gl.arange(0, K_DIM // 4, layout=gl.SliceLayout(1, B))
    word = row % 8 // 2 * (K_DIM // 16) + row // 16 * 4 + row % 16 // 8 * 2 + row % 2
    pointers = q_ptr + (column // 2 * stride)[None, :] + (2 * word)[:, None]
    low = ((column < 2 * GROUP) & (column % 2 == 0))[None, :]
    high = ((column < 2 * GROUP) & (column % 2 == 1))[None, :]
    q0 = gl.load(pointers, mask=low, other=0.0).to(gl.float32) * scale
    q1 = gl.load(pointers + K_DIM // 2, mask=high, other=0.0).to(gl.float32) * scale
    q2 = gl.load(pointers + 1, mask=low, other=0.0).to(gl.float32) * scale
    q3 = gl.load(pointers + (K_DIM // 2 + 1), mask=high, other=0.0).to(gl.float32) * scale
    largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    low_top, high_top = gl.split(gl.convert_layout(gl.max(largest, 0), COLUMNS).reshape([N, 2]))
    largest = gl.maximum(low_top, high_top)
    unit = gl.exp2(gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0))))
    unit = gl.join(unit, unit).reshape([2 * N])
    inverse = gl.convert_layout(1.0 / unit, gl.SliceLayout(0, B))[None, :]
    q0 = (q0 * inverse).to(gl.float16)
    q1 = (q1 * (inverse * 0.0625)).to(gl.float16)  # codes 1 and 3 come 16 times too large
    q2 = (q2 * inverse).to(gl.float16)
    q3 = (q3 * (inverse * 0.0625)).to(gl.float16)
    sums = gl.sum(q0.to(gl.float32) + q2.to(gl.float32) + (q1.to(gl.float32) + q3.to(gl.float32)) * 16.0, 0)
    return q0, q1, q2, q3, gl.convert_layout(sums, COLUMNS), gl.convert_layout(unit, COLUMNS)


@gluon.jit
def power_of_two_above(x):
    """The smallest power of two that is not below the fp32 `x`, 0 < x < 2^127, or 0."""
    return ((x.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def value_operands(v, TYPE: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr, MMA: gl.constexpr):
    """The tile's codes as four transposed left operands `[DIM / 4, TILE]`."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WIDTH: gl.constexpr = DIM // 4
    if gl.uint8 == TYPE:
        v = gl.convert_layout(short_words(v), int4_v_layout(TILE, WIDTH, True), assert_trivial=True)
        v0, v1, v2, v3 = int4_codes(v)
        v0 = int4_v_operand(v0, TILE, WIDTH, A)
        v1 = int4_v_operand(v1, TILE, WIDTH, A)
        v2 = int4_v_operand(v2, TILE, WIDTH, A)
        v3 = int4_v_operand(v3, TILE, WIDTH, A)
    else:
        v0, v1, v2, v3 = code_values(v, TYPE, WIDTH, A)
    return v0, v1, v2, v3


@gluon.jit
def store_heads(
    ptr, a0, a1, a2, a3, factor, low_zero, high_zero, offset_ptr, TYPE: gl.constexpr, DIM: gl.constexpr,
    GROUP: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Values of all heads, accumulators * factor + zero + offset, into `[GROUP, DIM]` at `ptr`: neighbours, lane by
    lane."""
    WIDTH: gl.constexpr = DIM // 4
    N: gl.constexpr = a0.shape[1] // 2
    if gl.uint8 == TYPE:  # row 8 x + r of an accumulator is word WIDTH / 8 * r + x, see `int4_v_operand`
        low = gl.join(a0, a2).reshape([WIDTH // 8, 8, N, 2, 2]).permute([2, 1, 0, 4, 3]).reshape([N, DIM // 2, 2])
        high = gl.join(a1, a3).reshape([WIDTH // 8, 8, N, 2, 2]).permute([2, 1, 0, 4, 3]).reshape([N, DIM // 2, 2])
        low, _ = gl.split(low)
        _, high = gl.split(high)
        _store_rows(ptr, low, factor * CODE_UNIT, low_zero, offset_ptr, DIM, GROUP, OFFSET)
        high_factor = factor * (CODE_UNIT * 0.0625)
        _store_rows(ptr + DIM // 2, high, high_factor, high_zero, offset_ptr + DIM // 2, DIM, GROUP, OFFSET)
    else:  # row 8 (RUN y + x) + r is word RUN (8 y + r) + x, see `register_tiles.v_operand`
        RUN: gl.constexpr = run_of(WIDTH)
        x = gl.join(gl.join(a0, a2), gl.join(a1, a3))  # value 2 i + j at [i, j]
        x = x.reshape([WIDTH // (8 * RUN), RUN, 8, N, 2, 4]).permute([3, 0, 2, 1, 5, 4]).reshape([N, DIM, 2])
        low, _ = gl.split(x)
        _store_rows(ptr, low, factor, low_zero * 0.0, offset_ptr, DIM, GROUP, OFFSET)


@gluon.jit
def _store_rows(ptr, x, factor, zero, offset_ptr, DIM: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr):
    """`x` `[N, channels]` * factor + zero + offset into the rows of DIM at `ptr`."""
    L: gl.constexpr = x.type.layout
    head = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    channel = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, L))
    zero = gl.convert_layout(zero, gl.SliceLayout(1, L))
    x = plus_offset(x * factor[:, None] + zero[:, None], offset_ptr, channel, OFFSET).to(ptr.dtype.element_ty)
    gl.store(ptr + (head * DIM)[:, None] + channel[None, :], x, mask=(head < GROUP)[:, None])
