"""The Triton attention kernels against the plain-torch definition, in the interpreter on a CPU and compiled on a GPU.

The interpreter has no bf16 dot: bf16 pages run on the GPU only (`test_attention_on_gpu.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Shape, definition, empty_pages, make_case, to_device, with_null_block

pytest.importorskip("triton", reason="Triton exists on Linux only")

from attention_checks import DEVICE, check, definition_of_mixed, run_decode, run_prefill, run_recent

from hf_paged.kernels import prefill_workspace
from hf_paged.kernels.decode_config import DecodeConfig
from hf_paged.kernels.layout import UINT4, PlainPages
from hf_paged.kernels.paged_attention import paged_attention
from hf_paged.kernels.prefill_config import PrefillConfig

HALF = {"dtype": torch.float16, "k_format": torch.float16}
INT8 = {"dtype": torch.float16, "k_format": torch.int8}
FP8 = {"dtype": torch.float16, "k_format": torch.float8_e4m3fn}
INT4 = {"dtype": torch.float16, "k_format": UINT4}

FEATURES = {
    "fp32": Shape(),
    "fp32 gqa window": Shape(group=4, window=20, block_size=32),
    "window wider than context": Shape(window=500, head_dim=32),
    "window of a few tokens": Shape(window=3),
    "head_dim below a tensor core's": Shape(head_dim=8, group=2),
    "int8 keys of head_dim 8, int4 values": Shape(**INT8, v_format=UINT4, head_dim=8, group=2),
    "odd head_dim and v narrower": Shape(head_dim=80, v_head_dim=32, group=7),
    "softcap and sinks": Shape(softcap=5.0, sinks=True, group=2, head_dim=32),
    "sinks and window": Shape(sinks=True, window=33, head_dim=32, group=2),
    "sinks of each row, and window": Shape(row_sinks=True, window=33, head_dim=32, group=2),
    "sinks of each row on int8 keys": Shape(**INT8, row_sinks=True, group=4),
    "fp16": Shape(**HALF, group=2),
    "int8": Shape(**INT8, group=4),
    "fp8": Shape(**FP8, group=2),
    "int8 keys, fp8 values, softcap": Shape(**INT8, v_format=torch.float8_e4m3fn, softcap=20.0, sinks=True),
    "int8 keys, plain values, window": Shape(**INT8, v_format=torch.float16, window=20, head_dim=96),
    "plain keys, fp8 values": Shape(dtype=torch.float16, k_format=torch.float16, v_format=torch.float8_e4m3fn),
    "fp32 queries on int8": Shape(k_format=torch.int8, group=2),
    "int4": Shape(**INT4, group=4),
    "int4, two groups and a window": Shape(**INT4, head_dim=128, window=20),
    "int4, head_dims that 64 does not divide": Shape(**INT4, head_dim=80, v_head_dim=96, softcap=20.0, sinks=True),
    "int4, four groups": Shape(**INT4, head_dim=192, v_head_dim=32),
    "int8 keys, int4 values": Shape(**INT8, v_format=UINT4, group=2),
    "int4 keys, plain values": Shape(**INT4, v_format=torch.float16, window=20, head_dim=96),
    "fp32 queries on int4": Shape(k_format=UINT4, group=2, head_dim=128),
}
DECODES = {"q_lens": (1, 1, 1, 1), "seq_lens": (1, 0, 37, 80)}
PREFILLS = {"q_lens": (1, 1, 37, 3, 1, 20), "seq_lens": (5, 9, 37, 50, 33, 75)}


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("name", FEATURES)
def test_decode_equals_the_definition(name: str, programs: int) -> None:
    """Five programs begin and end inside sequences: heads are whole, in two parts, or in more."""
    shape = replace(FEATURES[name], **DECODES)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=programs, least=1)
    check(run_decode(case, config), definition(case), shape)


@pytest.mark.parametrize("name", FEATURES)
def test_prefill_equals_the_definition_and_leaves_decodes_alone(name: str) -> None:
    shape = replace(FEATURES[name], **PREFILLS)
    case = make_case(shape)
    config = PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=2)
    check(run_prefill(case, config), definition(case)[case.meta.num_decodes :], shape)


@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}, {"row_sinks": True}], ids=str)
@pytest.mark.parametrize(
    "formats", [(torch.int8, torch.int8), (torch.float8_e4m3fn, torch.int8), (UINT4, torch.int8)], ids=str
)
def test_prompts_through_a_workspace_equal_the_definition(
    formats: tuple[torch.dtype, torch.dtype], options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are dequantized for as many KV heads at a time as fit: three would, four heads make two and two."""
    shape = Shape(
        **PREFILLS | {"q_lens": (1, 1, 130, 3), "seq_lens": (5, 9, 150, 50)},
        kv_heads=4,
        group=2,
        dtype=torch.float16,
        k_format=formats[0],
        v_format=formats[1],
        device=DEVICE,
        **options,
    )
    case = make_case(shape)
    monkeypatch.setattr(prefill_workspace, "WORKSPACE_BYTES", 3 * 2 * 160 * 2 * (64 + 64))
    heads = [kv_heads for kv_heads, _ in prefill_workspace.slices(case.query, case.layer, case.meta, shape.window)]
    assert heads == [slice(0, 2), slice(2, 4)]
    assert prefill_workspace.wanted(case.query, case.layer, case.meta)
    check(run_prefill(case), definition_of_mixed(case)[case.meta.num_decodes :], shape)


