"""The CPU kernels of bf16 models against the plain-torch definition, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import Shape, empty_pages, make_case, with_null_block
from torch import Tensor

from hf_paged.kernels import fused_ops, reference, reference_fused
from hf_paged.kernels import paged_attention as dispatch
from hf_paged.kernels.cpu_launch import has_kernels
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import LayerKV, PlainPages
from hf_paged.kernels.reference_fused import RMSNorm, Rope

BF16 = torch.bfloat16
STEP = 2.0**-7  # from one bf16 to the next, at most, of its value: a rounding is half of it
EPS = 2.0**-24  # the rounding of fp32

if has_kernels(BF16):
    from hf_paged.kernels.cpu_few_rows import few_rows_linear, in_columns

pytestmark = pytest.mark.skipif(not has_kernels(BF16), reason="needs Numba and libgomp")


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def ends(exact: Tensor, slack: Tensor | float) -> tuple[Tensor, Tensor]:
    """What fp32 arithmetic may round to that misses fp64 results by `slack` at most: mostly two equal values."""
    return (exact - slack).to(BF16), (exact + slack).to(BF16)


def assert_between(result: Tensor, first: Tensor, last: Tensor) -> None:
    """Roundings are monotonous, so what lies between two values does so after each."""
    assert ((torch.minimum(first, last) <= result) & (result <= torch.maximum(first, last))).all()
    assert (first == last).float().mean() > 0.9  # or nothing was compared


def assert_normed(result: Tensor, x: Tensor, norm: RMSNorm) -> None:
    """The sum of n squares strays by n steps of fp32, its root by half of that; the rest are a few operations."""
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    weight = norm.weight.double() + norm.offset
    slack = (x.shape[-1] / 2 + 8) * EPS
    if norm.cast_first:
        assert_between(result, *(end * norm.weight for end in ends(exact, slack * exact.abs())))
    else:
        exact = exact * weight
        assert_between(result, *ends(exact, slack * exact.abs()))


@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize(("cast_first", "offset"), [(True, 0.0), (False, 0.0), (False, 1.0)])
def test_a_norm_and_its_residual_are_those_of_the_definition(rows: int, cast_first: bool, offset: float) -> None:
    norm = RMSNorm(weight=randn(72, seed=1), eps=1e-5, offset=offset, cast_first=cast_first)
    delta, residual = randn(1, rows, 72), 3 * randn(1, rows, 72, seed=2)
    total, normed = fused_ops.add_rms_norm(delta, residual, norm)
    assert torch.equal(total, reference_fused.add_rms_norm(delta, residual, norm, None)[0])
    assert normed is not None
    assert_normed(normed, total, norm)
    strided = randn(rows, 2 * 72)[:, :72]
    assert_normed(fused_ops.rms_norm(strided, norm), strided, norm)


@pytest.mark.parametrize("size", [1e-30, 1e17, 1e19, 3e38])
def test_a_norm_of_any_size_is_the_definitions(size: float) -> None:
    """The squares of the largest are infinite in fp32; the definition gives zeros then."""
    norm = RMSNorm(weight=randn(64, seed=1), eps=1e-5, offset=0.0, cast_first=True)
    x = torch.linspace(-1, 1, 64).mul(size).to(BF16)[None]
    result, expected = fused_ops.rms_norm(x, norm), reference_fused.rms_norm(x, norm)
    if expected.any():
        assert_normed(result, x, norm)
    else:
        assert not result.any()


def test_a_norm_keeps_nan_in_its_row() -> None:
    """A row that could not be stored must not come back as numbers, nor spoil the row beside it."""
    norm = RMSNorm(weight=randn(64, seed=1), eps=1e-5, offset=0.0, cast_first=True)
    x = randn(2, 64)
    x[0, 5] = float("nan")
    result = fused_ops.rms_norm(x, norm)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


def test_a_gated_activation_is_the_definitions_from_overflow_to_underflow() -> None:
    """e^x is off by two steps of fp32, and by the rounding of its argument: up to 88 of them. Beyond that it is inf."""
    gate = torch.cat((torch.linspace(-200, 200, 4001), torch.tensor([1e20, 3e38, -1e20, -3e38]))).to(BF16)
    rows = torch.stack((gate, randn(len(gate)))).view(1, 2, -1)
    gate, up = rows.reshape(1, -1).split(len(gate), -1)
    result = fused_ops.gated_activation(gate, up, "silu")
    x = gate.double()
    exact = x * x.sigmoid()
    assert_between(result[gate >= -87], *((end * up)[gate >= -87] for end in ends(exact, 96 * EPS * exact.abs())))
    assert (result[gate < -87].abs() <= 88 * torch.exp(torch.tensor(-87.0)) * up[gate < -87].abs()).all()


def rotated_ends(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Two products and their difference, three steps of fp32 of the larger one."""
    half, step = rope.rotary_dim // 2, rope.angle_step
    c, s = (table[:, None, : half * step : step].double() for table in (cos, sin))
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    exact = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
    slack = torch.cat(((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs(), 0 * rest), -1)
    return ends(exact, 3 * EPS * slack)


@pytest.mark.parametrize("rope", [Rope(rotary_dim=64), Rope(rotary_dim=32, angle_step=1), Rope(rotary_dim=0)])
def test_rotated_rows_are_stored_where_their_slots_say_and_nowhere_else(rope: Rope) -> None:
    tokens, heads, kv_heads, head_dim, block_size = 20, 6, 2, 64, 16
    query, key, value = randn(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], 1)
    angles = torch.randn(tokens, head_dim, generator=torch.Generator().manual_seed(3))
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(4))[:tokens] + block_size
    slots[3] = -1
    pages = [torch.zeros(6, 2 * kv_heads, block_size, head_dim, dtype=BF16) for _ in range(3)]
    layers = [LayerKV(k=PlainPages(data=x[:, :kv_heads]), v=PlainPages(data=x[:, kv_heads:])) for x in pages]
    result = fused_ops.rope_write(query, key, value, angles.cos(), angles.sin(), layers[0], slots, rope=rope)
    assert_between(result, *rotated_ends(query, angles.cos(), angles.sin(), rope))
    for layer, end in zip(layers[1:], rotated_ends(key, angles.cos(), angles.sin(), rope), strict=True):
        reference.write_kv(layer, end, value, slots)
    assert_between(*pages)


