"""The Hopper kernel of 4-bit weights: every variant compiles here, and equals its definition on a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import w4a16_hopper as w4a16_module
from hf_paged.kernels.cuda_kernel import compile_cubin, nvrtc
from hf_paged.kernels.packed_linear import lock_count, packed_linear
from hf_paged.kernels.packed_weight import PackedWeight, pack_codes, packed_linear_reference
from hf_paged.kernels.w4a16_hopper import Variant, fits_hopper, source, w4a16_hopper
from hf_paged.kernels.w4a16_hopper_tiles import (
    AT_ONCE,
    SHAPES,
    FewShape,
    HopperTiles,
    choose_hopper_tiles,
    hopper_rows,
)

# a result is rounded once to fp16 (2 ** -11 of it) or bf16 (2 ** -8); a weight scaled before the product twice more,
# independently per weight, which sums to less than one step of the largest output
STEP = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHARED_BYTES = 227 * 1024  # of one program on Hopper


def weight(
    n: int,
    k: int,
    *,
    group: int = 128,
    zeros: bool = False,
    perm: bool = False,
    scales: torch.dtype = torch.float16,
    code_bits: int = 4,
) -> PackedWeight:
    generator = torch.Generator().manual_seed(n + k)
    group = k if group == -1 else group
    groups, levels = -(-k // group), 1 << code_bits
    codes = torch.randint(0, levels, (n, k), generator=generator, dtype=torch.uint8)
    return PackedWeight(
        packed=pack_codes(codes, 4).cuda(),
        scales=((torch.rand(groups, n, generator=generator) + 0.5) / levels).to("cuda", scales),
        zeros=torch.randint(0, levels, (groups, n), generator=generator, dtype=torch.uint8).cuda() if zeros else None,
        perm=torch.randperm(k, generator=generator).to("cuda", torch.int32) if perm else None,
        field_bits=4,
        code_bits=code_bits,
        group_size=group,
        in_features=k,
        out_features=n,
    )


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to("cuda", dtype)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Largest error relative to the largest output, and no common factor between the two."""
    a, b = result.float(), expected.float()
    assert float((a - b).abs().max() / b.abs().max()) < STEP[result.dtype]
    assert abs(float((a * b).sum() / (b * b).sum()) - 1) < STEP[result.dtype]


def all_tiles() -> list[HopperTiles]:
    """Every tile: one program for all, tiles shared unevenly by a few, and by as many as an H200 has; its clusters."""
    tiles = []
    for shape in SHAPES:
        if not isinstance(shape, FewShape) or shape.clustered:
            clusters = AT_ONCE[shape.tiles.resident]
            tiles += [replace(shape.tiles, cluster=cluster, programs=10_000) for cluster in clusters]
        tiles += [replace(shape.tiles, programs=programs) for programs in (1, 5, 132)]
    return list(dict.fromkeys(tiles))


def launched(tiles: HopperTiles, m: int, n: int) -> HopperTiles:
    return tiles if tiles.cluster == 1 else replace(tiles, programs=tiles.blocks(m, n) * tiles.cluster)


def name(tiles: HopperTiles) -> str:
    shared = f"c{tiles.cluster}" if tiles.cluster > 1 else f"{tiles.programs}"
    return f"{tiles.block_m}x{tiles.rows}w{tiles.warpgroups}r{tiles.resident}/{shared}"


@pytest.mark.parametrize(
    "tiles", sorted({replace(t, programs=0) for t in all_tiles() if t.cluster in (1, 8)}, key=str), ids=name
)
def test_every_launch_compiles_and_fits_a_multiprocessor(tiles: HopperTiles) -> None:
    """Here, without a GPU: NVRTC needs none."""
    try:
        nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    for half, zeros, groups in ((False, False, 1), (True, True, 4)):
        variant = Variant(tiles=tiles, half=half, groups=groups, zeros=zeros)
        assert (variant.shared_bytes + 1024) * tiles.resident <= SHARED_BYTES + 1024
        assert compile_cubin(source(variant), "w4a16_hopper", "sm_90a")