def test_heads_of_plain_pages_attend_side_by_side_or_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts take KV heads in turns, as many as the L2 serves; each must find its own pages, heads, sinks."""
    shape = Shape(**PREFILLS, kv_heads=4, group=2, sinks=True)
    case = make_case(shape)
    whole = run_prefill(case)
    monkeypatch.setattr(prefill_workspace, "WORKSPACE_BYTES", 3 * 4 * 80 * 2 * (64 + 64))
    monkeypatch.setattr(prefill_workspace, "LEAST_ROWS", 1)
    turns = [kv_heads for kv_heads, _ in prefill_workspace.plain_slices(case.query, case.layer, case.meta)]
    assert turns == [slice(0, 2), slice(2, 4)]
    result = run_prefill(case)
    check(result, definition(case)[case.meta.num_decodes :], shape)
    assert torch.equal(result, whole)


@pytest.mark.parametrize("recent", [False, True])
@pytest.mark.parametrize("programs", [1, 5, 64])
def test_an_offset_of_values_is_added_once_to_heads_whole_or_shared(programs: int, recent: bool) -> None:
    """Whole heads get it from the attention kernel, shared ones from the joining one, rows without keys not at all."""
    shape = Shape(**INT8, **DECODES, group=4, v_head_dim=80, v_offset=True, recent=recent)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=programs, least=1)
    check(run_recent(case) if recent else run_decode(case, config), definition(case), shape)


@pytest.mark.parametrize("rotates", [False, True])
def test_attention_over_values_undoes_what_was_done_to_them_in_every_row(rotates: bool) -> None:
    """Decodes and prompts get it from different kernels: neither twice nor not at all."""
    shape = Shape(q_lens=(1, 1, 3, 20), seq_lens=(70, 5, 37, 20), group=2, v_offset=True)
    case = with_null_block(to_device(make_case(shape), DEVICE))
    assert case.layer.transform is not None
    case = replace(case, layer=replace(case.layer, transform=replace(case.layer.transform, rotates_v=rotates)))
    check(paged_attention(case.query, case.layer, case.meta, **case.options), definition(case), shape)


def test_no_query_is_lost_when_decodes_and_prompts_end_inside_a_tile() -> None:
    """Tiles are counted from row 0 of the batch: a grid counted from the first prompt may lack the last one's tile."""
    shape = Shape(q_lens=(1, 1, 1, 2, 5), seq_lens=(5, 6, 7, 6, 9))
    case = make_case(shape)
    config = PrefillConfig(rows=4, tile=16, num_warps=4, num_stages=2)
    check(run_prefill(case, config), definition(case)[case.meta.num_decodes :], shape)


