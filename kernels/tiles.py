"""Device functions shared by the attention kernels: page tiles, code conversion and one online-softmax step.

Scores live in base 2 (`scale` carries log2 e), probabilities are exp2 of them. 8-bit codes meet the matrix unit as
fp16, which holds every int8 and e4m3 value exactly; their scales are folded into scores and probabilities, so a code
costs one conversion and nothing else. fp16 has little range, therefore rows of q are normalised by a power of two,
probabilities by the largest `v_scale` met so far (the decay of the running maximum carries that at no extra cost).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def dot_operand(codes, DOT: tl.constexpr, BYTE_PERMUTE: tl.constexpr):
    """Codes or values as the dtype of the dot.

    int8 -> fp16 by byte permute: 0x64 over (code + 128) is the fp16 number 1152 + code, so four codes take one xor, two
    permutes and two packed subtractions instead of four slow conversions.
    """
    if BYTE_PERMUTE and codes.dtype == tl.int8 and tl.float16 == DOT:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 biased, low, high, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 low, biased, 0x64646464, 0x4140;
            prmt.b32 high, biased, 0x64646464, 0x4342;
            sub.f16x2 $0, low, offset;
            sub.f16x2 $1, high, offset;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return codes.to(DOT)


@triton.jit
def normalise_rows(q, DOT: tl.constexpr, NORMALISE: tl.constexpr):
    """`q` `[M, D]` as dot operand and the power of two `[M]` it was divided by."""
    if NORMALISE:
        q = q.to(tl.float32)
        top = tl.max(tl.abs(q), 1)
        unit = tl.exp2(tl.floor(tl.log2(tl.where(top > 0, top, 1.0))))
        return (q / unit[:, None]).to(DOT), unit
    return q.to(DOT), tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def softmax_step(
    acc,  # [M, DV] fp32, weighted values / v_unit
    total,  # [M] fp32, softmax denominator
    top,  # [M] fp32, running maximum of the base-2 scores
    v_unit,  # scalar fp32, largest v_scale so far
    q,  # [M, D]
    q_unit,  # [M] fp32, positive, scale and log2 e included (without SOFTCAP)
    k,  # [N, D]
    k_scale,  # [N] fp32
    v,  # [N, DV]
    v_scale,  # [N] fp32
    keep,  # [M or 1, N] bool, read when MASKED
    softcap,  # scalar fp32, base-2 scores are capped at softcap * log2 e
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    BYTE_PERMUTE: tl.constexpr,
):
    """Take one tile of keys into the running attention of M queries."""
    k = dot_operand(k, K_DOT, BYTE_PERMUTE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if K_SCALED:
        scores *= k_scale[None, :]
    unit = q_unit
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * q_unit[:, None]) + 1.0))
        unit = tl.full([q.shape[0]], 1.0, tl.float32)
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    anchor = new_top
    if MASKED:  # a row may have met no key yet
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores * unit[:, None] - anchor[:, None])  # one multiply-add
    decay = tl.exp2(top - anchor)
    total = total * decay + tl.sum(probs, 1)
    if V_SCALED:
        new_unit = tl.maximum(v_unit, tl.max(v_scale, 0))
        inverse = 1.0 / new_unit
        probs *= (v_scale * inverse)[None, :]
        decay *= v_unit * inverse
        v_unit = new_unit
    acc = acc * decay[:, None]
    acc = tl.dot(probs.to(V_DOT), dot_operand(v, V_DOT, BYTE_PERMUTE), acc, input_precision="ieee")
    return acc, total, new_top, v_unit


@triton.jit
def add_sinks(total, top, sink_ptrs, live):
    """Softmax denominators with a sink each, and what sums under the old maxima decay by. Gluon kernels call it too."""
    sink = tl.load(sink_ptrs, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    decay = tl.exp2(top - new_top)
    return total * decay + tl.exp2(sink - new_top), decay