def test_a_launch_has_work_for_every_program_and_a_lock_for_each() -> None:
    """More programs than locks corrupt memory."""
    for m, n, k in itertools.product(
        (1, 9, 17, 64, 100, 128, 200, 256, 4096), (16, 576, 2048, 57344), (128, 1504, 28672)
    ):
        tiles = choose_hopper_tiles(m, n, k, 132)
        blocks, steps = tiles.blocks(m, n), -(-k // 128)
        assert 1 <= tiles.programs <= min(132 * tiles.resident, blocks * steps)
        assert tiles.programs * tiles.warpgroups <= lock_count(n)
        assert tiles.cluster == 1 or tiles.programs == blocks * tiles.cluster


CASES = [
    # n, k, group, zeros, perm, scales, code bits, activations
    (1008, 1504, 128, False, False, torch.float16, 4, torch.bfloat16),  # ragged N and K
    (1008, 1504, 128, True, False, torch.bfloat16, 4, torch.float16),
    (512, 1024, 64, True, False, torch.float32, 4, torch.bfloat16),
    (512, 1056, 32, True, True, torch.float16, 4, torch.bfloat16),
    (512, 1056, 32, False, False, torch.float16, 4, torch.float16),
    (256, 2048, -1, False, True, torch.float16, 4, torch.float16),
    (256, 2048, 256, True, False, torch.bfloat16, 4, torch.bfloat16),
    (256, 1024, 128, False, False, torch.float16, 3, torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "group", "zeros", "perm", "scales", "bits", "dtype"), CASES)
def test_every_format_equals_the_definition(
    n: int, k: int, group: int, zeros: bool, perm: bool, scales: torch.dtype, bits: int, dtype: torch.dtype
) -> None:
    """Through the public call, up to beyond the switch to cuBLAS, and through every tile."""
    packed = weight(n, k, group=group, zeros=zeros, perm=perm, scales=scales, code_bits=bits)
    locks = torch.zeros(4096, dtype=torch.int32, device="cuda")
    bias = activations(1, n, dtype)[0]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert fits_hopper(activations(1, k, dtype), packed) or not hopper
    for m in (1, 7, 16, 50, 200, 300, hopper_rows(k) + 1):
        x = activations(m, k, dtype)
        for offered in (bias, None):
            assert_close(packed_linear(x, packed, offered, locks), packed_linear_reference(x, packed, offered))
    x = activations(100, k, dtype)
    for shape in SHAPES:
        if hopper:
            result = w4a16_hopper(x, packed, bias, locks, replace(shape.tiles, programs=40))
            assert_close(result, packed_linear_reference(x, packed, bias))
    assert not locks.any()


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", all_tiles(), ids=name)
def test_every_tile_split_and_number_of_programs_gives_the_product(tiles: HopperTiles) -> None:
    """Ragged N, K and M; parts of a tile are added in a fixed order, so the bits are the same every time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    packed = weight(1008, 1504, zeros=True)
    locks = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for m in (tiles.block_m, tiles.block_m - 3, 2 * tiles.block_m - 5):
        x = activations(m, 1504, torch.bfloat16)
        here = launched(tiles, m, 1008)
        result = w4a16_hopper(x, packed, None, locks, here)
        assert_close(result, packed_linear_reference(x, packed, None))
        assert not locks.any()
        assert torch.equal(result, w4a16_hopper(x, packed, None, locks, here))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 32])
@pytest.mark.parametrize("dtype", STEP)
def test_zero_points_from_0_to_16_are_exact(m: int, dtype: torch.dtype) -> None:
    """16 is what a zero point of 15 becomes in files that store it less one."""
    packed = weight(1008, 1504, zeros=True)
    assert packed.zeros is not None
    packed.zeros.copy_(torch.arange(packed.zeros.numel()).reshape(packed.zeros.shape) % 17)
    x, locks = activations(m, 1504, dtype), torch.zeros(lock_count(1008), dtype=torch.int32, device="cuda")
    assert_close(packed_linear(x, packed, None, locks), packed_linear_reference(x, packed, None))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 32])
@pytest.mark.parametrize(("low", "high"), [(1e-7, 1e-5), (1e3, 6e4), (1e-20, 1e-18), (1e8, 1e10)])
def test_scales_of_any_size_survive_unpacking(m: int, low: float, high: float) -> None:
    """bf16 holds them times a power of two on the way, and weights that are as much too small."""
    packed = weight(1008, 1504, scales=torch.float16 if low >= 2**-24 and high < 65504 else torch.float32)
    share = torch.rand(packed.scales.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed.scales.copy_(low * (high / low) ** share)
    x, locks = activations(m, 1504, torch.bfloat16), torch.zeros(lock_count(1008), dtype=torch.int32, device="cuda")
    assert_close(packed_linear(x, packed, None, locks), packed_linear_reference(x, packed, None))


@pytest.mark.gpu
def test_chained_products_wait_for_each_other_in_a_graph() -> None:
    """Captured launches start before the one before has ended: its output must not be read too early."""
    locks = torch.zeros(lock_count(2048), dtype=torch.int32, device="cuda")
    weights = [weight(2048, 2048), weight(2048, 2048, zeros=True)] * 4
    for m in (1, 40, 128, 300):
        x = activations(m, 2048, torch.bfloat16)

        def chain(x: Tensor = x) -> Tensor:
            for packed in weights:
                x = packed_linear(x, packed, None, locks) * 0.02
                x = packed_linear(packed_linear(x, packed, None, locks), packed, None, locks) * 0.0004
            return x

        expected = chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(5):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)


def test_a_compiler_that_refuses_the_source_leaves_the_portable_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That a library loads does not say that it compiles: every request failed where an old one was found first."""

    def refusing(*args: object) -> None:
        raise RuntimeError("NVRTC refused w4a16_hopper")

    monkeypatch.setattr(w4a16_module, "CudaKernel", refusing)
    monkeypatch.setattr(w4a16_module, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert not w4a16_module._is_usable.__wrapped__(7)
    assert "portable kernel" in caplog.text and "NVRTC refused" in caplog.text
