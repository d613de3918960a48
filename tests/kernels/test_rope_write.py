"""Norm, rotation, quantization and page write in one kernel, against the same steps one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_cases import empty_pages
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import reference, reference_fused
from hf_paged.kernels.layout import LayerKV, Pages, PlainPages, ScaledPages
from hf_paged.kernels.reference_fused import RMSNorm, Rope
from hf_paged.kernels.rope_write import rope_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16
FULL = Rope(rotary_dim=64)


@dataclass(frozen=True, kw_only=True)
class Shape:
    head_dim: int = 64
    v_head_dim: int | None = None
    q_heads: int = 4
    kv_heads: int = 2
    rope: Rope = FULL
    columns: int = 64  # of cos and sin
    norm: tuple[float, bool] | None = None
    dtype: torch.dtype = torch.float32
    tokens: int = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """Parts of one joined projection, angles, slots (one -1), norms."""

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rope: Rope

    def write(self, k_format: torch.dtype, v_format: torch.dtype) -> tuple[Tensor, LayerKV]:
        num_blocks = len(self.slots) // BLOCK_SIZE + 3
        pages = [
            on_device(empty_pages(num_blocks, x.shape[1], BLOCK_SIZE, x.shape[2], form))
            for x, form in ((self.key, k_format), (self.value, v_format))
        ]
        layer = LayerKV(k=pages[0], v=pages[1])
        query = rope_write(
            self.query, self.key, self.value, self.cos, self.sin, layer, self.slots,
            rope=self.rope, q_norm=self.q_norm, k_norm=self.k_norm,
        )  # fmt: skip
        return query, layer

    def expected(self) -> tuple[Tensor, Tensor]:
        """Rotated query and key, in fp64 but for the roundings that the model makes."""
        query, key = self.query, self.key
        if self.q_norm is not None and self.k_norm is not None:
            query, key = reference_fused.rms_norm(query, self.q_norm), reference_fused.rms_norm(key, self.k_norm)
        rotated = [reference_fused.rotate(x.double(), self.cos, self.sin, self.rope) for x in (query, key)]
        return rotated[0], rotated[1]


def on_device(pages: Pages) -> Pages:
    if isinstance(pages, PlainPages):
        return PlainPages(data=pages.data.to(DEVICE))
    return ScaledPages(codes=pages.codes.to(DEVICE), scale=pages.scale.to(DEVICE))


def make(shape: Shape) -> Case:
    generator = torch.Generator().manual_seed(0)
    v_dim = shape.v_head_dim or shape.head_dim
    sizes = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * v_dim)
    joined = torch.randn(shape.tokens, sum(sizes), generator=generator).to(DEVICE, shape.dtype)
    query, key, value = joined.split(sizes, -1)
    angles = torch.randn(shape.tokens, shape.columns, generator=generator)
    slots = torch.randperm(shape.tokens + BLOCK_SIZE, generator=generator)[: shape.tokens] + BLOCK_SIZE
    slots[shape.tokens // 2] = -1
    norms: list[RMSNorm | None] = [None, None]
    if shape.norm is not None:
        norms = [
            RMSNorm(
                weight=torch.randn(shape.head_dim, generator=generator).to(joined),
                eps=1e-5,
                offset=shape.norm[0],
                cast_first=shape.norm[1],
            )
            for _ in range(2)
        ]
    return Case(
        query=query.unflatten(1, (shape.q_heads, -1)),
        key=key.unflatten(1, (shape.kv_heads, -1)),
        value=value.unflatten(1, (shape.kv_heads, -1)),
        cos=angles.cos().to(joined),
        sin=angles.sin().to(joined),
        slots=slots.to(DEVICE),
        q_norm=norms[0],
        k_norm=norms[1],
        rope=shape.rope,
    )


def stored(pages: Pages, slots: Tensor) -> Tensor:
    """`[live tokens, kv_heads, ...]` of what the pages hold at the live slots."""
    live = slots[slots >= 0]
    tensor = pages.tensor.view(torch.int8) if pages.tensor.element_size() == 1 else pages.tensor
    return tensor[live // BLOCK_SIZE, :, live % BLOCK_SIZE].view(pages.tensor.dtype)


def scales(pages: Pages, slots: Tensor) -> Tensor:
    assert isinstance(pages, ScaledPages)
    live = slots[slots >= 0]
    return pages.scale[live // BLOCK_SIZE, :, live % BLOCK_SIZE]


def assert_rotated(actual: Tensor, expected: Tensor, dtype: torch.dtype, normed: bool) -> None:
    """fp32 inside: three roundings of 2^-24 of the largest element at most; then one rounding to the dtype, half a
    step. A norm's sum in another order may turn each of its two roundings, in both elements of a pair, by a step."""
    assert actual.dtype == dtype
    step = torch.finfo(dtype).eps
    largest = expected.abs().amax(-1, keepdim=True)
    bound = step / 2 * expected.abs() + (2.0**-22 + (4 * step if normed else 0)) * largest
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), (error / bound).max()


