"""The fused quantize-and-write kernel against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import empty_pages
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import reference, write_kernel
from hf_paged.kernels.layout import UINT4, LayerKV, Pages, PlainPages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(pages: Pages) -> Pages:
    if isinstance(pages, PlainPages):
        return PlainPages(data=pages.data.to(DEVICE))
    return type(pages)(codes=pages.codes.to(DEVICE), scale=pages.scale.to(DEVICE))


def bits(x: Tensor) -> Tensor:
    if x.dtype == torch.uint8:
        return x.to(torch.int32).cpu()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(x.float().isnan(), -1, x.view(width).to(torch.int32)).cpu()


def check(key: Tensor, value: Tensor, k_format: torch.dtype, v_format: torch.dtype, block_size: int) -> None:
    tokens, kv_heads = key.shape[:2]
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(0))[:tokens] + block_size
    slots[tokens // 2] = -1

    def layer() -> LayerKV:
        k = empty_pages(5, kv_heads, block_size, key.shape[2], k_format)
        return LayerKV(k=on_device(k), v=on_device(empty_pages(5, kv_heads, block_size, value.shape[2], v_format)))

    expected, result = layer(), layer()
    reference.write_kv(expected, key, value, slots.to(key.device))
    write_kernel.write_kv(result, key, value, slots.to(key.device))
    for a, b in ((expected.k, result.k), (expected.v, result.v)):
        assert torch.equal(bits(a.tensor), bits(b.tensor))
        if not isinstance(a, PlainPages):
            assert torch.equal(bits(a.scale), bits(b.scale))


def rows(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows over 18 decades, with zeros, an outlier, inf, NaN and one too large for its scale."""
    x = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-9, 4, tokens)[:, None, None]
    x[1] = 0
    x[2, 0, 3] *= 1000
    x[3, -1, 0] = float("nan")
    x[4, 0, -1] = float("-inf")
    x[5] = x[5].clamp(min=0)
    x[6] = torch.arange(dim) % 127 + 0.5  # ties: half to even
    x[6, :, 0] = 127
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (80, 32), (128, 96)])
def test_int8_codes_and_scales_equal_the_definition(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """A kernel that rounds otherwise than the CPU path would make results depend on the device."""
    check(rows(23, 3, dim, dtype), rows(23, 3, v_dim, dtype), torch.int8, torch.int8, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 32), (80, 128), (128, 96), (192, 256)])
def test_int4_codes_scales_and_zeros_equal_the_definition(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """Minima on either side of zero, groups of one value, halves of a byte and rows beyond fp16 have their traps."""
    check(int4_rows(dim, dtype), int4_rows(v_dim, dtype), UINT4, UINT4, 16)


def int4_rows(dim: int, dtype: torch.dtype) -> Tensor:
    x = rows(24, 3, dim, torch.float32)
    x[7] = x[7].abs() + 100  # a positive zero, to be rounded down towards 0
    x[8] = -3.3
    x[9, 0, 0] = 65519.0  # rounds into the range of fp16, but lies beyond it
    x[10] = torch.where(torch.arange(dim, device=DEVICE) % 2 == 0, 0.0, -0.0)
    x[11] = torch.arange(dim, device=DEVICE) % 31 / 2  # steps of one half: ties
    x[12, 0, : dim // 2] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("format", [torch.float32, torch.int8])
def test_int4_shares_a_launch_with_every_other_format(format: torch.dtype) -> None:
    check(rows(23, 2, 64, torch.float32), rows(23, 2, 80, torch.float32), format, UINT4, 32)
    check(rows(23, 2, 80, torch.float32), rows(23, 2, 64, torch.float32), UINT4, format, 32)


@pytest.mark.parametrize("format", [torch.float32, torch.float16])
def test_plain_and_quantized_pages_share_a_launch(format: torch.dtype) -> None:
    check(rows(23, 2, 64, torch.float32), rows(23, 2, 80, torch.float32), format, torch.int8, 32)


def test_strided_inputs_are_read_by_their_strides() -> None:
    """Fused projections hand in slices and transposes; a copy per layer would cost more than the write."""
    packed = rows(23, 9, 64, torch.float32)
    check(packed[:, 2:5], packed.transpose(1, 2).contiguous().transpose(1, 2)[:, 6:9], torch.int8, torch.int8, 16)


def test_fp8_rows_that_are_exact_in_e4m3_are_stored_exactly() -> None:
    """Triton's interpreter loses the carry when it rounds to e4m3, so on a CPU only exact rows can be compared."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite() & (codes != 0)][:252].view(4, 1, 63)
    codes[..., 0] = 448
    x = (codes * torch.tensor([2.0**-9, 1.0, 0.375, 100.0])[:, None, None]).to(DEVICE)
    check(x, x, torch.float8_e4m3fn, torch.float8_e4m3fn, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k_format", [torch.float8_e4m3fn, torch.bfloat16, torch.int8, UINT4])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 192, 256])
def test_every_format_and_head_dim_on_the_gpu(dim: int, k_format: torch.dtype, dtype: torch.dtype) -> None:
    if dtype == torch.float16:  # its largest rows are the whole range
        check(rows(300, 8, dim, dtype), rows(300, 8, 64, dtype), k_format, torch.float8_e4m3fn, 128)
    else:
        check(rows(300, 8, dim, dtype) * 1e4, rows(300, 8, 64, dtype), k_format, torch.float8_e4m3fn, 128)


def test_no_tokens_is_no_launch() -> None:
    check(
        rows(23, 2, 64, torch.float32)[:0].new_zeros(1, 2, 64),
        torch.zeros(1, 2, 64, device=DEVICE),
        torch.int8,
        torch.int8,
        16,
    )
    layer = LayerKV(
        k=on_device(empty_pages(2, 2, 16, 64, torch.int8)), v=on_device(empty_pages(2, 2, 16, 64, torch.int8))
    )
    nothing = torch.empty(0, 2, 64, device=DEVICE)
    write_kernel.write_kv(layer, nothing, nothing, torch.empty(0, dtype=torch.int64, device=DEVICE))
