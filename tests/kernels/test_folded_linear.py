"""Products that take in the norms, the residual add and the activation around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.cuda_kernel import compile_cubin, nvrtc
from hf_paged.kernels.folded_linear import (
    OpenNorm,
    folded_linear,
    folded_linear_reference,
    folded_sum,
    folded_sum_reference,
    open_norm_reference,
)
from hf_paged.kernels.fused_ops import interleave
from hf_paged.kernels.interleaved_rows import TOGETHER, InterleavedRows
from hf_paged.kernels.packed_linear import lock_count
from hf_paged.kernels.packed_weight import PackedWeight, packed_linear_reference, packed_shape
from hf_paged.kernels.reference_fused import RMSNorm, gated_activation, rms_norm
from hf_paged.kernels.w4a16_hopper import Ends, Variant, source
from hf_paged.kernels.w4a16_hopper_tiles import SHAPES, FewShape
from hf_paged.quant.joined_packed import inverse

STEP = 2**-7  # of bf16: a result is rounded once or twice, each half a step of it

ENDS = (
    Ends(normed=True, eps=1e-6),
    Ends(normed=True, eps=1e-6, gated=True),
    Ends(adds=1),
    Ends(adds=2, offset=1.0),
    Ends(normed=True, eps=1e-6, gated=True, ordered=True),
    Ends(adds=2, ordered=True),
)
NAN = float("nan")


def random_weight(n: int, k: int, *, group: int = 128, zeros: bool = False, device: str = "cpu") -> PackedWeight:
    generator = torch.Generator().manual_seed(n + k)
    words = torch.randint(-(1 << 31), 1 << 31, packed_shape(k, n, 4), generator=generator, dtype=torch.int32)
    groups = -(-k // group)
    return PackedWeight(
        packed=words.to(device),
        scales=((torch.rand(groups, n, generator=generator) + 0.5) / (4 * k**0.5)).to(device, torch.float16),
        zeros=torch.randint(0, 16, (groups, n), generator=generator, dtype=torch.uint8).to(device) if zeros else None,
        perm=None,
        field_bits=4,
        code_bits=4,
        group_size=group,
        in_features=k,
        out_features=n,
    )


def rows(m: int, k: int, device: str = "cpu") -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(device, torch.bfloat16)


def random_norm(n: int, device: str = "cpu", offset: float = 0.0) -> RMSNorm:
    return RMSNorm(weight=rows(1, n, device)[0] * 0.1 + (1 - offset), eps=1e-5, offset=offset, cast_first=not offset)


def assert_close(actual: Tensor, expected: Tensor, steps: float = 1) -> None:
    """The largest error in steps of the largest value."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert float((actual.double() - expected.double()).abs().max()) <= steps * STEP * float(expected.abs().max())


def plain(x: Tensor | InterleavedRows) -> Tensor:
    return x.rows if isinstance(x, InterleavedRows) else x


def poisoned(x: InterleavedRows) -> InterleavedRows:
    """With what stands for tokens that there are not, as memory may hold it."""
    data = x.data.clone()
    data[-1, :, (x.tokens - 1) % TOGETHER + 1 :] = NAN
    return InterleavedRows(data=data, tokens=x.tokens)