def check(shape: Shape, code_format: torch.dtype = torch.int8) -> None:
    case = make(shape)
    live = case.slots >= 0
    query, layer = case.write(shape.dtype, shape.dtype)
    expected_query, expected_key = case.expected()
    normed = shape.norm is not None
    assert query.is_contiguous()
    assert_rotated(query, expected_query, shape.dtype, normed)
    key = stored(layer.k, case.slots)
    assert_rotated(key, expected_key[live], shape.dtype, normed)
    assert torch.equal(stored(layer.v, case.slots), case.value[live])
    again, coded = case.write(code_format, code_format)
    assert_rotated(again, expected_query, shape.dtype, normed)
    assert_codes_of(coded.v, case.value[live], case.slots)
    if normed:  # another page format is another kernel, whose norm may sum in another order
        assert_near_codes_of(coded.k, key, case.slots)
    else:
        assert torch.equal(query, again)
        assert_codes_of(coded.k, key, case.slots)


def assert_codes_of(pages: Pages, rows: Tensor, slots: Tensor) -> None:
    codes, scale = reference.quantize_rows(rows, pages.tensor.dtype)
    assert torch.equal(scales(pages, slots), scale)
    assert torch.equal(stored(pages, slots).view(torch.int8), codes.view(torch.int8))


def assert_near_codes_of(pages: Pages, rows: Tensor, slots: Tensor) -> None:
    """Codes of rows that differ from `rows` by the slack of a norm: half a step of the format, and that slack."""
    values = reference.dequantize(stored(pages, slots), scales(pages, slots))
    eps = torch.finfo(rows.dtype).eps
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    if pages.tensor.dtype == torch.int8:
        half_step = largest / 127 / 2
    else:
        half_step = rows.abs() * 2**-4 + largest / 448 / 2
    slack = (4 * eps + 2**-10) * largest  # the latter: scales are rounded up to fp16
    assert ((values - rows).abs() <= half_step + slack).all()


