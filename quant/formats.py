"""Reading and writing the packed tensors of a file, once their layout is known.

`read` turns a module's tensors into the integers they mean, `write` is its inverse and reproduces the file's words.
What only the values can tell is decided here: GPTQ zero points written as zero - 1 or as they are, a `g_idx` that is
the natural order, NaN or infinite scales, groups out of range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_paged.quant import packing
from hf_paged.quant.damage import check_finite, check_weight
from hf_paged.quant.layout import Layout, gemv_width
from hf_paged.quant.weight import QuantizedWeight
from hf_paged.quant.zero_points import stored_zero_offset


def read(name: str, layout: Layout, tensors: Mapping[str, Tensor], *, mask_zeros: bool = True) -> QuantizedWeight:
    """The integers and scales of module `name`; the tensors must have the shapes of `layout`.

    `mask_zeros=False` reads a GPTQ v1 zero that wrapped (zero 0 stored as 2 ** bits - 1) as AutoGPTQ's own code does,
    unmasked: only useful to compare with that code. Raises ValueError naming the tensor whose values cannot be used.
    """
    weight = _READERS[layout.kind](name, layout, tensors, mask_zeros)
    check_weight(
        weight,
        codes=f"{name}.{layout.codes_name}",
        zeros=f"{name}.{layout.zeros_name}",
        scales=f"{name}.{layout.scales_name}",
    )
    return weight


def write(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors a file of this layout holds for `weight`, by suffix; GPTQ zeros follow the label of `layout`."""
    return _WRITERS[layout.kind](layout, weight)


def _check_g_idx(name: str, g_idx: Tensor, layout: Layout) -> Tensor | None:
    """None when the index is the natural order (or all zeros: a writer's way of saying so)."""
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= layout.groups:
        raise ValueError(f"tensor {name}: expected groups in [0, {layout.groups}), found [{low}, {high}]")
    natural = torch.arange(layout.in_features, device=g_idx.device) // layout.group_size
    if torch.equal(g_idx.long(), natural) or high == 0:
        return None
    counts = torch.bincount(g_idx.long(), minlength=layout.groups)
    expected = torch.bincount(natural, minlength=layout.groups)
    if not torch.equal(counts, expected):  # every writer fills its groups; only the last may be short
        worst = int((counts != expected).int().argmax())
        raise ValueError(
            f"tensor {name}: expected {int(expected[worst])} channels in group {worst}, found {int(counts[worst])}"
        )
    return g_idx.to(torch.int32)


def _read_gptq(name: str, layout: Layout, tensors: Mapping[str, Tensor], mask_zeros: bool) -> QuantizedWeight:
    unpack = packing.unpack_planar if layout.kind == "gptq_p" else packing.unpack_words
    codes = packing.unpack_rows(
        tensors["qweight"].t(), lambda rows: unpack(rows, layout.bits, layout.in_features), _codes(tensors, layout)
    )
    g_idx = _check_g_idx(f"{name}.g_idx", tensors["g_idx"], layout) if "g_idx" in tensors else None
    zeros = None
    if "qzeros" in tensors:
        stored = unpack(tensors["qzeros"], layout.bits, layout.out_features)
        group = (
            torch.arange(layout.in_features, device=codes.device) // layout.group_size
            if g_idx is None
            else g_idx.long()
        )
        offset = layout.zero_offset
        if layout.kind == "gptq":
            offset = stored_zero_offset(stored, codes, group, layout)
        if not mask_zeros:
            zeros = stored.to(torch.int16) + offset
        else:
            zeros = (stored + offset) & (2**layout.bits - 1)
            zeros = _none_if_symmetric(zeros, layout.bits)
    return _weight(layout, codes, tensors["scales"], zeros, g_idx)