@pytest.mark.parametrize("formats", [(torch.int8, torch.int8), (torch.int8, BF16), (BF16, torch.int8)])
@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 48])
def test_codes_are_those_of_the_definition_to_the_bit(
    rotary_dim: int, transformed: bool, formats: tuple[torch.dtype, torch.dtype]
) -> None:
    """Of rows of all sizes that fp16 scales reach and some that they do not, of zeros, inf and NaN."""
    query, key, value = randn(60, 10, 64).split([6, 2, 2], 1)
    key = key * torch.logspace(-9, 8, 60)[:, None, None].to(BF16)
    value = value.clone()
    key[3], value[4], value[6, 1, 2], key[7] = 0.0, 0.0, float("nan"), float("inf")
    constants = [torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6, 7)]
    transform = KVTransform(
        k_offset=constants[0], k_factor=2.0 ** constants[1].round(), v_offset=constants[2], rotates_k=False,
        rotates_v=False,
    )  # fmt: skip
    angles = torch.randn(60, 64, generator=torch.Generator().manual_seed(3))
    slots, rope = torch.arange(60) + 16, Rope(rotary_dim=rotary_dim)

    def pages(k: torch.dtype, v: torch.dtype, transform: KVTransform | None = None) -> LayerKV:
        layer = LayerKV(k=empty_pages(6, 2, 16, 64, k), v=empty_pages(6, 2, 16, 64, v), transform=transform)
        for side in (layer.k, layer.v):
            for tensor in vars(side).values():
                tensor.zero_()
        return layer

    plain, layer, expected = pages(BF16, BF16), pages(*formats, transform if transformed else None), pages(*formats)
    found = [
        fused_ops.rope_write(query, key, value, angles.cos(), angles.sin(), where, slots, rope=rope)
        for where in (plain, layer)
    ]
    rotated = reference.gather_pages(plain.k, torch.tensor([[1, 2, 3, 4]]), BF16)[0, :, :60].transpose(0, 1)
    if transformed:
        reference.write_kv(expected, transform.stored_key(rotated), transform.stored_value(value), slots)
        assert torch.equal(found[1], transform.query(found[0]))
    else:
        reference.write_kv(expected, rotated, value, slots)
        assert torch.equal(found[1], found[0])
    for side, wanted in ((layer.k, expected.k), (layer.v, expected.v)):
        for name, tensor in vars(side).items():
            torch.testing.assert_close(tensor, getattr(wanted, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("v_head_dim", [64, 20])
def test_offsets_are_added_to_the_output_as_the_definition_does(v_head_dim: int) -> None:
    """One sum in fp32 and one rounding: to the bit. NaN stays in its row."""
    out, offset = randn(33, 6, v_head_dim), torch.randn(2, v_head_dim, generator=torch.Generator().manual_seed(1))
    out[4, 1, 3] = float("nan")
    keys = torch.ones(2, 64)
    transform = KVTransform(k_offset=keys, k_factor=keys, v_offset=offset, rotates_k=False, rotates_v=False)
    expected = transform.output(out)
    result = fused_ops.restore_output(out.clone(), transform)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("formats", [(BF16, BF16), (torch.int8, torch.int8), (torch.int8, BF16), (BF16, torch.int8)])
@pytest.mark.parametrize("window", [None, 5, 40, 1000])
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1, "group": 4}, {"head_dim": 80, "v_head_dim": 32}])
def test_decoding_from_pages_is_attention_of_the_definition(
    shape: dict, window: int | None, formats: tuple[torch.dtype, torch.dtype]
) -> None:
    """Rows of one key, of a full block, of many blocks; what pages hold past a row's end is never read."""
    lens = (1, 16, 17, 33, 130)
    case = make_case(
        Shape(
            q_lens=(1,) * 5, seq_lens=lens, window=window, dtype=BF16, k_format=formats[0], v_format=formats[1], **shape
        )
    )
    case = with_null_block(case)
    exact = replace(case, query=case.query.float())
    result = dispatch.paged_attention(case.query, case.layer, case.meta, **case.options)
    expected = reference.paged_attention(exact.query, case.layer, case.meta, **case.options)
    # fp32 sums in another order: 130 terms of 2^-24 at worst, of the largest value
    slack = 130 * 2.0**-24 * expected.abs().max()
    assert ((result.float() - expected).abs() <= STEP / 2 * expected.abs() + slack).all()


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 37])
@pytest.mark.parametrize("out_features", [16, 100, 700])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_few_rows_is_rounded_once(rows: int, out_features: int, biased: bool) -> None:
    """Rows and columns that fill no vector, more tasks than threads and fewer."""
    x, weight = randn(1, rows, 72), randn(out_features, 72, seed=1)
    bias = randn(out_features, seed=2) if biased else None
    result = few_rows_linear(x, in_columns(weight), out_features, bias)
    assert result.shape == (1, rows, out_features)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs()) + 4
    assert ((result.double() - exact).abs() <= STEP / 2 * exact.abs() + 73 * 2.0**-24 * magnitude).all()


