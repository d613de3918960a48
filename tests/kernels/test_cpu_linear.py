"""bf16 products on a CPU, in the order of oneDNN and in fp32, against `torch.nn.functional.linear` in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import MANY_ROWS, ReorderedWeight, can_reorder, widened_linear

needs_onednn = pytest.mark.skipif(
    not can_reorder(torch.zeros(32, 64, dtype=torch.bfloat16)), reason="oneDNN has no bf16 products here"
)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def reordered(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ReorderedWeight(weight).linear(x, bias)


def assert_rounded_once(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Products of 16-bit numbers are exact in fp32; k sums of them stray by k rounding steps at most, then one of 16
    bits.
    """
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = torch.nn.functional.linear(x.double().abs(), weight.double().abs()) + 1
    actual = product(x, weight, bias)
    assert actual.shape == exact.shape and actual.dtype == x.dtype
    step = torch.finfo(x.dtype).eps
    tolerance = step / 2 * exact.abs() * (1 + step) + weight.shape[1] * 2.0**-24 * magnitude
    assert ((actual.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("product", [pytest.param(reordered, marks=needs_onednn), widened_linear])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "n"), [((1, 1, 576), 960), ((1, 16, 300), 50), ((7, 260), 33), ((2, 99, 64), 96)])
def test_any_shape_is_the_linear_rounded_once(product: Product, shape: tuple[int, ...], n: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(*shape, generator=generator).bfloat16()
    weight = torch.randn(n, shape[-1], generator=generator).bfloat16()
    added = torch.randn(n, generator=generator).bfloat16() if bias else None
    assert_rounded_once(product, x, weight, added)


def test_a_weight_is_widened_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole weight of a 7B model is 180 MB in fp32; the last piece is shorter than the others."""
    monkeypatch.setattr(cpu_linear, "_PIECE", 64 * 7)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).bfloat16() for s in ((9, 64), (33, 64), (33,)))
    assert_rounded_once(widened_linear, x, weight, bias)


def test_torch_still_takes_weights_in_the_order_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are torch's own, not its public API: when they go, steps would silently slow down by a third."""
    found = torch.cpu.get_capabilities()
    if not (found.get("avx512_bf16") or found.get("amx_bf16")) or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 instructions that oneDNN uses")
    monkeypatch.setattr(cpu_linear, "_own_kernel", lambda: False)  # as without Numba
    assert can_reorder(torch.zeros(32, 64, dtype=torch.bfloat16))
    copy = ReorderedWeight(torch.eye(64, dtype=torch.bfloat16))
    assert copy._copy.is_mkldnn and copy._copy.dtype == torch.bfloat16
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(copy.linear(x, None), x)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(32, 64),
        torch.zeros(32, 64, dtype=torch.float16),
        torch.zeros(64, 32, dtype=torch.bfloat16).t(),
        torch.zeros(32, 66, dtype=torch.bfloat16),
        torch.zeros(32 * 64 + 1, dtype=torch.bfloat16)[1:].view(32, 64),
    ],
    ids=["fp32", "fp16", "transposed", "odd words", "between words"],
)
def test_weights_that_gain_nothing_or_have_no_sums_stay_as_they_are(weight: Tensor) -> None:
    assert not can_reorder(weight)


@needs_onednn
@pytest.mark.parametrize("shape", [(48, 64), (96, 768)], ids=["one stretch", "two and a rest"])
def test_a_copy_follows_every_write_in_place(shape: tuple[int, int]) -> None:
    """Versions do not tell a write through `.data`; sums of rows or of columns would not tell what changed places."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
    x = torch.randn(5, shape[1], generator=generator).bfloat16()
    copy = ReorderedWeight(weight)
    assert not copy.refresh()

    def swap_rows(values: Tensor) -> None:
        values[[3, 40]] = values[[40, 3]]

    def swap_heads(values: Tensor) -> None:
        values.copy_(values.roll(32, 1))

    writes = (Tensor.neg_, swap_rows, swap_heads, lambda values: values[7, 9:10].add_(1))
    for write in (*writes, lambda values: values[-1, -1:].add_(1)):
        write(weight.data)
        assert copy.refresh() and not copy.refresh()
        assert torch.equal(copy.linear(x, None), ReorderedWeight(weight.detach().clone()).linear(x, None))


@pytest.mark.parametrize(
    ("found", "pays"),
    [
        ({"avx2": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, True),
        ({"avx2": True, "avx512_bf16": False, "cpu_name": "AMD Ryzen"}, True),
        ({"avx2": True, "avx512_bf16": True, "cpu_name": "AMD EPYC"}, False),
        ({"avx2": True, "avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, False),
        ({"architecture": "aarch64", "bf16": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_cpu_whose_bf16_products_are_faster_keeps_them(
    found: dict[str, object], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX they are many times as fast: widening would cost more than it saves elsewhere."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert cpu_linear.widening_pays() == pays


@needs_onednn
def test_operands_of_another_dtype_are_torchs_to_refuse() -> None:
    """Read as bf16, the bits of an fp32 row or bias are numbers of any size."""
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    x, bias = torch.ones(3, 64), torch.ones(32)
    for operands in ((x, None), (x.bfloat16(), bias)):
        with pytest.raises(RuntimeError, match="dtype"):
            cpu_linear.cpu_linear(operands[0], weight, operands[1], ReorderedWeight(weight))


@needs_onednn
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rows", [MANY_ROWS - 1, MANY_ROWS])
def test_the_number_of_rows_picks_the_product(
    rows: int, own: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel widens the rows for every thread: it is for few of them, on whatever CPU."""
    monkeypatch.setattr(cpu_linear, "widening_pays", lambda: pays)
    x, weight = torch.ones(1, rows, 64, dtype=torch.bfloat16), torch.ones(32, 64, dtype=torch.bfloat16)
    taken: list[str] = []
    monkeypatch.setattr(cpu_linear, "widened_linear", lambda *args: taken.append("widened"))
    monkeypatch.setattr(ReorderedWeight, "linear", lambda *args: taken.append("reordered"))
    copy = ReorderedWeight(weight)
    copy.for_few_rows = own
    cpu_linear.cpu_linear(x, weight, None, copy)
    if rows < MANY_ROWS or not (pays or own):
        assert taken == ["reordered"]
    else:
        assert taken == (["widened"] if pays else [])
    del taken[:]
    assert cpu_linear.cpu_linear(x.float(), weight.float(), None).dtype == torch.float32 and not taken
