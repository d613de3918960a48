"""The plain-torch definition against arithmetic that shares no code with it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_cases import Shape, dense_attention, make_case, tolerance, with_null_block
from torch import Tensor

from hf_paged.kernels import decode_groups
from hf_paged.kernels.layout import UINT4, AttentionMetadata, PlainPages, num_groups
from hf_paged.kernels.reference import dequantize, dequantize_groups, paged_attention, quantize_groups, quantize_rows

FORMATS = [torch.int8, torch.float8_e4m3fn]


def rows(kind: str) -> Tensor:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    if kind == "outlier channel":
        x[:, 5] = 300 * x[:, 5].abs() + 200
    elif kind == "constant":
        x[:] = x[:, :1]
    elif kind == "one sign":
        x = -x.abs()
    elif kind == "tiny":
        x *= 1e-6
    elif kind == "large":
        x *= 1e5
    return x


@pytest.mark.parametrize("kind", ["normal", "outlier channel", "constant", "one sign", "tiny", "large"])
def test_int8_codes_are_within_half_a_step_of_the_input(kind: str) -> None:
    """A biased rounding or a clipped code would cost every model quality without failing anything else."""
    x = rows(kind)
    codes, scale = quantize_rows(x, torch.int8)
    half_step = scale.double().unsqueeze(-1) / 2
    error = (codes.double() * scale.double().unsqueeze(-1) - x.double()).abs()
    assert (error <= half_step * (1 + 1e-6)).all()  # the division x / scale is rounded to fp32
    assert codes.abs().max() <= 127


@pytest.mark.parametrize("kind", ["normal", "outlier channel", "constant", "one sign", "large"])
def test_fp8_codes_are_within_half_an_e4m3_step_of_the_input(kind: str) -> None:
    x = rows(kind)
    codes, scale = quantize_rows(x, torch.float8_e4m3fn)
    scaled = x.double() / scale.double().unsqueeze(-1)
    # 3 mantissa bits: half a step is 2^-4 of the power of two below, 2^-10 among the subnormals
    half_step = torch.maximum(2.0 ** (scaled.abs().log2().floor() - 4), torch.tensor(2.0**-10))
    assert ((codes.double() - scaled).abs() <= half_step * (1 + 1e-6)).all()
    assert codes.float().abs().max() <= 448


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "outlier channel", "tiny", "large"])
def test_the_scale_is_the_smallest_fp16_that_clips_nothing(kind: str, dtype: torch.dtype) -> None:
    """A scale rounded to nearest clips the largest value half of the time; one too large wastes codes."""
    x = rows(kind)
    _, scale = quantize_rows(x, dtype)
    exact = x.double().abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    below = (scale.view(torch.int16) - 1).view(torch.float16)
    assert scale.dtype == torch.float16
    assert (scale.double() >= exact * (1 - 1e-7)).all()
    assert (below.double() < exact).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_of_zeros_reads_back_as_zeros(dtype: torch.dtype) -> None:
    codes, scale = quantize_rows(torch.zeros(3, 64), dtype)
    assert (scale == 0).all() and (codes.float() == 0).all()
    assert (dequantize(codes, scale) == 0).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan"), 1e8])
def test_a_row_that_cannot_be_stored_reads_back_as_nan_and_harms_no_other(dtype: torch.dtype, poison: float) -> None:
    """Silent garbage would be worse than a NaN: 1e8 overflows the fp16 scale."""
    x = torch.randn(4, 64)
    x[2, 7] = poison
    values = dequantize(*quantize_rows(x, dtype))
    assert values[2].isnan().all()
    assert values[[0, 1, 3]].isfinite().all()


def test_the_bit_trick_reads_every_finite_e4m3_code_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    assert torch.equal(dequantize(codes[None], torch.ones(1, dtype=torch.float16))[0], codes.float())


def int4_rows(kind: str) -> Tensor:
    """Rows in the range of fp16, which holds a zero as it is."""
    return rows(kind).clamp(-60000, 60000)


HEAD_DIMS = {32: 1, 64: 1, 80: 2, 96: 2, 112: 2, 128: 2, 160: 4, 192: 4, 256: 4, 576: 16}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["normal", "outlier channel", "constant", "one sign", "tiny", "large"])
def test_int4_codes_are_within_half_a_step_of_the_input(kind: str, head_dim: int) -> None:
    """A group boundary in the wrong place, a swapped nibble or a clipped code shows as an error over a group's step."""
    x = int4_rows(kind)[:, torch.arange(head_dim) % 96]
    codes, scale = quantize_groups(x)
    groups = HEAD_DIMS[head_dim]
    assert codes.shape == (64, head_dim // 2) and scale.shape == (64, groups, 2) and num_groups(head_dim) == groups
    unpacked = torch.cat((codes % 16, codes // 16), -1).double().unflatten(-1, (groups, -1))
    step, zero = scale.double().unsqueeze(-2).unbind(-1)
    error = (unpacked * step + zero - x.double().unflatten(-1, (groups, -1))).abs()
    # x - zero is rounded to fp32, and so is its quotient with the step
    assert (error <= step / 2 * (1 + 1e-6) + x.abs().amax() * 2**-24).all()
    torch.testing.assert_close(dequantize_groups(codes, scale).double(), x.double(), rtol=0, atol=float(step.max()))


@pytest.mark.parametrize("kind", ["normal", "outlier channel", "one sign", "large"])
def test_int4_scale_and_zero_are_the_closest_fp16_that_clip_nothing(kind: str) -> None:
    """A zero rounded up clips the smallest channel, a scale rounded down the largest one."""
    _, scale = quantize_groups(int4_rows(kind))
    x = int4_rows(kind).unflatten(-1, (2, -1))
    step, zero = (part.contiguous() for part in scale.unbind(-1))
    low, high = x.double().amin(-1), x.double().amax(-1)
    above = torch.nextafter(zero, torch.tensor(float("inf"), dtype=torch.float16))
    assert (zero.double() <= low).all() and (above.double() > low).logical_or(above.isinf()).all()
    exact = (high - zero.double()) / 15
    below = torch.nextafter(step, torch.tensor(0.0, dtype=torch.float16))
    assert (step.double() >= exact * (1 - 1e-7)).all() and (below.double() < exact).all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_int4_groups_of_zeros_read_back_as_zeros(zero: float) -> None:
    """And their bits are those of +0: which zero a maximum picks depends on the device."""
    codes, scale = quantize_groups(torch.full((3, 96), zero))
    assert (scale.view(torch.int16) == 0).all() and (codes == 0).all()
    assert (dequantize_groups(codes, scale) == 0).all()


@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan"), 1e8, -1e5])
def test_an_int4_row_that_cannot_be_stored_reads_back_as_nan_and_harms_no_other(poison: float) -> None:
    """In all its groups: half a row of plausible values would hide the poison."""
    x = torch.randn(4, 128)
    x[2, 7] = poison
    values = dequantize_groups(*quantize_groups(x))
    assert values[2].isnan().all()
    assert values[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("head_dim", [33, 65, 130])
def test_a_head_dim_that_cannot_be_packed_is_refused_by_name(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim}.*a multiple of"):
        num_groups(head_dim)


MIXED = {"q_lens": (1, 1, 1, 37, 3, 20, 1), "seq_lens": (1, 0, 41, 37, 50, 65, 33)}
SHAPES = {
    "mha": Shape(**MIXED),
    "gqa": Shape(**MIXED, group=4, block_size=32),
    "odd group and head_dim": Shape(**MIXED, group=7, head_dim=80),
    "v narrower than k": Shape(**MIXED, head_dim=96, v_head_dim=64),
    "window within context": Shape(**MIXED, window=10, group=2),
    "window wider than context": Shape(**MIXED, window=500),
    "softcap": Shape(**MIXED, softcap=5.0, group=2),
    "sinks": Shape(**MIXED, sinks=True, group=4),
    "sinks of each row": Shape(**MIXED, row_sinks=True, group=4),
    "sinks, window, softcap": Shape(**MIXED, sinks=True, window=17, softcap=20.0, group=2),
    "int8": Shape(**MIXED, k_format=torch.int8, group=3),
    "fp8": Shape(**MIXED, k_format=torch.float8_e4m3fn, group=3),
    "int8 keys, fp8 values": Shape(**MIXED, k_format=torch.int8, v_format=torch.float8_e4m3fn),
    "int8 keys, plain values": Shape(**MIXED, k_format=torch.int8, v_format=torch.float32, window=10),
    "int4": Shape(**MIXED, k_format=UINT4, group=3),
    "int4, two groups and a window": Shape(**MIXED, k_format=UINT4, head_dim=128, window=10),
    "int4, head_dims that 64 does not divide": Shape(**MIXED, k_format=UINT4, head_dim=80, v_head_dim=96, group=2),
    "int4, four groups": Shape(**MIXED, k_format=UINT4, head_dim=192, v_head_dim=32, sinks=True),
    "int8 keys, int4 values": Shape(**MIXED, k_format=torch.int8, v_format=UINT4, softcap=5.0),
    "int4 keys, plain values": Shape(**MIXED, k_format=UINT4, v_format=torch.float32),
    "decodes only": Shape(),
    "prefill only": Shape(q_lens=(5, 40), seq_lens=(5, 64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_dense_fp64_attention_and_never_reads_poison(name: str) -> None:
    shape = SHAPES[name]
    case = with_null_block(make_case(shape))
    expected = dense_attention(case)
    result = paged_attention(case.query, case.layer, case.meta, **case.options)
    assert (result - expected).abs().max() <= tolerance(shape)


def test_bf16_queries_are_computed_in_fp32_and_rounded_once() -> None:
    shape = Shape(**MIXED, dtype=torch.bfloat16, k_format=torch.bfloat16, group=2)
    case = with_null_block(make_case(shape))
    result = paged_attention(case.query, case.layer, case.meta, **case.options)
    expected = dense_attention(case)
    assert result.dtype == torch.bfloat16
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize(
    "options", [{}, {"window": 20}, {"k_format": torch.int8}, {"softcap": 5.0, "sinks": True}], ids=str
)
def test_queries_that_are_not_widened_round_their_probabilities_and_nothing_else(options: dict) -> None:
    """Scores in bf16 would be off by 2^-8 of themselves, and e^0.1 is not 1."""
    shape = Shape(**MIXED, **{"dtype": torch.bfloat16, "k_format": torch.bfloat16, "group": 2, **options})
    case = with_null_block(make_case(shape))
    result = paged_attention(case.query, case.layer, case.meta, **case.options, fast=True)
    assert result.dtype == torch.bfloat16
    assert (result.double() - dense_attention(case)).abs().max() <= tolerance(shape)


def chunk_of(meta: AttentionMetadata, begin: int, end: int) -> AttentionMetadata:
    """The step that computes tokens `[begin, end)` of the only sequence of `meta`."""
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=meta.block_tables,
        slot_mapping=meta.slot_mapping[begin:end],
        num_decodes=int(end - begin == 1),
        max_seqlen_q=end - begin,
        max_seq_len=end,
    )


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("format", [torch.float32, torch.int8, UINT4])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(format: torch.dtype, options: dict) -> None:
    """A chunk must see what the pages hold; chunking a prompt may not change its tokens."""
    whole = with_null_block(make_case(Shape(q_lens=(90,), seq_lens=(90,), k_format=format, group=2, **options)))
    expected = paged_attention(whole.query, whole.layer, whole.meta, **whole.options)
    for begin, end in itertools.pairwise((0, 13, 64, 65, 90)):
        meta = chunk_of(whole.meta, begin, end)
        result = paged_attention(whole.query[begin:end], whole.layer, meta, **whole.options)
        torch.testing.assert_close(result, expected[begin:end], rtol=0, atol=4 * 32 * 2**-23)


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 600, "k_format": UINT4}], ids=str)
def test_in_fp32_a_prompt_in_chunks_gives_the_same_bits(options: dict) -> None:
    """A sum in another order tips a 4-bit code over, and later layers amplify it: 0.1% of perplexity came of it."""
    whole = with_null_block(make_case(Shape(q_lens=(900,), seq_lens=(900,), head_dim=32, group=2, **options)))
    expected = paged_attention(whole.query, whole.layer, whole.meta, **whole.options)
    for size in (16, 100, 256):
        for begin in range(0, 900, size):
            rows = slice(begin, min(begin + size, 900))
            meta = chunk_of(whole.meta, rows.start, rows.stop)
            assert torch.equal(paged_attention(whole.query[rows], whole.layer, meta, **whole.options), expected[rows])


def test_rows_past_the_last_sequence_are_zeros() -> None:
    case = with_null_block(make_case(Shape(q_lens=(1, 4), seq_lens=(9, 9))))
    query = torch.cat([case.query, torch.full_like(case.query, float("nan"))])
    result = paged_attention(query, case.layer, case.meta, **case.options)
    assert (result[5:] == 0).all() and result[:5].isfinite().all()


def test_a_long_chunk_with_history_keeps_its_scratch_memory_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a whole chunk at once would be q_len * seq_len per head; the loop must cut the chunk instead."""
    shape = Shape(q_lens=(600,), seq_lens=(700,), kv_heads=1, softcap=10.0)
    case = with_null_block(make_case(shape))
    expected = paged_attention(case.query, case.layer, case.meta, **case.options)
    monkeypatch.setattr("hf_paged.kernels.reference.SCRATCH_ELEMENTS", 700 * 32)
    result = paged_attention(case.query, case.layer, case.meta, **case.options)
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance(shape))


def test_nan_written_by_one_request_stays_with_it() -> None:
    """A broken request in the batch must not reach its neighbours through padding or masks."""
    case = with_null_block(make_case(Shape(q_lens=(1, 1, 8), seq_lens=(20, 40, 30), k_format=torch.float32)))
    assert isinstance(case.layer.v, PlainPages)
    case.layer.v.data[int(case.meta.block_tables[1, 0])] = float("nan")
    result = paged_attention(case.query, case.layer, case.meta, **case.options)
    assert result[1].isnan().all()
    assert result[[0, *range(2, 10)]].isfinite().all()


def test_layers_of_one_step_share_what_follows_from_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask and a split of slots per layer cost a CPU as much as the attention of a short row; the results are those
    of layers alone, also where layers differ in window and block size.
    """
    shapes = [
        Shape(q_lens=(1, 1), seq_lens=(9, 33), window=w, block_size=b) for w, b in ((None, 16), (10, 16), (10, 32))
    ]
    cases = [with_null_block(make_case(shape)) for shape in shapes]
    alone = [paged_attention(case.query, case.layer, case.meta, **case.options) for case in cases]
    made: list[object] = []
    original = decode_groups.decode_keys
    monkeypatch.setattr(decode_groups, "decode_keys", lambda *args: made.append(args) or original(*args))
    for shared in (slice(0, 2), slice(2, 3)):
        meta = replace(cases[shared][0].meta, derived={})
        for case, expected in 2 * list(zip(cases[shared], alone[shared], strict=True)):
            assert torch.equal(paged_attention(case.query, case.layer, meta, **case.options), expected)
    assert len(made) == len(cases)
