"""4-bit products of many tokens: programs that add through shared memory in pairs, codes unpacked as subnormals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.packed_weight import PackedWeight, pack_codes, packed_linear_reference
from hf_paged.kernels.w4a16_hopper import SHAPES, HopperTiles, w4a16_hopper

N, K = 1008, 1504  # ragged in every tile
MANY = [shape.tiles for shape in SHAPES if shape.tiles.many]
STEP = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # of the largest output: see test_w4a16_hopper.py


def packed(scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return PackedWeight(
        packed=pack_codes(codes, 4).cuda(),
        scales=scales.cuda(),
        zeros=None if zeros is None else zeros.cuda(),
        perm=None,
        field_bits=4,
        code_bits=4,
        group_size=128,
        in_features=K,
        out_features=N,
    )


def groups(low: float, high: float) -> Tensor:
    """Scales `[groups, N]`, log-uniform."""
    share = torch.rand(-(-K // 128), N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return low * (high / low) ** share


def assert_equals_definition(weight: PackedWeight, tiles: HopperTiles, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    locks = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for m in (tiles.block_m, 2 * tiles.block_m - 5):
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to("cuda", dtype)
        blocks = -(-N // tiles.rows) * -(-m // tiles.block_m)
        result = w4a16_hopper(x, weight, None, locks, replace(tiles, programs=2 * blocks))
        expected = packed_linear_reference(x, weight, None).float()
        assert float((result.float() - expected).abs().max() / expected.abs().max()) < STEP[dtype]
        assert torch.equal(result, w4a16_hopper(x, weight, None, locks, replace(tiles, programs=2 * blocks)))


def test_bits_of_bf16_count_evenly_up_to_256() -> None:
    """Codes in bits 0..3 and 4..7, and zero points up to 16 times 16, are multiplied as they stand."""
    bits = torch.arange(257, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(bits.double(), torch.arange(257) * 2.0**-133)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", MANY, ids=lambda tiles: f"{tiles.block_m}x{tiles.rows}")
@pytest.mark.parametrize("dtype", STEP)
def test_neighbours_add_every_piece_once(tiles: HopperTiles, dtype: torch.dtype) -> None:
    assert_equals_definition(packed(groups(0.01, 0.1).half()), tiles, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STEP)
def test_zero_points_from_0_to_16_are_exact(dtype: torch.dtype) -> None:
    zeros = torch.randint(0, 17, (-(-K // 128), N), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    assert_equals_definition(packed(groups(0.01, 0.1).half(), zeros), MANY[0], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("low", "high"), [(1e-7, 1e-5), (1e3, 6e4), (1e-20, 1e-18), (1e8, 1e10)])
def test_scales_of_any_size_survive_unpacking(low: float, high: float) -> None:
    """bf16 holds scale * 2 ** 85 and weight * 2 ** -48 of all of them."""
    scales = groups(low, high)
    in_half = low >= 2**-24 and high < 65504
    assert_equals_definition(packed(scales.half() if in_half else scales.float()), MANY[0], torch.bfloat16)
