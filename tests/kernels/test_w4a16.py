"""The packed-weight kernels against their plain-torch definitions, in the interpreter here and on a GPU where there
is one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.fp8_gemm import fp8_dequantize, fp8_gemm
from hf_paged.kernels.fp8_linear import (
    Fp8Weight,
    dequantize_fp8,
    fp8_linear,
    fp8_linear_reference,
    quantize_activations,
)
from hf_paged.kernels.fp8_quantize import quantize_activations_cuda
from hf_paged.kernels.packed_linear import MAX_FUSED_ROWS, fits_kernel, lock_count, packed_linear
from hf_paged.kernels.packed_weight import (
    PackedWeight,
    dequantize_reference,
    field_bits,
    pack_codes,
    packed_linear_reference,
)
from hf_paged.kernels.w4a16 import w4a16, w4a16_experts
from hf_paged.kernels.w4a16_tiles import Tiles, choose_tiles
from hf_paged.kernels.weight_dequantize import dequantize_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a result is rounded once to fp16 (2 ** -11 of it) and sums run in another order; bf16 likewise with 2 ** -8
STEP = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def weight(
    n: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 128,
    zeros: bool = False,
    perm: bool = False,
    device: str = DEVICE,
    scales: torch.dtype = torch.float16,
    experts: int = 0,
) -> PackedWeight:
    """A random packed weight; with `experts` a stack."""
    generator = torch.Generator().manual_seed(n + k + bits)
    group = k if group == -1 else group
    groups, levels = -(-k // group), 1 << bits

    def one() -> dict[str, Tensor]:
        codes = torch.randint(0, levels, (n, k), generator=generator, dtype=torch.uint8)
        return {
            "packed": pack_codes(codes, field_bits(bits)),
            "scales": ((torch.rand(groups, n, generator=generator) + 0.5) / levels).to(scales),
            "zeros": torch.randint(0, levels, (groups, n), generator=generator, dtype=torch.uint8),
            "perm": torch.randperm(k, generator=generator).to(torch.int32),
        }

    parts = [one() for _ in range(experts)] if experts else [one()]
    made = {key: torch.stack([part[key] for part in parts]) if experts else parts[0][key] for key in parts[0]}
    made = {key: value.to(device) for key, value in made.items()}
    return PackedWeight(
        packed=made["packed"],
        scales=made["scales"],
        zeros=made["zeros"] if zeros else None,
        perm=made["perm"] if perm else None,
        field_bits=field_bits(bits),
        code_bits=bits,
        group_size=group,
        in_features=k,
        out_features=n,
    )


def activations(m: int, k: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)


def tiles(block_n: int = 64, split: int = 1, scale_weights: bool = False, block_m: int = 16) -> Tiles:
    return Tiles(
        block_m=block_m, block_n=block_n, split_k=split, scale_weights=scale_weights, num_warps=4, num_stages=2
    )


def assert_close(result: Tensor, expected: Tensor, steps: float = 1.0) -> None:
    """Largest error relative to the largest output, and no common factor between the two (error and scale)."""
    a, b = result.float(), expected.float()
    assert float((a - b).abs().max() / b.abs().max()) < steps * STEP[result.dtype]
    assert abs(float((a * b).sum() / (b * b).sum()) - 1) < steps * STEP[result.dtype]


CASES = [
    # bits, group, zeros, perm, n, k, m, block_n, split, scale_weights
    (4, 128, False, False, 64, 256, 3, 64, 1, False),
    (4, 128, True, False, 128, 512, 16, 128, 2, False),
    (4, 32, True, True, 80, 320, 8, 64, 2, False),  # ragged N and K, act-order, split
    (4, 64, True, False, 136, 192, 20, 128, 1, True),  # two activation blocks, weights scaled
    (4, -1, False, True, 64, 288, 2, 64, 2, False),  # one group, K fills no tile
    (4, 256, True, False, 64, 512, 1, 64, 4, False),
    (3, 64, False, False, 72, 192, 5, 64, 1, False),
    (3, -1, True, True, 64, 160, 5, 64, 1, False),
    (8, 128, False, False, 64, 256, 4, 64, 1, False),
    (8, 32, True, True, 72, 160, 5, 128, 2, False),
    (8, 64, True, False, 64, 192, 3, 64, 1, True),
    (2, 64, True, False, 64, 640, 3, 64, 2, False),
    (2, 32, False, True, 72, 96, 3, 64, 1, False),
]


@pytest.mark.parametrize(("bits", "group", "zeros", "perm", "n", "k", "m", "block_n", "split", "scaled"), CASES)
def test_few_rows_equal_the_definition(
    bits: int, group: int, zeros: bool, perm: bool, n: int, k: int, m: int, block_n: int, split: int, scaled: bool
) -> None:
    """Every width, group, zero point, channel order, ragged edge and split: one wrong index and a column is wrong."""
    packed = weight(n, k, bits=bits, group=group, zeros=zeros, perm=perm)
    x, bias = activations(m, k), activations(1, n)[0]
    locks = torch.zeros(lock_count(n), dtype=torch.int32, device=DEVICE)
    result = w4a16(x, packed, bias, locks, tiles(block_n, split, scaled))
    assert_close(result, packed_linear_reference(x, packed, bias), steps=2 if scaled else 1)
    assert not locks.any(), "a lock left set makes the next launch skip its sum"
    assert torch.equal(result, w4a16(x, packed, bias, locks, tiles(block_n, split, scaled)))


def test_padding_channels_never_reach_the_result() -> None:
    """Activations beyond K belong to somebody else: infinity there must not become NaN here."""
    packed = weight(64, 160, bits=4, group=32, zeros=True)
    wide = torch.full((2, 512), float("inf"), dtype=torch.float16, device=DEVICE)
    wide[:, :160] = activations(2, 160)
    x = wide.view(-1)[:320].view(2, 160).copy_(activations(2, 160))
    locks = torch.zeros(lock_count(64), dtype=torch.int32, device=DEVICE)
    assert_close(w4a16(x, packed, None, locks, tiles()), packed_linear_reference(x, packed, None))


@pytest.mark.parametrize(("zeros", "perm", "top_k"), [(False, False, 2), (True, True, 1)])
def test_rows_go_to_their_own_expert(zeros: bool, perm: bool, top_k: int) -> None:
    """A stride too short sends every row to expert 0's tail."""
    stack = weight(72, 160, bits=4, group=32, zeros=zeros, perm=perm, experts=3)
    ids = torch.tensor([2, 0, 1, 2, 0, 0], device=DEVICE)
    x = activations(6 // top_k, 160)
    result = w4a16_experts(x, stack, ids, top_k, tiles())
    for row, expert in enumerate(ids.tolist()):
        one = PackedWeight(
            packed=stack.packed[expert],
            scales=stack.scales[expert],
            zeros=stack.zeros[expert] if zeros else None,
            perm=stack.perm[expert] if perm else None,
            field_bits=4,
            code_bits=4,
            group_size=32,
            in_features=160,
            out_features=72,
        )
        assert_close(result[row : row + 1], packed_linear_reference(x[row // top_k :][:1], one, None))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [56, 128])
def test_dequantized_weights_equal_the_definition_bit_for_bit(bits: int, dtype: torch.dtype, group: int) -> None:
    """A group that no slice aligns with, and one that holds whole tiles and is cut short by the last channel."""
    packed = weight(72, 168, bits=bits, group=group, zeros=bits != 8)
    out = torch.empty(72, 168, dtype=dtype, device=DEVICE)
    dequantize_launch(packed, out)
    assert torch.equal(out, dequantize_reference(packed, dtype))


def test_the_magic_exponent_is_exact_in_both_formats() -> None:
    """128 + code needs 8 bits of bf16, 1024 + code 11 bits of fp16; the difference with 128 + zero is then exact."""
    codes = torch.arange(16, dtype=torch.int16)
    for magic, dtype in ((0x4300, torch.bfloat16), (0x6400, torch.float16)):
        value = (codes | magic).view(dtype)
        assert torch.equal((value[:, None] - value[None, :]).float(), (codes[:, None] - codes[None, :]).float())
    wide = (torch.arange(256, dtype=torch.int32) | 0x4B000000).view(torch.float32) - 8388608.0
    assert torch.equal((wide[:, None] - wide[None, :]).bfloat16().float(), wide[:, None] - wide[None, :])


def test_a_launch_covers_the_weight_and_its_locks_suffice() -> None:
    """A split that leaves tiles out, or more blocks than locks, corrupts memory or sums."""
    for m in (1, 7, 16, 17, 64, 65, 128, 200, MAX_FUSED_ROWS):
        for n in (48, 576, 4096, 57344):
            for num_tiles in (1, 5, 32, 224):
                chosen = choose_tiles(m, n, num_tiles, 132)
                blocks = -(-n // chosen.block_n) * -(-m // chosen.block_m)
                assert chosen.split_k == 1 or blocks <= lock_count(n)
                assert chosen.split_k <= num_tiles


def test_groups_that_fit_no_slice_are_known() -> None:
    assert (
        fits_kernel(4, 128, 4096)
        and fits_kernel(4, 32, 4096)
        and fits_kernel(4, 4096, 4096)
        and fits_kernel(8, 64, 256)
    )
    assert not fits_kernel(4, 48, 96) and not fits_kernel(4, 16, 96) and not fits_kernel(4, 96, 192)


def test_the_operator_is_sound_for_the_compiler() -> None:
    """A wrong fake shape or an undeclared mutation shows only under torch.compile."""
    packed = weight(72, 160, bits=4, group=32, zeros=True, perm=True)
    locks = torch.zeros(lock_count(72), dtype=torch.int32, device=DEVICE)
    arguments = (
        activations(3, 160),
        packed.packed,
        packed.scales,
        packed.zeros,
        packed.perm,
        None,
        locks,
        4,
        4,
        32,
        160,
        72,
    )
    torch.library.opcheck(torch.ops.hf_paged.packed_linear, arguments)


def test_activation_rows_quantize_as_defined() -> None:
    x = activations(5, 200) * torch.logspace(-6, 3, 5, device=DEVICE)[:, None].half()
    x[2] = 0
    codes, scales = quantize_activations_cuda(x)
    expected, expected_scales = quantize_activations(x, 200)
    assert torch.allclose(scales, expected_scales, rtol=1e-6)
    if DEVICE == "cuda":  # the interpreter's e4m3 conversion loses the carry into the exponent (125.3 becomes 64)
        step = expected.float().abs().clamp_min(2**-6) * 2**-3  # one e4m3 step: a tie may round either way
        assert bool(((codes.float() - expected.float()).abs() <= step).all())


def fp8(n: int, k: int, block: tuple[int, int]) -> Fp8Weight:
    generator = torch.Generator().manual_seed(n + k)
    codes = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=generator) / 1000 + 1e-4
    return Fp8Weight(codes=codes.to(DEVICE), scale=scale.to(DEVICE), block=block, input_scale=None, dynamic=False)


@pytest.mark.parametrize("block", [(128, 128), (1, 320), (200, 320), (64, 256)])
@pytest.mark.parametrize(("m", "split"), [(3, 1), (20, 2)])
def test_fp8_weights_with_any_scale_grid_equal_the_definition(block: tuple[int, int], m: int, split: int) -> None:
    """Scales per tensor, channel and block; N and K that fill neither blocks nor tiles."""
    weight, x, bias = fp8(200, 320, block), activations(m, 320), activations(1, 200)[0]
    locks = torch.zeros(lock_count(200), dtype=torch.int32, device=DEVICE)
    result = fp8_gemm(x, weight.codes, weight.scale, block, bias, locks, tiles(64, split))
    assert_close(result, fp8_linear_reference(x, weight, bias))
    assert not locks.any()
    dense = fp8_dequantize(weight.codes, weight.scale, block, torch.float16)
    assert torch.equal(dense, dequantize_fp8(weight, torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block", "dynamic"), [((128, 128), True), ((1, 1024), True), ((512, 1024), False)])
def test_fp8_linears_equal_the_definition_on_the_gpu(dtype: torch.dtype, block: tuple[int, int], dynamic: bool) -> None:
    weight = replace(fp8(512, 1024, block), dynamic=dynamic and block[1] >= 1024)
    locks = torch.zeros(lock_count(512), dtype=torch.int32, device=DEVICE)
    for m in (1, 16, 64, 256, 300):
        x = activations(m, 1024, dtype)
        # the matrix unit sums e4m3 products with about 13 bits, and rowwise output is bf16
        steps = 16 if weight.dynamic else 1
        assert_close(fp8_linear(x, weight, None, locks), fp8_linear_reference(x, weight, None), steps=steps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group", "zeros", "perm"),
    [
        (4, 128, False, False),
        (4, 128, True, False),
        (4, 128, False, True),
        (4, 32, True, True),
        (8, 128, False, False),
        (8, 32, True, True),
        (2, 64, True, False),
        (3, 128, False, False),
        (4, 96, True, False),
    ],
)
def test_every_row_count_equals_the_definition_on_the_gpu(
    dtype: torch.dtype, bits: int, group: int, zeros: bool, perm: bool
) -> None:
    """bf16 and the inline assembly run only here; the row counts cross every launch shape and the switch to cuBLAS."""
    packed = weight(1000, 1536, bits=bits, group=group, zeros=zeros, perm=perm)
    locks = torch.zeros(lock_count(1000), dtype=torch.int32, device=DEVICE)
    bias = activations(1, 1000, dtype)[0]
    for m in (1, 4, 8, 15, 16, 17, 33, 64, 100, 128, 200, 256, 257, 512):
        x = activations(m, 1536, dtype)
        assert_close(packed_linear(x, packed, bias, locks), packed_linear_reference(x, packed, bias), steps=2)


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_sum() -> None:
    """Locks must be zero after each replay, and no launch may depend on the host."""
    packed = weight(4096, 4096, zeros=True)
    locks = torch.zeros(lock_count(4096), dtype=torch.int32, device=DEVICE)
    x = activations(4, 4096, torch.bfloat16)
    expected = packed_linear(x, packed, None, locks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = packed_linear(x, packed, None, locks)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.gpu
def test_the_forward_compiles_and_experts_run_in_one_launch() -> None:
    packed = weight(512, 1024, zeros=True)
    locks = torch.zeros(lock_count(512), dtype=torch.int32, device=DEVICE)
    x = activations(4, 1024, torch.bfloat16)
    compiled = torch.compile(lambda x: packed_linear(x, packed, None, locks) * 2, fullgraph=True)
    assert torch.equal(compiled(x), packed_linear(x, packed, None, locks) * 2)
    stack = weight(512, 1024, zeros=True, perm=True, experts=4)
    ids = torch.tensor([3, 1, 0, 2, 1, 1, 3, 0], device=DEVICE)
    rows = w4a16_experts(x, stack, ids, 2, choose_tiles(1, 512, stack.packed.shape[2], 132))
    for row, expert in enumerate(ids.tolist()):
        one = PackedWeight(
            packed=stack.packed[expert],
            scales=stack.scales[expert],
            zeros=stack.zeros[expert],
            perm=stack.perm[expert],
            field_bits=4,
            code_bits=4,
            group_size=128,
            in_features=1024,
            out_features=512,
        )
        assert_close(rows[row : row + 1], packed_linear_reference(x[row // 2 :][:1], one, None))