def assert_same_norm(actual: OpenNorm | None, expected: OpenNorm | None) -> None:
    assert actual is not None and expected is not None and actual.eps == expected.eps
    assert_close(plain(actual.rows), plain(expected.rows))
    torch.testing.assert_close(actual.factors, expected.factors, rtol=STEP, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_that_is_left_open_is_the_norm_once_a_product_has_read_it(offset: float) -> None:
    """By the definitions: Llama's norm and Gemma's, hidden states from tiny to large."""
    weight, norm = random_weight(192, 256), random_norm(256, offset=offset)
    hidden = rows(5, 256) * torch.tensor([[1e-3], [0.1], [1.0], [30.0], [1e3]]).bfloat16()
    for row in hidden.split(1):
        actual = folded_linear_reference(open_norm_reference(row, norm), weight, None)
        assert_close(actual, packed_linear_reference(rms_norm(row, norm), weight, None), 2)


def test_what_is_folded_is_what_small_kernels_would_have_computed() -> None:
    weight, x, residual, norm = random_weight(256, 256), rows(3, 256), rows(3, 256) * 4, random_norm(256)
    total, open_norm = folded_sum_reference(x, weight, None, residual, norm)
    assert torch.equal(total, residual + packed_linear_reference(x, weight, None))
    assert open_norm is not None
    gated = folded_linear_reference(open_norm, weight, None, gated=True)
    gate, up = packed_linear_reference(rms_norm(total, norm), weight, None).chunk(2, -1)
    assert_close(gated, gated_activation(gate, up, "silu", None), 4)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_every_end_compiles_for_every_tile_and_leaves_room_for_as_many_programs(ends: Ends) -> None:
    """Here, without a GPU."""
    try:
        nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    for shape in SHAPES:
        if not isinstance(shape, FewShape) or (ends.gated and not shape.tiles.pairs):
            continue
        tiles = replace(shape.tiles, cluster=8 if shape.clustered else 1)
        variant = Variant(tiles=tiles, half=False, ends=ends, interleaved=ends.ordered)
        assert (variant.shared_bytes + 1024) * tiles.resident <= 228 * 1024
        assert compile_cubin(source(variant), "w4a16_hopper", "sm_90a")


CASES = [
    # outputs of a half or in all, channels, group, zeros: clusters, splits, whole tiles; ragged tiles
    (4096, 4096, 128, False),
    (5120, 13824, 128, False),
    (1088, 1024, 128, True),
    (576, 1536, 32, True),
    (14336, 4096, 128, False),
]


@pytest.mark.parametrize("tokens", [1, 8, 11, 16])
def test_interleaved_rows_are_the_rows_with_each_channel_at_its_place(tokens: int) -> None:
    x, order = rows(tokens, 96), torch.randperm(96, generator=torch.Generator().manual_seed(0))
    interleaved = InterleavedRows.of(x, inverse(order))
    assert interleaved.shape == x.shape and torch.equal(interleaved.rows, x[:, order])
    assert torch.equal(interleaved.data[0, 5, : min(tokens, 8)], x[:8, order[5]])
    assert torch.equal(InterleavedRows.of(x).rows, x)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_norm_left_open_in_an_order_is_read_by_a_weight_in_that_order(tokens: int) -> None:
    """By the definitions: the product is that of the natural order."""
    weight, norm, hidden = random_weight(192, 256), random_norm(256), rows(tokens, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ordered = replace(norm, order=order, places=inverse(order))
    actual = folded_linear_reference(open_norm_reference(hidden, ordered), weight, None)
    assert_close(plain(actual), packed_linear_reference(rms_norm(hidden, ordered), weight, None), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, 17))
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (5120, 13824), (1088, 1024)])
def test_interleaved_rows_are_read_as_if_they_were_not(n: int, k: int, m: int) -> None:
    """The very bits, and nothing of tokens that there are not."""
    weight, both = random_weight(n, k, device="cuda"), random_weight(2 * n, k, device="cuda")
    locks = torch.zeros(lock_count(2 * n), dtype=torch.int32, device="cuda")
    x, residual, norm = rows(m, k, "cuda"), rows(m, n, "cuda"), random_norm(n, "cuda")
    order = torch.randperm(k, generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    interleaved = interleave(x, inverse(order))
    assert torch.equal(interleaved.rows, x[:, order])
    expected = folded_sum(x[:, order], weight, None, locks, residual, norm)
    actual = folded_sum(poisoned(interleaved), replace(weight, perm=order), None, locks, residual, norm)
    assert torch.equal(actual[0], expected[0]) and actual[1] is not None and expected[1] is not None
    assert torch.equal(plain(actual[1].rows), plain(expected[1].rows))
    open_norm = open_norm_reference(x, random_norm(k, "cuda"))
    other = replace(open_norm, rows=poisoned(InterleavedRows.of(plain(open_norm.rows))))
    for gated in (False, True):
        expected_linear = folded_linear(open_norm, both, None, locks, gated=gated)
        assert torch.equal(plain(folded_linear(other, both, None, locks, gated=gated)), plain(expected_linear))


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, 17))
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (5120, 13824), (1088, 1024)])
def test_channels_come_to_lie_as_the_product_behind_reads_them(n: int, k: int, m: int) -> None:
    """Act-order: the same values, each at its place."""
    weight, both = random_weight(n, k, device="cuda"), random_weight(2 * n, k, device="cuda")
    locks = torch.zeros(lock_count(2 * n), dtype=torch.int32, device="cuda")
    x, residual, norm = rows(m, k, "cuda"), rows(m, n, "cuda"), random_norm(n, "cuda")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    ordered = replace(norm, order=order, places=inverse(order))
    total, open_norm = folded_sum(x, weight, None, locks, residual, norm)
    same, other = folded_sum(x, weight, None, locks, residual, ordered)
    assert open_norm is not None and other is not None
    assert torch.equal(same, total) and torch.equal(other.squares, open_norm.squares)
    assert torch.equal(plain(other.rows), plain(open_norm.rows)[:, order])
    assert_same_norm(other, folded_sum_reference(x, weight, None, residual, ordered)[1])
    before = open_norm_reference(x, random_norm(k, "cuda"))
    gated = folded_linear(before, both, None, locks, gated=True)
    placed = folded_linear(before, both, None, locks, gated=True, places=ordered.places)
    assert torch.equal(plain(placed), plain(gated)[:, order])
    expected = folded_linear_reference(before, both, None, gated=True, places=ordered.places)
    assert_close(plain(placed), plain(expected), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 11, 16])
@pytest.mark.parametrize(("n", "k", "group", "zeros"), CASES)
def test_folded_products_equal_their_definitions_again_and_again(
    n: int, k: int, group: int, zeros: bool, m: int
) -> None:
    """Locks are left zero, and nothing depends on which program comes last."""
    weight = random_weight(n, k, group=group, zeros=zeros, device="cuda")
    both = random_weight(2 * n, k, group=group, zeros=zeros, device="cuda")
    locks = torch.zeros(lock_count(2 * n), dtype=torch.int32, device="cuda")
    x, residual, bias = rows(m, k, "cuda"), rows(m, n, "cuda"), rows(1, n, "cuda")[0]
    norm, open_norm = random_norm(n, "cuda", 1.0), open_norm_reference(rows(m, k, "cuda") * 3, random_norm(k, "cuda"))
    total, following = folded_sum_reference(x, weight, None, residual, norm)
    gated = folded_linear_reference(open_norm, both, None, gated=True)
    plain = folded_linear_reference(open_norm, weight, bias)
    first: list[Tensor] = []
    for _ in range(4):
        results = folded_sum(x, weight, None, locks, residual, norm)
        assert_close(results[0], total)
        assert_same_norm(results[1], following)
        last = folded_sum(x, weight, None, locks, residual, None)
        assert last[1] is None and torch.equal(last[0], results[0])
        halves = folded_linear(open_norm, both, None, locks, gated=True)
        assert_close(halves, gated, 4)
        assert_close(folded_linear(open_norm, weight, bias, locks), plain)
        first = first or [results[0], halves]
        assert torch.equal(results[0], first[0]) and torch.equal(halves, first[1])
    assert not locks.any()
