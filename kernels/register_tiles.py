"""Tiles of pages as operands of `mma.m16n8k16`, made inside the registers of one warp.

A lane loads 16 contiguous bytes, and the order of channels (which a dot product does not care about) and of tokens is
chosen such that what a lane has loaded is what the matrix unit wants from that lane. A tile is `[TILE, WORDS]` 32-bit
words of `PARTS` values: 4 codes, or 2 numbers of 16 bits. `k_codes`, `k_pairs` and `v_codes`, `v_pairs` make `PARTS`
16-bit tensors of it, one per matrix product; in K a register pairs two values of one word, in V the same value of two
neighbouring tokens. Pages are the left operand, S^T = K q^T and O^T = V^T P^T. 2.3 (int8) and 1.8 (e4m3) instructions
per code at head_dim 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_paged.kernels.tiles import add_sinks

INT8_BIAS = gl.constexpr(1152.0)  # an int8 code read as fp16 bits 0x6480 + code


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def k_layout(tile, words):
    """A lane holds 4 consecutive words of tokens lane // 4 + 8 i."""
    more = [[0, 1 << i] for i in range(4, _log2(words))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, [], [], [tile, words])


@gluon.constexpr_function
def v_layout(tile, words, run, pairs_first):
    """A lane holds `run` successive words of tokens 2 (lane % 4) + {0, 1} + 8 i; `pairs_first` orders its registers."""
    consecutive = [[0, 1 << i] for i in range(_log2(run))]
    more = [[0, 1 << i] for i in range(_log2(run) + 3, _log2(words))] + [[1 << i, 0] for i in range(3, _log2(tile))]
    registers = [[1, 0], *consecutive, *more] if pairs_first else [*consecutive, [1, 0], *more]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, words])


@gluon.constexpr_function
def run_of(words):
    """Words of a row of V that a lane loads at once."""
    return 4 if words >= 32 else words // 8


@gluon.constexpr_function
def parts(ty):
    """Values in a 32-bit word."""
    return 32 // ty.primitive_bitwidth


@gluon.constexpr_function
def dot_type(ty):
    """What the matrix unit reads: 16-bit values as they are, codes as fp16, which holds each of them exactly."""
    return ty if ty.primitive_bitwidth == 16 else gl.float16


