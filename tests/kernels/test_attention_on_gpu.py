"""The attention kernels compiled on a GPU: register kernels, launch choices of real shapes, graphs, large pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Shape, definition, make_case, to_device
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from attention_checks import check, definition_of_mixed, run_decode

from hf_paged.kernels import decode_int4, decode_registers
from hf_paged.kernels.decode_config import choose_config
from hf_paged.kernels.layout import UINT4, AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages, ScaledPages
from hf_paged.kernels.paged_attention import paged_attention
from hf_paged.kernels.reference import dequantize, dequantize_groups
from hf_paged.kernels.reshape_and_cache import write_kv

pytestmark = pytest.mark.gpu


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
        ((64, 64), 1, {"v_offset": True}),
        ((128, 256), 4, {"v_offset": True}),
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


@pytest.mark.parametrize(
    ("head_dims", "group", "options"),
    [
        ((128, 128), 4, {"v_offset": True}),
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


@pytest.mark.parametrize("lengths", ["of one length", "ragged"])
@pytest.mark.parametrize("format", [torch.bfloat16, torch.int8, UINT4])
def test_many_heads_on_the_gpu(format: torch.dtype, lengths: str) -> None:
    """More heads than programs: some take two, the others nothing, or all an equal share."""
    seq_lens = (90,) * 250 + (0,) * 6 if lengths == "of one length" else (3000, *(i % 91 for i in range(255)))
    shape = Shape(q_lens=(1,) * 256, seq_lens=seq_lens, kv_heads=8, group=2, head_dim=128, block_size=32)
    shape = replace(shape, k_format=format, dtype=torch.bfloat16)
    case = to_device(make_case(shape), "cuda")
    check(run_decode(case), definition(case), shape)


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
