"""Smoothing and rotation change what pages hold and nothing that attention computes; kernels follow the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import empty_pages
from torch import Tensor

from hf_paged.kernels import reference, reference_fused
from hf_paged.kernels.kv_transform import KVTransform, hadamard, rotation_block
from hf_paged.kernels.layout import UINT4, AttentionMetadata, GroupPages, LayerKV, Pages, PlainPages, ScaledPages
from hf_paged.kernels.reference_fused import Rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16
EPS = torch.finfo(torch.float32).eps


def random_transform(
    generator: torch.Generator, kv_heads: int, dims: tuple[int, int], *, offsets: bool = True, rotated: bool = True
) -> KVTransform:
    """Offsets many times larger than the keys, factors of 1/8 to 8."""
    k_dim, v_dim = dims
    noise = torch.randn(2, kv_heads, max(dims), generator=generator) * (20.0 if offsets else 0.0)
    factor = 2.0 ** torch.randint(-3, 4, (kv_heads, k_dim), generator=generator)
    return KVTransform(
        k_offset=noise[0, :, :k_dim].contiguous().to(DEVICE),
        k_factor=factor.to(DEVICE),
        v_offset=noise[1, :, :v_dim].contiguous().to(DEVICE) if offsets else None,
        rotates_k=rotated,
        rotates_v=rotated,
    )


def one_sequence(length: int, history: int) -> AttentionMetadata:
    """A prompt's last `length - history` tokens over pages 1, 2, ..."""
    blocks = -(-length // BLOCK_SIZE)
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, length - history], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(length) + BLOCK_SIZE,
        num_decodes=int(length - history == 1),
        max_seqlen_q=length - history,
        max_seq_len=length,
    )


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 192, 256])
def test_the_rotation_is_orthogonal_and_its_own_inverse_for_every_head_dim(head_dim: int) -> None:
    x = torch.randn(5, head_dim, dtype=torch.float64)
    rotated = hadamard(x)
    torch.testing.assert_close(hadamard(rotated), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    block = rotation_block(head_dim)
    one = hadamard(torch.eye(head_dim, dtype=torch.float64)[0])
    assert (one[:block].abs() - block**-0.5).abs().max() < 1e-12 and not one[block:].any(), (
        "an outlier is spread evenly"
    )


@pytest.mark.parametrize("history", [0, 20, 32])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("feature", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_attention_over_what_is_stored_is_attention_over_keys_and_values(
    heads: tuple[int, int], feature: str, rotated: bool, history: int
) -> None:
    """Exact algebra, GQA included. With sinks a K offset is taken from them too; under a softcap there is none."""
    generator = torch.Generator().manual_seed(0)
    length, (q_heads, kv_heads), dims = 33, heads, (48, 32)
    options: dict[str, object] = {"window": 9} if feature == "window" else {}
    options |= {"softcap": 2.0} if feature == "softcap" else {}
    options |= {"sinks": torch.randn(q_heads, generator=generator)} if feature == "sinks" else {}
    query = torch.randn(length - history, q_heads, dims[0], generator=generator)
    key = torch.randn(length, kv_heads, dims[0], generator=generator)
    value = torch.randn(length, kv_heads, dims[1], generator=generator)
    offsets = feature != "softcap"
    transform = random_transform(generator, kv_heads, dims, offsets=offsets, rotated=rotated).to("cpu")
    if feature == "sinks":
        moved = transform.k_offset / transform.k_factor
        transform = replace(transform, v_offset=None, sink_offset=hadamard(moved) if rotated else moved)
    key = key + transform.k_offset * 0.9  # what calibration finds, nearly
    meta = one_sequence(length, history)
    truth = LayerKV(k=fp64_pages(key), v=fp64_pages(value))
    stored = LayerKV(
        k=fp64_pages(transform.stored_key(key)), v=fp64_pages(transform.stored_value(value)), transform=transform
    )
    exact = reference.paged_attention(query.double(), truth, meta, scale=0.3, **options)  # type: ignore[arg-type]
    sinks = transform.sinks(options.get("sinks"), transform.query(query), 0.3)  # type: ignore[arg-type]
    options = {**options, "sinks": sinks}
    out = reference.paged_attention(transform.query(query).double(), stored, meta, scale=0.3, **options)  # type: ignore[arg-type]
    # scores are sums of 48 products whose operands were rounded to fp32 at the size of the offsets, 20 standard normals
    scale = 0.3 * float(query.abs().sum(-1).max()) * 60
    torch.testing.assert_close(transform.output(out).double(), exact, rtol=0, atol=EPS * scale * 8)


def fp64_pages(rows: Tensor) -> PlainPages:
    data = torch.zeros(4, rows.shape[1], BLOCK_SIZE, rows.shape[2], dtype=torch.float64)
    slots = torch.arange(len(rows)) + BLOCK_SIZE
    data[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = rows.double()
    return PlainPages(data=data)


def test_what_is_read_back_undoes_what_was_stored() -> None:
    """A cache that any attention reads gives out keys and values, not what pages hold of them.

    A subtraction, a division, up to 6 stages either way, a product and a sum round by EPS of a stored row's length at
    most, which the factor multiplies.
    """
    generator = torch.Generator().manual_seed(0)
    transform = random_transform(generator, 2, (96, 64))
    key, value = (torch.randn(5, 2, dim, generator=generator).to(DEVICE) for dim in (96, 64))
    stored_key, stored_value = transform.stored_key(key), transform.stored_value(value)
    for back, rows, stored, factor in (
        (transform.key(stored_key), key, stored_key, float(transform.k_factor.max())),
        (transform.value(stored_value), value, stored_value, 1.0),
    ):
        largest = float(stored.norm(dim=-1).max()) * factor
        torch.testing.assert_close(back, rows, rtol=0, atol=16 * EPS * largest)


def on_device(pages: Pages) -> Pages:
    if isinstance(pages, PlainPages):
        return PlainPages(data=pages.data.to(DEVICE))
    return type(pages)(codes=pages.codes.to(DEVICE), scale=pages.scale.to(DEVICE))


def same_bytes(a: Pages, b: Pages) -> bool:
    if isinstance(a, ScaledPages | GroupPages) and isinstance(b, ScaledPages | GroupPages):
        live = ~a.scale.isnan()
        scales = torch.equal(a.scale[live], b.scale[live]) and torch.equal(live, ~b.scale.isnan())
        return scales and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    return torch.equal(a.tensor.view(torch.uint8), b.tensor.view(torch.uint8))


CASES = {
    "int8, smoothed": (torch.int8, (64, 64), False),
    "int4, rotated": (UINT4, (64, 64), True),
    "int4, blocks of 32, values of another size": (UINT4, (96, 64), True),
    "int4, two blocks": (UINT4, (256, 24), True),
    "fp8, partial rotation": (torch.float8_e4m3fn, (80, 80), False),
}


@pytest.mark.parametrize("tokens", [7, 70])
@pytest.mark.parametrize("name", CASES)
def test_the_fused_kernel_stores_the_definition_s_bytes_and_returns_its_query(name: str, tokens: int) -> None:
    """Other codes than the unfused path's would make a result depend on whether the layer is fused."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from hf_paged.kernels.rope_write import rope_write

    codes, dims, rotated = CASES[name]
    if codes == torch.float8_e4m3fn and DEVICE == "cpu":
        pytest.skip("Triton's interpreter rounds fp8 its own way")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tokens, heads, dim, generator=generator).to(DEVICE)
        for heads, dim in ((6, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    rope = Rope(rotary_dim=dims[0] // 4 * 2)
    angles = torch.randn(tokens, dims[0], generator=generator)
    # angles of whole quarter turns: products and sums without rounding, whether the compiler fuses them or not
    cos, sin = (angles > 0).float().to(DEVICE), (angles <= 0).float().to(DEVICE)
    transform = random_transform(generator, 2, dims, rotated=rotated)
    slots = (torch.randperm(tokens, generator=generator) + BLOCK_SIZE).to(DEVICE)
    slots[3] = -1
    results = []
    for write in (rope_write, reference_fused.rope_write):
        k_pages, v_pages = (on_device(empty_pages(tokens // BLOCK_SIZE + 3, 2, BLOCK_SIZE, dim, codes)) for dim in dims)
        layer = LayerKV(k=k_pages, v=v_pages, transform=transform)
        results.append((write(query, key, value, cos, sin, layer, slots, rope=rope), layer))
    (actual, stored), (expected, defined) = results
    assert torch.equal(actual, expected)
    assert same_bytes(stored.k, defined.k) and same_bytes(stored.v, defined.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("v_dim", [24, 64, 256])
def test_the_output_kernel_gives_the_definition_s_output(v_dim: int, rotated: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from hf_paged.kernels.restore_output import restore_output

    generator = torch.Generator().manual_seed(0)
    transform = random_transform(generator, 2, (64, v_dim), rotated=rotated)
    out = torch.randn(37, 6, v_dim, generator=generator).to(DEVICE, dtype)
    expected = transform.output(out)
    # a compiler may fuse the rotation's last product with the offset's sum: one rounding less, of terms of about 100
    actual = restore_output(out.clone(), transform)
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=100 * EPS)