@gluon.jit
def k_codes(words, TYPE: gl.constexpr):
    """Words w0, w1 of a lane -> pairs of values of one word. int8: (b0, b2), (b1, b3) of w0, then of w1, plus INT8_BIAS
    (the caller subtracts its product with q); e4m3: (b0, b1), (b2, b3) of w0, then of w1."""
    if gl.float8e4nv == TYPE:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b, c, d;
            mov.b32 {a, b}, $4;
            mov.b32 {c, d}, $5;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shr.u32 a, $4, 8;
        shr.u32 b, $5, 8;
        lop3.b32 $0, $4, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $1, a, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $2, $5, 0x00FF00FF, 0x64806480, 0x6A;
        lop3.b32 $3, b, 0x00FF00FF, 0x64806480, 0x6A;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def v_codes(words, TYPE: gl.constexpr):
    """The word of two neighbouring tokens -> four fp16 pairs: byte i of both, i = 0..3."""
    if gl.float8e4nv == TYPE:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            .reg .b16 a, b, c, d;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $4, $5, 0x7362;
            mov.b32 {a, b}, low;
            mov.b32 {c, d}, high;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, a, b, c, d, bias;
        mov.b32 bias, 0x64806480;
        prmt.b32 low, $4, $5, 0x5140;
        prmt.b32 high, $4, $5, 0x7362;
        xor.b32 low, low, 0x80808080;
        xor.b32 high, high, 0x80808080;
        prmt.b32 a, low, 0x64646464, 0x4140;
        prmt.b32 b, low, 0x64646464, 0x4342;
        prmt.b32 c, high, 0x64646464, 0x4140;
        prmt.b32 d, high, 0x64646464, 0x4342;
        sub.f16x2 $0, a, bias;
        sub.f16x2 $1, b, bias;
        sub.f16x2 $2, c, bias;
        sub.f16x2 $3, d, bias;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def k_pairs(words, TYPE: gl.constexpr):
    """Words w0, w1 of a lane, two 16-bit values each -> w0, w1."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )
    return first.to(TYPE, bitcast=True), second.to(TYPE, bitcast=True)


@gluon.jit
def v_pairs(words, TYPE: gl.constexpr):
    """The word of two neighbouring tokens, two 16-bit values each -> value 0 of both, value 1 of both."""
    low, high = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=&r,=r,r,r",
        [words],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )
    return low.to(TYPE, bitcast=True), high.to(TYPE, bitcast=True)


@gluon.jit
def k_operand(x, TILE: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """`[TILE, WORDS]` as left operand: word 16 b + 4 c + 2 h + e becomes column 16 b + 8 h + 2 c + e, in place."""
    x = x.reshape([TILE, WORDS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE, WORDS])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def v_operand(x, TILE: gl.constexpr, WORDS: gl.constexpr, RUN: gl.constexpr, A: gl.constexpr):
    """`[TILE, WORDS]` as transposed left operand: word RUN (8 y + r) + x becomes row 8 (RUN y + x) + r, in place."""
    x = x.reshape([TILE, WORDS // (8 * RUN), 8, RUN]).permute([1, 3, 2, 0]).reshape([WORDS, TILE])
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def add_code_products(products, k, q0, q1, q2, q3, TYPE: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """`products` + K q^T of a tile of 8-bit codes."""
    k0, k1, k2, k3 = k_codes(k, TYPE)
    products = mma_v2(k_operand(k0, k.shape[0], WORDS, A), q0, products)
    products = mma_v2(k_operand(k1, k.shape[0], WORDS, A), q1, products)
    products = mma_v2(k_operand(k2, k.shape[0], WORDS, A), q2, products)
    return mma_v2(k_operand(k3, k.shape[0], WORDS, A), q3, products)


@gluon.jit
def code_values(v, TYPE: gl.constexpr, WORDS: gl.constexpr, A: gl.constexpr):
    """A tile of 8-bit codes as four transposed left operands `[WORDS, TILE]`."""
    TILE: gl.constexpr = v.shape[0]
    RUN: gl.constexpr = run_of(WORDS)
    v0, v1, v2, v3 = v_codes(gl.convert_layout(v, v_layout(TILE, WORDS, RUN, True), assert_trivial=True), TYPE)
    return (
        v_operand(v0, TILE, WORDS, RUN, A), v_operand(v1, TILE, WORDS, RUN, A),
        v_operand(v2, TILE, WORDS, RUN, A), v_operand(v3, TILE, WORDS, RUN, A),
    )  # fmt: skip


@gluon.constexpr_function
def q_layout(n, dim, parts):
    """A lane holds the channels of one head that it multiplies in `k_operand`: 4 words of every 16."""
    run = _log2(4 * parts)
    registers = [[0, 1 << i] for i in range(run)] + [[0, 1 << i] for i in range(run + 2, _log2(dim))]
    registers += [[1 << i, 0] for i in range(3, _log2(n))]
    lanes = [[0, 1 << run], [0, 2 << run], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [n, dim])


@gluon.jit
def _q_operand(x, WORDS: gl.constexpr, N: gl.constexpr, B: gl.constexpr):
    """`[N, WORDS / 16, 4, 2, 2]` as right operand `[WORDS, N]` in the order of `k_operand`, in place."""
    x = x.permute([1, 3, 2, 4, 0]).reshape([WORDS, N])
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def q_operands(q, TYPE: gl.constexpr, WORDS: gl.constexpr, N: gl.constexpr, B: gl.constexpr):
    """`q` `[N, K_DIM]` in `q_layout` -> the right operands that meet the tensors of `k_codes`."""
    q = q.reshape([N, WORDS // 16, 4, 2, 2, 2, 2])  # ..., word of a pair, byte of the word
    if gl.float8e4nv == TYPE:  # tensor j holds bytes 2 (j % 2) + {0, 1} of word j // 2
        even, odd = gl.split(q.permute([0, 1, 2, 3, 4, 6, 5]))
    else:  # bytes j % 2 + {0, 2}
        even, odd = gl.split(q)
    q0, q2 = gl.split(even.permute([0, 1, 2, 3, 5, 4]))
    q1, q3 = gl.split(odd.permute([0, 1, 2, 3, 5, 4]))
    return (
        _q_operand(q0, WORDS, N, B),
        _q_operand(q1, WORDS, N, B),
        _q_operand(q2, WORDS, N, B),
        _q_operand(q3, WORDS, N, B),
    )


@gluon.jit
def q_pairs(q, WORDS: gl.constexpr, N: gl.constexpr, B: gl.constexpr):
    """`q` `[N, K_DIM]` in `q_layout` -> the right operands that meet the tensors of `k_pairs`."""
    q0, q1 = gl.split(q.reshape([N, WORDS // 16, 4, 2, 2, 2]).permute([0, 1, 2, 3, 5, 4]))
    return _q_operand(q0, WORDS, N, B), _q_operand(q1, WORDS, N, B)


@gluon.jit
def head_of_pages(ptr, scale_ptr, stride, scale_stride, row, DIM: gl.constexpr):
    """Pages and scales from `row` on: pages, and scales of 4 bits, as 32-bit words, strides too."""
    TYPE: gl.constexpr = ptr.dtype.element_ty
    ROW: gl.constexpr = DIM // 8 if gl.uint8 == TYPE else DIM // parts(TYPE)
    words = ptr.to(gl.pointer_type(gl.int32)) + row * ROW
    scales = scale_ptr + row
    if gl.uint8 == TYPE:
        scales = scale_ptr.to(gl.pointer_type(gl.int32)) + row * (DIM // 64)
        scale_stride = scale_stride // 2
    return words, scales, stride // parts(TYPE), scale_stride


@gluon.jit
def tile_words(ptr, stride, block, row, WORDS: gl.constexpr, TILE: gl.constexpr, L: gl.constexpr):
    """Pointers to the 32-bit words of a tile, `[TILE, WORDS]`."""
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, L))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, L))
    return ptr + (block.to(gl.int64) * stride + row * WORDS) + n[:, None] * WORDS + word[None, :]


@gluon.jit
def prefetch_rows(pages, block, row, TYPE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr):
    """Ask TILE rows of a block from `row` on, and their scales, into the L2. `pages` as `head_of_pages` gives them."""
    ptr, scale_ptr, stride, scale_stride = pages
    WORDS: gl.constexpr = DIM // 8 if gl.uint8 == TYPE else DIM // parts(TYPE)
    _prefetch(ptr + (block.to(gl.int64) * stride + row * WORDS), TILE * WORDS // 8, 8)
    if gl.uint8 == TYPE:
        _prefetch(scale_ptr + (block.to(gl.int64) * scale_stride + row * (DIM // 64)), TILE * (DIM // 64) // 8, 8)
    elif parts(TYPE) == 4:
        _prefetch(scale_ptr + (block.to(gl.int64) * scale_stride + row), TILE, 1)


@gluon.jit
def _prefetch(ptr, COUNT: gl.constexpr, STEP: gl.constexpr):
    """Ask the sectors of COUNT elements into the L2, each STEP after the one before it."""
    at = ptr + gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [1], [0])) * STEP
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def block_of(table_ptr, tile, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The block that holds a tile."""
    return gl.load(table_ptr + tile * TILE // BLOCK_SIZE)


@gluon.jit
def capped(scores, softcap):
    """softcap * tanh(x) of scores 2 x, as tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return softcap * (1.0 - 2.0 / (gl.exp2(scores) + 1.0))


@gluon.jit
def at_edge(tile, first_token, seq_len, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Whether the query does not see all of a tile."""
    edge = tile * TILE + TILE > seq_len
    if WINDOW:
        edge = edge | (tile * TILE < first_token)
    return edge


@gluon.jit
def plus_offset(x, offset_ptr, channel, OFFSET: gl.constexpr):
    """`x` `[N, channels]` with what was taken from the values of channels `channel` before they were stored."""
    if OFFSET:
        x += gl.load(offset_ptr + channel)[None, :]
    return x


@gluon.jit
def inverse_denominator(top, total, whole, lse_ptr, sinks_ptr, GROUP: gl.constexpr, SINKS: gl.constexpr):
    """1 / `total` `[N]`, with a sink for a whole head. A part has none, but its base-2 log-sum-exp is stored; that of a
    whole head is stored in place of its sink where SINKS is 3."""
    head = gl.arange(0, top.shape[0], layout=top.type.layout)
    inverse = 1.0 / total
    if whole:
        if SINKS == 3:
            gl.store(sinks_ptr + head, top + gl.log2(total), mask=head < GROUP)
        elif SINKS:
            total, decay = add_sinks(total, top, sinks_ptr + head, head < GROUP)
            inverse = decay / total
    else:
        gl.store(lse_ptr + head, top + gl.log2(total), mask=head < GROUP)
    return inverse