SHAPES = {
    "llama": Shape(),
    "multi-query": Shape(q_heads=5, kv_heads=1),
    "no rotation": Shape(rope=Rope(rotary_dim=0), columns=0),
    "partial": Shape(head_dim=80, rope=Rope(rotary_dim=20), columns=20),
    "partial, interleaved": Shape(head_dim=96, rope=Rope(rotary_dim=48, interleaved=True), columns=48),
    "cohere": Shape(rope=Rope(rotary_dim=64, interleaved=True, angle_step=2)),
    "gpt-oss": Shape(columns=32),
    "values of another size": Shape(head_dim=96, v_head_dim=64, rope=Rope(rotary_dim=32), columns=32),
    "qwen3": Shape(norm=(0.0, True)),
    "gemma3": Shape(head_dim=80, rope=Rope(rotary_dim=80), columns=80, norm=(1.0, False)),
    "many tokens": Shape(tokens=70, q_heads=3, kv_heads=3, head_dim=32, rope=Rope(rotary_dim=32), columns=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_rotation_gives_the_model_s_query_and_key_and_the_codes_of_that_key(name: str) -> None:
    """Codes of another rounding than `write_kv`'s would make a result depend on whether the layer is fused."""
    check(SHAPES[name])


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_keys_are_rounded_to_the_model_s_dtype_before_they_are_coded(dtype: torch.dtype) -> None:
    check(Shape(dtype=dtype))
    check(Shape(dtype=dtype, norm=(0.0, True)))


def test_a_token_without_a_slot_writes_nothing_and_still_gets_its_query() -> None:
    """Padding rows of a captured graph have slot -1; a write to block -1 would corrupt another request."""
    case = make(Shape())
    query, layer = case.write(torch.float32, torch.int8)
    assert query.isfinite().all()
    assert isinstance(layer.k, PlainPages) and isinstance(layer.v, ScaledPages)
    written = int((case.slots >= 0).sum()) * 2
    assert int((~layer.k.data.isnan()).all(-1).sum()) == written
    assert int((~layer.v.scale.isnan()).sum()) == written


def test_a_head_with_nan_reads_back_as_nan_and_leaves_its_neighbours_alone() -> None:
    case = make(Shape())
    case.key[0, 1, 5] = float("nan")
    _, layer = case.write(torch.int8, torch.int8)
    nan = scales(layer.k, case.slots).isnan()
    assert nan[0].tolist() == [False, True] and not nan[1:].any()


def test_angles_may_have_any_strides() -> None:
    """GPT-OSS hands over transposed tables."""
    case = make(Shape())
    expected, _ = case.write(torch.float32, torch.float32)
    cos, sin = (table.t().contiguous().t() for table in (case.cos, case.sin))
    moved = Case(**{**case.__dict__, "cos": cos, "sin": sin})
    assert torch.equal(moved.write(torch.float32, torch.float32)[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("code_format", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 200])
def test_real_shapes_on_the_gpu(
    tokens: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype, code_format: torch.dtype
) -> None:
    for norm in (None, (0.0, True)):
        shape = Shape(
            tokens=tokens + 1, head_dim=head_dim, q_heads=heads[0], kv_heads=heads[1], dtype=dtype, norm=norm,
            rope=Rope(rotary_dim=head_dim), columns=head_dim,
        )  # fmt: skip
        check(shape, code_format)


@pytest.mark.gpu
def test_queries_and_pages_beyond_two_to_the_31_elements() -> None:
    """32-bit offsets would wrap: into other tokens' queries, and into other requests' blocks."""
    tokens, heads, dim = 140_000, 128, 128
    query = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
    key = torch.zeros(tokens, 1, dim, dtype=torch.bfloat16, device="cuda")
    num_blocks = 1_100_000
    pages = torch.zeros(num_blocks, 1, BLOCK_SIZE, dim, dtype=torch.bfloat16, device="cuda")
    query[-1], key[-1] = 1.0, 2.0
    layer = LayerKV(k=PlainPages(data=pages), v=PlainPages(data=torch.zeros_like(pages)))
    slots = torch.full((tokens,), -1, device="cuda")
    slots[-1] = (num_blocks - 1) * BLOCK_SIZE
    cos = torch.ones(tokens, dim, dtype=torch.bfloat16, device="cuda")
    out = rope_write(query, key, 2 * key, cos, torch.zeros_like(cos), layer, slots, rope=Rope(rotary_dim=dim))
    assert torch.equal(out, query)
    for stored_pages, value in ((layer.k, 2.0), (layer.v, 4.0)):
        assert (stored_pages.tensor[-1, 0, 0] == value).all() and stored_pages.tensor.count_nonzero() == dim