def test_a_row_that_could_not_be_stored_is_nan_and_the_others_are_not() -> None:
    case = with_null_block(make_case(Shape(q_lens=(1, 1), seq_lens=(20, 33), dtype=BF16, k_format=torch.int8)))
    key = torch.zeros(1, 2, 64)
    key[0, 0, 0] = float("inf")
    reference.write_kv(case.layer, key, torch.zeros(1, 2, 64), case.meta.slot_mapping[:1])
    result = dispatch.paged_attention(case.query, case.layer, case.meta, **case.options)
    assert result[0, 0].isnan().all()
    assert result[0, 1].isfinite().all()
    assert result[1].isfinite().all()


def test_decodes_beside_prompts_give_the_bits_of_decodes_alone() -> None:
    """A token must not depend on whether a prompt came in during its step."""
    mixed = with_null_block(make_case(Shape(q_lens=(1, 1, 7), seq_lens=(20, 33, 7), dtype=BF16, k_format=BF16)))
    meta = replace(
        mixed.meta, seq_lens=mixed.meta.seq_lens[:2], block_tables=mixed.meta.block_tables[:2],
        cu_seqlens_q=mixed.meta.cu_seqlens_q[:3], slot_mapping=mixed.meta.slot_mapping[:2], derived={},
    )  # fmt: skip
    alone = dispatch.paged_attention(mixed.query[:2], mixed.layer, meta, **mixed.options)
    assert torch.equal(dispatch.paged_attention(mixed.query, mixed.layer, mixed.meta, **mixed.options)[:2], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_defaults_change_nothing(dtype: torch.dtype, device: str) -> None:
    """A scratch of the default dtype is half as long as the kernel writes; one on another device has no memory here."""
    lens = (1, 33, 130)
    shape = Shape(q_lens=(1,) * 3, seq_lens=lens, dtype=BF16, k_format=BF16, v_format=BF16)
    case = with_null_block(make_case(shape))
    norm = RMSNorm(weight=randn(72, seed=1), eps=1e-5, offset=0.0, cast_first=True)
    x, residual, columns = randn(3, 72), randn(3, 72, seed=2), in_columns(randn(40, 72, seed=3))

    def results() -> tuple[Tensor, ...]:
        attended = dispatch.paged_attention(case.query, case.layer, case.meta, **case.options)
        gated = fused_ops.gated_activation(x, residual, "silu")
        return (attended, gated, few_rows_linear(x, columns, 40, None), *fused_ops.add_rms_norm(x, residual, norm))

    expected = results()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        found = results()
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert all(map(torch.equal, found, expected))


def test_a_residual_of_another_dtype_is_the_definitions() -> None:
    norm = RMSNorm(weight=randn(72, seed=1), eps=1e-5, offset=0.0, cast_first=True)
    delta, residual = randn(3, 72), 3 * randn(3, 72, seed=2).float()
    found, expected = (
        add(delta, residual, norm, None) for add in (fused_ops.add_rms_norm, reference_fused.add_rms_norm)
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
