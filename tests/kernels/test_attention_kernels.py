"""The Triton attention kernels against the plain-torch definition, in the interpreter on a CPU and compiled on a GPU.

Outputs start as NaN and unused slots hold NaN, so a row not written or a slot wrongly read shows. The interpreter has
no bf16 dot: bf16 pages run on the GPU only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, Shape, definition, empty_pages, make_case, to_device, tolerance, with_null_block
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import decode_int4, decode_registers, prefill_workspace
from hf_paged.kernels.decode_attention import decode_attention
from hf_paged.kernels.decode_config import DecodeConfig, choose_config
from hf_paged.kernels.layout import (
    UINT4,
    AttentionMetadata,
    GroupPages,
    LayerKV,
    Pages,
    PlainPages,
    ScaledPages,
)
from hf_paged.kernels.paged_attention import paged_attention
from hf_paged.kernels.prefill_attention import prefill_attention
from hf_paged.kernels.prefill_config import PrefillConfig
from hf_paged.kernels.reference import dequantize, dequantize_groups, gather_pages
from hf_paged.kernels.reshape_and_cache import write_kv

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if CUDA else (0, 0)
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


def run_decode(case: Case, config: DecodeConfig | None = None) -> Tensor:
    case = to_device(case, DEVICE)
    out = case.query.new_full((*case.query.shape[:2], case.layer.v.head_dim), float("nan"))
    decode_attention(case.query, case.layer, case.meta, out, **case.options, config=config)
    return out.cpu()


def run_prefill(case: Case, config: PrefillConfig | None = None) -> Tensor:
    case = to_device(case, DEVICE)
    out = case.query.new_full((*case.query.shape[:2], case.layer.v.head_dim), float("nan"))
    prefill_attention(case.query, case.layer, case.meta, out, **case.options, config=config)
    return out.cpu()[case.meta.num_decodes :]


def check(result: Tensor, want: Tensor, shape: Shape) -> None:
    """Error against the format's step, and scale: a lost factor passes no tolerance by luck."""
    result, want = result.cpu(), want.cpu()
    torch.testing.assert_close(result.float(), want.float(), rtol=0, atol=tolerance(shape))
    assert result.float().norm() == pytest.approx(want.float().norm(), rel=2**-6)


def definition_of_mixed(case: Case) -> Tensor:
    """The definition, with keys and values rounded to the query's dtype where a workspace holds them: for prompts."""
    want = definition(case)
    if prefill_workspace.wanted(case.query, case.layer, case.meta):
        on_cpu = with_null_block(to_device(case, "cpu"))
        blocks = torch.arange(on_cpu.layer.k.tensor.shape[0])[:, None]
        values = [
            PlainPages(data=gather_pages(pages, blocks, torch.float32).to(case.query.dtype))
            for pages in (on_cpu.layer.k, on_cpu.layer.v)
        ]
        rounded = definition(replace(on_cpu, layer=LayerKV(k=values[0], v=values[1])))
        want[case.meta.num_decodes :] = rounded[case.meta.num_decodes :]
    return want


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


@pytest.mark.parametrize("whole", [False, True])
def test_more_sequences_than_are_looked_at_in_one_step(whole: bool) -> None:
    """Programs find their place among all sequences 256 at a time."""
    shape = Shape(q_lens=(1,) * 300, seq_lens=tuple(i % 37 for i in range(300)), kv_heads=1, head_dim=16)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=7, whole=whole)
    check(run_decode(case, config), definition(case), shape)