def test_padded_rows_of_a_captured_batch_become_zeros() -> None:
    """A graph replays rows that hold no sequence: they must neither read the null block nor keep old memory."""
    case = make_case(Shape(q_lens=(1, 1, 1), seq_lens=(0, 20, 0), group=2))
    for programs in (1, 3):
        result = run_decode(case, DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=programs))
        assert (result[[0, 2]] == 0).all() and (result[1] != 0).any()


def test_more_programs_than_tiles_leave_idle_ones_unread() -> None:
    """A captured graph is sized for its longest sequence; the partial results of idle programs are uninitialised."""
    shape = Shape(q_lens=(1, 1), seq_lens=(17, 70), group=2)
    case = make_case(shape)
    for programs, least in ((40, 1), (40, 3), (80, 1)):  # from 64 on, a head's parts are joined in columns
        config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=programs, least=least)
        check(run_decode(case, config), definition(case), shape)


@pytest.mark.parametrize("programs", [3, 8, 20, 41])
@pytest.mark.parametrize(
    "seq_lens",
    [(77, 70, 80, 65), (77, 70, 80, 65, 0, 0), (77, 0, 80, 65, 70), (517, 0), (513, 560)],
    ids=["four of five tiles", "then padded rows", "a padded row between", "one", "33 and 35 tiles"],
)
@pytest.mark.parametrize("options", [{}, {"sinks": True, "window": 49}], ids=str)
def test_sequences_of_about_one_length_are_cut_alike(seq_lens: tuple[int, ...], programs: int, options: dict) -> None:
    """Each head in equal parts, or some whole heads for a program: no tile is lost between, and no part twice."""
    shape = Shape(q_lens=(1,) * len(seq_lens), seq_lens=seq_lens, group=2, head_dim=16, **options)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=programs, least=1)
    check(run_decode(case, config), definition(case), shape)


def test_more_sequences_than_are_looked_at_in_one_step() -> None:
    """Programs find their place among all sequences 256 at a time."""
    shape = Shape(q_lens=(1,) * 300, seq_lens=tuple(i % 37 for i in range(300)), kv_heads=1, head_dim=16)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=7)
    check(run_decode(case, config), definition(case), shape)


def test_the_range_of_queries_and_scales_does_not_overflow_fp16() -> None:
    """Codes are multiplied in fp16; queries of 1e6 and scales of 1e-6 or 1e3 must survive it."""
    for format, q_factor, v_factor in (
        (torch.int8, 1e6, 1e-4), (torch.int8, 1e-6, 3e4), (UINT4, 1e6, 1e-4), (UINT4, 1e-6, 1e4)
    ):  # fmt: skip
        shape = Shape(k_format=format, dtype=torch.bfloat16, group=2, scale=0.2 / q_factor, **DECODES)
        case = make_case(shape)
        assert not isinstance(case.layer.v, PlainPages)
        case.layer.v.scale.mul_(v_factor)
        case.query.mul_(q_factor)
        want = definition(case).float() / v_factor
        config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=3, least=1)
        check(run_decode(case, config).float() / v_factor, want, shape)
        check(run_prefill(replace(case, meta=replace(case.meta, num_decodes=0))).float() / v_factor, want, shape)


def test_pages_and_queries_may_be_strided_views() -> None:
    """The engine hands in slices of a fused projection; only the last dimension is contiguous."""
    shape = Shape(q_lens=(1, 1), seq_lens=(20, 33), group=2)
    case = make_case(shape)
    wide = torch.full((2, 9, 64), float("nan"))
    wide[:, 3:7] = case.query
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2)
    check(run_decode(replace(case, query=wide[:, 3:7]), config), definition(case), shape)
    assert empty_pages(2, 2, 16, 64, torch.float32).tensor.stride(0) > 2 * 16 * 64