def _write_gptq(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    pack = packing.pack_planar if layout.kind == "gptq_p" else packing.pack_words
    out = {"qweight": pack(weight.codes, layout.bits).t().contiguous(), "scales": weight.scales}
    if "qzeros" in layout.tensors:
        stored = (_zeros(weight).to(torch.int16) - layout.zero_offset) & (2**layout.bits - 1)
        out["qzeros"] = pack(stored.to(torch.uint8), layout.bits)
    if "g_idx" in layout.tensors:
        out["g_idx"] = weight.group_index().to(torch.int32)
    return out


def _read_awq_gemm(name: str, layout: Layout, tensors: Mapping[str, Tensor], mask_zeros: bool) -> QuantizedWeight:
    codes = _codes(tensors, layout)
    packing.unpack_rows(tensors["qweight"], packing.unpack_awq_words, codes.t())
    zeros = packing.unpack_awq_words(tensors["qzeros"]) if "qzeros" in tensors else None
    return _weight(layout, codes, tensors["scales"], _none_if_symmetric(zeros, 4), None)


def _write_awq_gemm(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    out = {"qweight": packing.pack_awq_words(weight.codes.t().contiguous()), "scales": weight.scales}
    if "qzeros" in layout.tensors:
        out["qzeros"] = packing.pack_awq_words(_zeros(weight))
    return out


def _read_awq_gemv(name: str, layout: Layout, tensors: Mapping[str, Tensor], mask_zeros: bool) -> QuantizedWeight:
    codes = packing.unpack_rows(
        tensors["qweight"], lambda rows: packing.unpack_words(rows, 4, layout.in_features), _codes(tensors, layout)
    )
    zeros = packing.unpack_words(tensors["qzeros"], 4, layout.groups).t().contiguous()
    scales = _without_padding(f"{name}.scales", tensors["scales"].t(), layout)
    return _weight(layout, codes, scales, _none_if_symmetric(zeros, 4), None)


def _without_padding(name: str, scales: Tensor, layout: Layout) -> Tensor:
    """`[8 W, N]` -> `[G, N]`. Shapes do not tell the group size, but padding is zeros, and no group's scales are."""
    filled = int(scales.ne(0).any(1).sum())
    if filled != layout.groups and filled > 0:
        raise ValueError(
            f"tensor {name}: expected scales of {layout.groups} groups of {layout.group_size}, as quantization_config "
            f"says, found {filled} groups"
        )
    return scales[: layout.groups].contiguous()


def _write_awq_gemv(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    width = gemv_width(layout.in_features, layout.group_size)
    pad = (0, width * 8 - layout.groups)
    zeros = torch.nn.functional.pad(_zeros(weight).t(), pad)
    scales = torch.nn.functional.pad(weight.scales.t(), pad)
    return {"qweight": packing.pack_words(weight.codes, 4), "qzeros": packing.pack_words(zeros, 4), "scales": scales}


def _read_interleaved(name: str, layout: Layout, tensors: Mapping[str, Tensor], mask_zeros: bool) -> QuantizedWeight:
    codes = packing.unpack_interleaved(tensors["qweight"])
    suffix = layout.zeros_name
    scales = _without_padding(f"{name}.scales", tensors["scales"], layout)
    check_finite(f"{name}.scales", scales)
    scaled = tensors[suffix][: layout.groups].float()
    zeros = torch.round(torch.where(scales == 0, 0.0, -scaled / scales.float()))
    low, high = float(zeros.min()), float(zeros.max())
    if not (low >= 0 and high <= 15):
        raise ValueError(
            f"tensor {name}.{suffix}: expected minus scale times a zero in [0, 15], found zeros in [{low}, {high}]"
        )
    return _weight(layout, codes, scales, _none_if_symmetric(zeros.to(torch.uint8), 4), None)


def _write_interleaved(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    pad = (0, 0, 0, gemv_width(layout.in_features, layout.group_size) * 8 - layout.groups)
    scaled = (-weight.scales.float() * _zeros(weight).float()).to(weight.scales.dtype)
    return {
        "qweight": packing.pack_interleaved(weight.codes),
        "scales": torch.nn.functional.pad(weight.scales, pad),
        layout.zeros_name: torch.nn.functional.pad(scaled, pad),
    }


def _read_compressed(name: str, layout: Layout, tensors: Mapping[str, Tensor], mask_zeros: bool) -> QuantizedWeight:
    if "weight_shape" in tensors:
        shape = [int(size) for size in tensors["weight_shape"]]
        if shape != [layout.out_features, layout.in_features]:
            raise ValueError(
                f"tensor {name}.weight_shape: expected {[layout.out_features, layout.in_features]}, found {shape}"
            )
    unpack = packing.unpack_dense if layout.kind == "compressed_dense" else packing.unpack_whole
    if layout.kind == "int8":
        codes = _from_signed(f"{name}.weight", tensors["weight"], layout.bits)
    else:
        codes = packing.unpack_rows(
            tensors["weight_packed"],
            lambda rows: unpack(rows, layout.bits, layout.in_features),
            _codes(tensors, layout),
        )
    zeros = None
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        if stored.dtype == torch.int8:
            fields = _per_group(_from_signed(f"{name}.weight_zero_point", stored, layout.bits), layout)
        else:
            fields = unpack(stored.t().contiguous(), layout.bits, layout.out_features)
        zeros = _none_if_symmetric(fields, layout.bits)
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None and bool((g_idx == -1).all()):  # never filled in: the natural order
        g_idx = None
    if g_idx is not None:
        g_idx = _check_g_idx(f"{name}.weight_g_idx", g_idx, layout)
    return _weight(layout, codes, _per_group(tensors["weight_scale"], layout), zeros, g_idx)


def _from_signed(name: str, values: Tensor, bits: int) -> Tensor:
    """int8 around zero -> uint8 codes."""
    middle = 1 << (bits - 1)
    low, high = int(values.min()), int(values.max())
    if low < -middle or high >= middle:
        raise ValueError(
            f"tensor {name}: expected values in [{-middle}, {middle}) ({bits} bits), found [{low}, {high}]"
        )
    return (values.to(torch.int16) + middle).to(torch.uint8)


def _to_signed(codes: Tensor, bits: int) -> Tensor:
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def _per_group(values: Tensor, layout: Layout) -> Tensor:
    """`[N, G]`, `[N]` or one -> `[G, N]`."""
    return values.reshape(-1, layout.groups).expand(layout.out_features, -1).t().contiguous()


def _like_file(values: Tensor, layout: Layout, suffix: str) -> Tensor:
    """The inverse of `_per_group`, in the shape of the file's tensor."""
    shape = layout.tensors[suffix].shape
    return values.t()[: shape[0] if shape else 1].reshape(shape).contiguous()


def _write_compressed(layout: Layout, weight: QuantizedWeight) -> dict[str, Tensor]:
    bits, pack = layout.bits, packing.pack_dense if layout.kind == "compressed_dense" else packing.pack_whole
    out = {"weight_scale": _like_file(weight.scales, layout, "weight_scale")}
    if layout.kind == "int8":
        out["weight"] = _to_signed(weight.codes, bits)
    else:
        out["weight_packed"] = pack(weight.codes, bits)
    zeros = layout.tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == "I8":
        out["weight_zero_point"] = _like_file(_to_signed(_zeros(weight), bits), layout, "weight_zero_point")
    elif zeros is not None:
        out["weight_zero_point"] = pack(_zeros(weight), bits).t().contiguous()
    if "weight_shape" in layout.tensors:
        out["weight_shape"] = torch.tensor([layout.out_features, layout.in_features])
    if "weight_g_idx" in layout.tensors:
        out["weight_g_idx"] = weight.group_index().to(torch.int32)
    return out


def _codes(tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Room for the codes, `[N, K]` uint8."""
    some = next(iter(tensors.values()))
    return torch.empty((layout.out_features, layout.in_features), dtype=torch.uint8, device=some.device)


def _weight(
    layout: Layout, codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None
) -> QuantizedWeight:
    return QuantizedWeight(
        codes=codes, scales=scales, zeros=zeros, g_idx=g_idx, bits=layout.bits, group_size=layout.group_size
    )


def _none_if_symmetric(zeros: Tensor | None, bits: int) -> Tensor | None:
    return None if zeros is None or bool((zeros == 2 ** (bits - 1)).all()) else zeros


def _zeros(weight: QuantizedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8, device=weight.codes.device)


_READERS = {
    "gptq": _read_gptq,
    "gptq_p": _read_gptq,
    "awq_gemm": _read_awq_gemm,
    "awq_gemv": _read_awq_gemv,
    "awq_gemv_fast": _read_interleaved,
    "llm_awq": _read_interleaved,
    "compressed": _read_compressed,
    "compressed_dense": _read_compressed,
    "int8": _read_compressed,
}
_WRITERS = {
    "gptq": _write_gptq,
    "gptq_p": _write_gptq,
    "awq_gemm": _write_awq_gemm,
    "awq_gemv": _write_awq_gemv,
    "awq_gemv_fast": _write_interleaved,
    "llm_awq": _write_interleaved,
    "compressed": _write_compressed,
    "compressed_dense": _write_compressed,
    "int8": _write_compressed,
}