@pytest.mark.parametrize(
    "seq_lens", [(60, 0, 33, 70, 1), (20, 0, 16, 1, 500)], ids=["alike", "one ten times as long as the others"]
)
@pytest.mark.parametrize("options", [{}, {"sinks": True, "window": 40}, {"row_sinks": True}], ids=str)
def test_one_program_for_each_head_unless_a_sequence_stands_out(seq_lens: tuple[int, ...], options: dict) -> None:
    """Which of the two a launch does is known on the device only, to the kernel and to what joins its results."""
    shape = Shape(q_lens=(1,) * 5, seq_lens=seq_lens, group=2, head_dim=16, **options)
    case = make_case(shape)
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs=3, least=1, whole=True)
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


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 7, 300])
@pytest.mark.parametrize(
    ("head_dims", "group", "options"),
    [
        ((128, 128), 4, {}),
        ((64, 128), 12, {"softcap": 5.0}),
        ((128, 64), 1, {"window": 50}),
        ((128, 128), 7, {"window": 3, "sinks": True}),
        ((256, 256), 8, {"sinks": True}),
        ((64, 64), 8, {"row_sinks": True}),
        ((64, 64), 1, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_register_kernel_equals_the_definition(
    format: torch.dtype, head_dims: tuple[int, int], group: int, options: dict, programs: int
) -> None:
    """Its channel and token orders are index arithmetic that only a wrong result would reveal."""
    shape = Shape(
        q_lens=(1,) * 5,
        seq_lens=(1, 0, 37, 256, 333),
        group=group,
        head_dim=head_dims[0],
        v_head_dim=head_dims[1],
        block_size=32 if programs == 1 else 16,
        dtype=torch.bfloat16 if format == torch.bfloat16 else torch.float16,
        k_format=format,
        v_format=torch.int8 if format == torch.float8_e4m3fn and programs == 7 else format,
        **options,
    )
    case = make_case(shape)
    on_gpu = to_device(case, "cuda")
    assert decode_registers.fits(on_gpu.query, on_gpu.layer)
    default = choose_config(on_gpu.query, on_gpu.layer, 5, 333)
    check(run_decode(case, replace(default, programs=programs, least=1)), definition(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dims", "group", "options"),
    [
        ((128, 128), 4, {}),
        ((64, 128), 7, {"softcap": 5.0}),
        ((128, 64), 1, {"window": 50}),
        ((128, 128), 8, {"window": 3, "sinks": True}),
        ((64, 64), 2, {"sinks": True}),
        ((64, 64), 8, {"row_sinks": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("formats", "programs"),
    [
        ((UINT4, UINT4), 1),
        ((UINT4, UINT4), 300),
        ((torch.int8, UINT4), 7),
        ((torch.float8_e4m3fn, UINT4), 300),
        ((UINT4, torch.int8), 7),
        ((UINT4, torch.float8_e4m3fn), 1),
    ],
    ids=str,
)
def test_the_int4_register_kernel_equals_the_definition(
    formats: tuple[torch.dtype, torch.dtype], programs: int, head_dims: tuple[int, int], group: int, options: dict
) -> None:
    """A code, a scale or a zero that meets the wrong channel, group or token shows nowhere but in the result."""
    shape = Shape(
        q_lens=(1,) * 5,
        seq_lens=(1, 0, 37, 256, 333),
        group=group,
        head_dim=head_dims[0],
        v_head_dim=head_dims[1],
        block_size=32 if programs == 1 else 16,
        dtype=torch.bfloat16 if programs == 7 else torch.float16,
        k_format=formats[0],
        v_format=formats[1],
        **options,
    )
    case = make_case(shape)
    on_gpu = to_device(case, "cuda")
    assert decode_int4.fits(on_gpu.query, on_gpu.layer)
    default = choose_config(on_gpu.query, on_gpu.layer, 5, 333)
    check(run_decode(case, replace(default, programs=programs, least=1)), definition(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [90, 3000], ids=["alike", "one stands out"])
def test_many_heads_on_the_gpu_are_whole_or_shared(longest: int) -> None:
    """The launch of a large batch on 16-bit pages; one long sequence must not be one program's."""
    seq_lens = (longest, *(i % 91 for i in range(255)))
    shape = Shape(q_lens=(1,) * 256, seq_lens=seq_lens, kv_heads=8, group=2, head_dim=128, block_size=32)
    shape = replace(shape, k_format=torch.bfloat16, dtype=torch.bfloat16)
    case = to_device(make_case(shape), "cuda")
    config = DecodeConfig(tile=32, num_warps=2, programs=792, whole=True, overlap=CAPABILITY >= (9, 0))
    check(run_decode(case, config), definition(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 8, 16), (80, 7, 32), (96, 4, 128), (128, 1, 32), (128, 4, 16), (128, 8, 128), (256, 4, 32)],
)  # every value of each, not every combination: compiling is what costs
@pytest.mark.parametrize("format", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, UINT4, torch.float32])
def test_mixed_batches_on_the_gpu(format: torch.dtype, group: int, head_dim: int, block_size: int) -> None:
    """The launch choices of every shape that models use, decodes and prefills in one call."""
    shape = Shape(
        q_lens=(1, 1, 1, 1, 300, 129, 1, 2),
        seq_lens=(1, 1000, 0, 257, 300, 700, 64, 65),
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        k_format=format,
        dtype=torch.float32 if format == torch.float32 else torch.bfloat16,
    )
    case = to_device(make_case(shape), "cuda")
    check(paged_attention(case.query, case.layer, case.meta, **case.options), definition_of_mixed(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": 100}, {"window": 5000}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(
    ("format", "dims"), [(torch.bfloat16, (192, 128)), (torch.int8, (128, 128)), (UINT4, (128, 128))], ids=str
)
def test_features_on_the_gpu(dims: tuple[int, int], format: torch.dtype, options: dict) -> None:
    shape = Shape(
        q_lens=(1, 1, 1, 400, 129),
        seq_lens=(3000, 90, 257, 400, 1700),
        group=4,
        head_dim=dims[0],
        v_head_dim=dims[1],
        block_size=32,
        k_format=format,
        dtype=torch.bfloat16,
        **options,
    )
    case = to_device(make_case(shape), "cuda")
    check(paged_attention(case.query, case.layer, case.meta, **case.options), definition_of_mixed(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [torch.bfloat16, torch.int8, UINT4])
def test_a_captured_decode_serves_every_length_up_to_its_bound(format: torch.dtype) -> None:
    shape = Shape(q_lens=(1,) * 4, seq_lens=(2000, 1, 333, 1024), group=4, head_dim=128, block_size=32, k_format=format)
    shape = replace(shape, dtype=torch.bfloat16)
    case = to_device(make_case(shape), "cuda")
    meta = replace(case.meta, max_seq_len=4096)
    paged_attention(case.query, case.layer, meta, **case.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(case.query, case.layer, meta, **case.options)
    for lens in ((2000, 1, 333, 1024), (5, 0, 32, 1000), (0, 0, 0, 0), (1999, 1, 1, 31)):
        meta.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        check(out, definition(case), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [torch.bfloat16, torch.int8, UINT4])
def test_pages_beyond_2_to_31_elements_are_addressed_in_64_bits(format: torch.dtype) -> None:
    """int32 offsets wrap beyond 2 GiB of pages; the same sequence in low blocks is the control."""
    stride, kv_heads, block_size, head_dim = 1 << 27, 2, 32, 128
    width = head_dim // 2 if format == UINT4 else head_dim
    dtype = torch.uint8 if format == UINT4 else format
    storage = torch.empty(19 * stride + kv_heads * block_size * width, dtype=dtype, device="cuda")  # 2.5e9 elements
    data = storage.as_strided((20, kv_heads, block_size, width), (stride, block_size * width, width, 1))
    small = make_case(Shape(q_lens=(1, 1), seq_lens=(64, 64), head_dim=head_dim, block_size=block_size))
    scale = torch.zeros(20, kv_heads, block_size, 2, 2, dtype=torch.float16, device="cuda")
    pages: Pages = PlainPages(data=data)
    if format == torch.int8:
        pages = ScaledPages(codes=data, scale=scale[..., 0, 0].contiguous())
    elif format == UINT4:
        pages = GroupPages(codes=data, scale=scale)
    layer = LayerKV(k=pages, v=pages)
    tables = torch.tensor([[1, 2], [18, 19]], dtype=torch.int32, device="cuda")
    rows = torch.randn(64, kv_heads, head_dim, device="cuda")
    slots = (tables.long()[:, :, None] * block_size + torch.arange(block_size, device="cuda")).flatten(1)
    query = small.query[:1].cuda().to(torch.bfloat16)
    for row in slots:
        write_kv(layer, rows, rows, row)
    for q_lens, num_decodes in (((1, 1), 2), ((2, 2), 0)):
        meta = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *q_lens], device="cuda").cumsum(0).to(torch.int32),
            seq_lens=torch.tensor([64, 64], dtype=torch.int32, device="cuda"),
            block_tables=tables,
            slot_mapping=slots.flatten()[: sum(q_lens)],
            num_decodes=num_decodes,
            max_seqlen_q=q_lens[0],
            max_seq_len=64,
        )
        result = paged_attention(query.expand(sum(q_lens), -1, -1), layer, meta, scale=0.1)
        low, high = result.chunk(2)
        assert torch.equal(low, high)
        plain = torch.softmax(query[0, :1].float() @ reference_keys(pages, 1, 2).T * 0.1, -1) @ reference_keys(
            pages, 1, 2
        )
        # values stay below 4 or so; probabilities and the output are rounded to bf16, half a step of 2^-8 each
        torch.testing.assert_close(low[-1, :1].float(), plain, rtol=0, atol=4 * 2**-8)


def reference_keys(pages: Pages, *blocks: int) -> Tensor:
    """Stored values of KV head 0 in `blocks`, fp32."""
    rows = torch.cat([pages.tensor[b, 0] for b in blocks])
    if isinstance(pages, PlainPages):
        return rows.float()
    scale = torch.cat([pages.scale[b, 0] for b in blocks])
    return dequantize_groups(rows, scale) if isinstance(pages, GroupPages) else dequantize(rows, scale)


def test_pages_and_queries_may_be_strided_views() -> None:
    """The engine hands in slices of a fused projection; only the last dimension is contiguous."""
    shape = Shape(q_lens=(1, 1), seq_lens=(20, 33), group=2)
    case = make_case(shape)
    wide = torch.full((2, 9, 64), float("nan"))
    wide[:, 3:7] = case.query
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2)
    check(run_decode(replace(case, query=wide[:, 3:7]), config), definition(case), shape)
    assert empty_pages(2, 2, 16, 64, torch.float32).tensor.stride(0) > 2 * 16 * 64
