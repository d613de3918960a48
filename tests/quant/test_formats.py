"""Every layout is read from its definition and written back bit for bit; what fits no layout is refused by name."""

from __future__ import annotations

import pytest
import torch
from quant_files import COMPRESSED, Cell, pack_linear, random_integers
from safetensors.torch import load, save
from torch import Tensor

from hf_paged.kernels.packed_weight import pack_codes, unpack_codes
from hf_paged.quant.formats import read, write
from hf_paged.quant.layout import Label, Layout, TensorSpec, identify
from hf_paged.quant.pack import pack, unpack
from hf_paged.quant.weight import dequantize
from hf_paged.quant.zero_points import stored_zero_offset

_NAMES = {
    torch.int32: "I32",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
# N and K are no multiples of 64 or 128
SHAPES = {
    "gptq": (40, 160),
    "gptq_p": (96, 160),
    "compressed": (24, 160),
    "compressed_dense": (24, 160),  # 24 rows of 3 to 7 bits are no whole blocks of 32
    "int8": (24, 160),
    "awq_gemm": (40, 192),
}
UNPACKED = ((4, 32), (4, -1), (8, -1), (3, 32))
AWQ_KINDS = ("awq_gemm", "awq_gemv", "awq_gemv_fast", "llm_awq")


def _cells() -> list[Cell]:
    cells = [
        Cell(kind="gptq", bits=bits, group_size=group, symmetric=sym, act_order=order, version=version)
        for bits in (2, 3, 4, 8)
        for group in (32, -1)
        for sym in (True, False)
        for order in (True, False)
        for version in (1, 2)
    ]
    cells += [
        Cell(kind="gptq_p", bits=bits, symmetric=sym, act_order=order)
        for bits in range(2, 9)
        for sym, order in ((True, False), (False, True))
    ]
    cells += [
        Cell(kind=kind, bits=bits, group_size=group, symmetric=sym, act_order=order)
        for kind, widths in (("compressed", range(2, 9)), ("compressed_dense", (3, 5, 6, 7)), ("int8", (4, 8)))
        for bits in widths
        for group in (32, -1)
        for sym in (True, False)
        for order in (True, False)
        if bits in (4, 8) or group == 32
    ]
    cells += [Cell(kind="compressed", bits=bits, group_size=group, unpacked_zeros=True) for bits, group in UNPACKED]
    cells += [
        Cell(kind=kind, group_size=group, symmetric=sym)
        for kind in AWQ_KINDS
        for group in (32, 64, -1)
        for sym in (True, False)
    ]
    cells += [
        Cell(kind=kind, scales=dtype)
        for kind in ("gptq", "awq_gemm", "compressed")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return cells


def _specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype=_NAMES[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}


def _label(cell: Cell) -> Label:
    method = {"gptq": "gptq", "gptq_p": "gptq", **dict.fromkeys(COMPRESSED, "compressed-tensors")}.get(cell.kind, "awq")
    planar = cell.kind == "gptq_p"
    offset = 0 if planar else 2 - cell.version
    return Label(bits=cell.bits, group_size=cell.group_size, method=method, zero_offset=offset, planar=planar)


@pytest.mark.parametrize("cell", _cells(), ids=str)
def test_a_layout_reads_as_defined_and_writes_back_its_own_words(cell: Cell) -> None:
    """A nibble order, group axis or zero offset that is off by one gives fluent nonsense; here it differs from the
    integers.
    """
    n, k = SHAPES.get(cell.kind, (40, 192))
    integers = random_integers(cell, n, k)
    tensors = load(save(pack_linear(cell, integers)))
    layout = identify("m", _specs(tensors), k, n, _label(cell))
    weight = read("m", layout, tensors)
    assert torch.equal(weight.codes, integers.codes)
    assert torch.equal(dequantize(weight, torch.float32).float(), integers_dequantized(weight.scales.dtype, integers))
    packed = pack(weight)
    again = write(layout, unpack(packed))
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def integers_dequantized(dtype: torch.dtype, integers: object) -> Tensor:
    codes, zeros = integers.codes.to(dtype), integers.zeros[integers.g_idx.long()].t().to(dtype)
    return ((codes - zeros) * integers.scales[integers.g_idx.long()].t()).float()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_tiles_hold_every_code_once(bits: int) -> None:
    """Ragged rows and channels pad a tile; a wrong stride there corrupts the last rows only."""
    codes = torch.randint(0, 1 << bits, (72, 136), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, 136, 72), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_zero_points_overrule_a_lying_version_label(bits: int, version: int) -> None:
    """vllm PR 38966: files labelled v1 that hold v2 zeros answer only '!!!!'."""
    cell = Cell(bits=bits, symmetric=True, version=version)
    integers = random_integers(cell, 32, 64)
    tensors = pack_linear(cell, integers)
    lie = Label(bits=bits, group_size=32, zero_offset=0 if version == 1 else 1)
    weight = read("m", identify("m", _specs(tensors), 64, 32, lie), tensors)
    assert weight.zeros is None and torch.equal(weight.codes, integers.codes)


def test_asymmetric_zero_points_overrule_a_lying_label_only_when_the_data_is_clear() -> None:
    """Weights average to zero, so codes minus zeros do; without such evidence the label stands."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 4096, generator=generator)
    zeros = torch.randint(5, 11, (64, 1), generator=generator)
    codes = (torch.round(weight * 1.5) + zeros).clamp(0, 15).to(torch.uint8)
    group = torch.arange(4096) // 128
    v2 = zeros.t().expand(32, 64).to(torch.uint8)
    v1, unclear = v2 - 1, v2 + 4

    def found(stored: Tensor, codes: Tensor, group: Tensor) -> list[int]:
        shape = {"in_features": codes.shape[1], "out_features": codes.shape[0], "group_size": 128, "bits": 4}
        return [
            stored_zero_offset(stored, codes, group, Layout(kind="gptq", zero_offset=label, tensors={}, **shape))
            for label in (0, 1)
        ]

    assert [found(stored, codes, group) for stored in (v1, v2, unclear)] == [[1, 1], [0, 0], [0, 1]]
    noise = torch.randint(0, 16, (32, 64), generator=generator, dtype=torch.uint8)  # says nothing about the codes
    assert found(noise[:2, :8], codes[:8], group // 16) == [0, 1]


def test_a_wrapped_zero_is_read_masked() -> None:
    """Zero 0 stored as 0 - 1 is all ones; AutoGPTQ adds 1 without masking and reads 4 at two bits."""
    cell = Cell(bits=2, symmetric=False)
    integers = random_integers(cell, 32, 64)
    integers.zeros[0, :5] = 0
    tensors = pack_linear(cell, integers)
    layout = identify("m", _specs(tensors), 64, 32, _label(cell))
    assert torch.equal(read("m", layout, tensors).zeros, integers.zeros)
    assert int(read("m", layout, tensors, mask_zeros=False).zeros[0, 0]) == 4


def test_an_all_zero_g_idx_means_the_natural_order() -> None:
    """Some writers leave g_idx unset; reading it literally puts every channel in group 0."""
    cell = Cell(symmetric=True)
    tensors = pack_linear(cell, random_integers(cell, 32, 64))
    tensors["g_idx"] = torch.zeros_like(tensors["g_idx"])
    assert read("m", identify("m", _specs(tensors), 64, 32, _label(cell)), tensors).g_idx is None


def test_a_ragged_last_group_is_read_by_gptq_and_refused_by_awq() -> None:
    """Hidden size 576 at group 128: GPTQ writes a short last group, AWQ's layout has no place for one."""
    cell = Cell(group_size=128, symmetric=False, act_order=True)
    integers = random_integers(cell, 32, 192 + 96)
    tensors = pack_linear(cell, integers)
    layout = identify("m", _specs(tensors), 288, 32, _label(cell))
    packed = pack(read("m", layout, tensors))
    assert packed.scales.shape[0] == 3
    assert torch.equal(unpack(packed).g_idx, integers.g_idx)
    awq = _specs(pack_linear(Cell(kind="awq_gemm", group_size=128), random_integers(Cell(group_size=128), 32, 288)))
    with pytest.raises(
        ValueError, match=r"288 input channels are no multiple of group_size 128, which AWQ cannot store"
    ):
        identify("m", awq, 288, 32, Label(method="awq", group_size=128, bits=4))


@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [("awq_gemm", 36, 64), ("awq_gemv", 32, 68), ("awq_gemv_fast", 32, 96)],
)
def test_a_shape_that_fills_no_words_of_an_awq_layout_is_refused(kind: str, n: int, k: int) -> None:
    """Rounded down its words have a shape to expect, and the last channels would be missing."""
    shapes = {
        "awq_gemm": {"qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (1, n // 8)), "scales": ("F16", (1, n))},
        "awq_gemv": {"qweight": ("I32", (n, k // 8)), "qzeros": ("I32", (n, 4)), "scales": ("F16", (n, 32))},
        "awq_gemv_fast": {"qweight": ("I16", (n // 4, k)), "qzeros": ("F16", (32, n)), "scales": ("F16", (32, n))},
    }[kind]
    specs = {name: TensorSpec(dtype=dtype, shape=shape) for name, (dtype, shape) in shapes.items()}
    message = rf"module m: {k} input by {n} output channels do not fill the words of layout {kind}"
    with pytest.raises(ValueError, match=message):
        identify("m", specs, k, n, Label(method="awq", bits=4, group_size=-1))


BROKEN = [
    ("qweight", lambda t: t.t().contiguous(), r"tensor m\.qweight: expected I32 \[8, 32\] .*found I32 \[32, 8\]"),
    ("scales", lambda t: t[:1], r"tensor m\.qzeros: expected I32|tensor m\.scales: expected"),
    ("scales", lambda t: t.to(torch.int32), r"tensor m\.scales: expected F16 or BF16 or F32 \[2, 32\].*found I32"),
    ("qzeros", lambda t: t[:, :1], r"tensor m\.qzeros: expected I32 \[2, 4\].*found I32 \[2, 1\]"),
    ("g_idx", lambda t: t[:5], r"tensor m\.g_idx: expected I32 or I64 \[64\]"),
]


@pytest.mark.parametrize(("suffix", "change", "message"), BROKEN)
def test_a_misshapen_tensor_is_named_with_expected_and_found(suffix: str, change: object, message: str) -> None:
    cell = Cell()
    tensors = pack_linear(cell, random_integers(cell, 32, 64))
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(ValueError, match=message):
        identify("m", _specs(tensors), 64, 32, _label(cell))


def test_missing_extra_and_mislabelled_tensors_are_named() -> None:
    cell = Cell()
    tensors = _specs(pack_linear(cell, random_integers(cell, 32, 64)))
    with pytest.raises(ValueError, match=r"m\.scales is missing"):
        identify("m", {name: spec for name, spec in tensors.items() if name != "scales"}, 64, 32, _label(cell))
    with pytest.raises(ValueError, match=r"m\.weight_g_idx .* does not belong to layout gptq"):
        identify("m", {**tensors, "weight_g_idx": tensors["g_idx"]}, 64, 32, _label(cell))
    with pytest.raises(ValueError, match="quantization_config says 8 bits, the tensors hold 4"):
        identify("m", tensors, 64, 32, Label(bits=8, group_size=32))
    packed = _specs(pack_linear(Cell(kind="compressed"), random_integers(cell, 32, 64)))
    # vllm 17862: zero points left unpacked; as compressed-tensors left them they are read, others are not
    for dtype, shape in (("I8", (2, 32)), ("F16", (32, 2)), ("I32", (32, 2))):
        zeros = {"weight_zero_point": TensorSpec(dtype=dtype, shape=shape)}
        with pytest.raises(ValueError, match=r"tensor m\.weight_zero_point: expected I"):
            identify("m", {**packed, **zeros}, 64, 32, Label(method="compressed-tensors", bits=4))
    with pytest.raises(ValueError, match=r"m\.weight_scale .*has no packed weight beside it.*re-save"):
        identify("m", {"weight_scale": TensorSpec(dtype="F8_E4M3", shape=(32, 4))}, 64, 32, Label())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": float("nan")}, r"m\.scales: expected finite scales, found 1 NaN"),
        ({"g_idx": 7}, r"m\.g_idx: expected groups in \[0, 2\), found \[0, 7\]"),
        ({"g_idx": -1}, r"m\.g_idx: expected groups in \[0, 2\), found \[-1, 1\]"),
        ({"g_idx": 1}, r"m\.g_idx: expected 32 channels in group 0, found 31"),
    ],
)
def test_values_that_cannot_be_meant_are_named(change: dict[str, float], message: str) -> None:
    cell = Cell()
    tensors = pack_linear(cell, random_integers(cell, 32, 64))
    for name, value in change.items():
        tensors[name].view(-1)[0] = value
    with pytest.raises(ValueError, match=message):
        read("m", identify("m", _specs(tensors), 64, 32, _label(cell)), tensors)


def test_a_square_awq_layer_is_told_from_its_gemv_twin() -> None:
    """With N = K both layouts have the same qweight shape: only the scales tell them apart, whatever the label."""
    for kind in ("awq_gemm", "awq_gemv"):
        cell = Cell(kind=kind, symmetric=False)
        integers = random_integers(cell, 64, 64)
        tensors = pack_linear(cell, integers)
        layout = identify("m", _specs(tensors), 64, 64, Label(method="awq", bits=4, group_size=32))
        assert layout.kind == kind
        assert torch.equal(read("m", layout, tensors).codes, integers.codes)
