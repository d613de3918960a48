"""How a file stores one linear: names, dtypes and shapes, recognised from the file's header.

The label in `quantization_config` only breaks ties and states what was promised (bits): what is stored is read off the
tensors themselves. A set of tensors that fits no known layout is refused with the tensor, what was expected and what
was found; nothing is guessed.

| kind | bits | qweight | zeros | scales |
| --- | --- | --- | --- | --- |
| gptq | 2 3 4 8 | int32 [K * bits / 32, N] | qzeros int32 [G, N * bits / 32] | [G, N] |
| gptq_p | 2 to 8 | as gptq, planar words; only the label tells it from gptq | as gptq | [G, N] |
| awq_gemm | 4 | int32 [K, N / 8] | qzeros int32 [G, N / 8] | [G, N] |
| awq_gemv | 4 | int32 [N, K / 8] | qzeros int32 [N, W] | [N, 8 W] |
| awq_gemv_fast | 4 | int16 [N / 4, K] | qzeros fp16 [8 W, N], minus scale * zero | [8 W, N] |
| llm_awq | 4 | int16 [N / 4, K] | scaled_zeros fp16 [8 W, N] | [8 W, N] |
| compressed | 2 to 8 | weight_packed int32 [N, K / P] | weight_zero_point int32 [N / P, G] | weight_scale [N, G] |
| int8 | 2 to 8 | weight int8 [N, K] | weight_zero_point int8 [N, G] | weight_scale [N, G] |

P = 32 // bits, idle bits at the top. Newer compressed-tensors packs 3, 5, 6 and 7 bits without them (compressed_dense):
[N, K * bits / 32] and [N * bits / 32, G], rounded up. int8 values lie around zero: code or zero point minus the
midpoint. compressed-tensors also writes `weight_scale` as [N] or [1] where G = 1, and int8 zero points beside packed
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hf_paged.quant.packing import BITS, PLANAR_BITS, dense_words_for, whole_words_for, words_for

COMPRESSED = ("compressed", "compressed_dense", "int8")  # kinds of compressed-tensors
FLOATS = ("F16", "BF16", "F32")
PACKED_SUFFIXES = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "scaled_zeros",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
REMEDY = (
    "nvfp4, mxfp4, marlin and sparse layouts are not read: re-save the model as "
    "`pack-quantized`, `float-quantized`, GPTQ or AWQ"
)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor as a safetensors header describes it: `dtype` in the header's words (I32, F16, F8_E4M3, ...)."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Label:
    """What `quantization_config` promises for one module. None: it does not say."""

    bits: int | None = None
    group_size: int | None = None  # -1: one group over all input channels
    method: str = "gptq"  # gptq | awq | compressed-tensors
    zero_offset: int = 1  # 1: GPTQ v1 stores zero - 1; 0: gptq_v2 and gptq_p store the zero
    planar: bool = False  # GPTQ words are planar (gptq_p)
    symmetric: bool | None = None
    act_order: bool | None = None  # groups hold channels that `g_idx` alone tells
    floating: bool = False  # weights are small floats, not integers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One linear in a file: everything needed to read its tensors and to write them back."""

    kind: str
    in_features: int
    out_features: int
    bits: int
    group_size: int
    zero_offset: int  # GPTQ only: what the label says; the data may overrule it at reading
    tensors: Mapping[str, TensorSpec]
    act_order: bool = False  # what the label says: `g_idx` is not the natural order
    asymmetric: bool = False  # likewise: zero points are not all the midpoint
    stored_offset: int | None = None  # GPTQ only: what all layers of the file say together, where that is clear

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def method(self) -> str:
        """As `Label.method`."""
        awq = self.kind.startswith(("awq", "llm_awq"))
        return "awq" if awq else "compressed-tensors" if self.kind in COMPRESSED else "gptq"

    @property
    def codes_name(self) -> str:
        return "weight" if self.kind == "int8" else "weight_packed" if self.kind in COMPRESSED else "qweight"

    @property
    def zeros_name(self) -> str:
        if self.kind in COMPRESSED:
            return "weight_zero_point"
        return "scaled_zeros" if self.kind == "llm_awq" else "qzeros"

    @property
    def scales_name(self) -> str:
        return "weight_scale" if self.kind in COMPRESSED else "scales"


def identify(name: str, found: Mapping[str, TensorSpec], in_features: int, out_features: int, label: Label) -> Layout:
    """The layout of module `name` (`in_features` K, `out_features` N) from its tensors in the file.

    Raises ValueError naming the tensor, what was expected and what was found.
    """
    kinds = _kinds(name, found, label)
    failures: list[tuple[int, str]] = []
    for kind in kinds:
        for bits in _candidate_bits(kind, label):
            group_size = _group_size(kind, found, in_features, label)
            expected = _expected(kind, found, in_features, out_features, bits, group_size)
            ragged = _ragged(name, kind, in_features, out_features, group_size)
            problem = _mismatch(name, kind, bits, expected, found, ragged)
            if problem is None:
                _check_bits(name, bits, label)
                _check_promised(name, kind, found, label)
                return Layout(
                    kind=kind,
                    in_features=in_features,
                    out_features=out_features,
                    bits=bits,
                    group_size=group_size,
                    zero_offset=label.zero_offset,
                    tensors=dict(found),
                    act_order=label.act_order is True,
                    asymmetric=label.symmetric is False,
                )
            failures.append(problem)
    nearest = max(failures, key=lambda failure: failure[0])[1]  # the label's on a tie
    words = found.get("weight_packed", found.get("qweight"))
    raise ValueError(nearest if words is None or words.dtype in ("I32", "I16") else f"{nearest}; {REMEDY}")


def _ragged(name: str, kind: str, in_features: int, out_features: int, group_size: int) -> str | None:
    """Why a layer of this shape cannot be stored in this layout, as a sentence."""
    if not kind.startswith(("awq", "llm")):
        return None
    if in_features % group_size:
        return (
            f"module {name}: {in_features} input channels are no multiple of group_size {group_size}, which AWQ "
            "cannot store (GPTQ can): quantize with a smaller group_size"
        )
    step_in, step_out = {"awq_gemm": (1, 8), "awq_gemv": (8, 1)}.get(kind, (64, 4))
    if in_features % step_in or out_features % step_out:
        return (
            f"module {name}: {in_features} input by {out_features} output channels do not fill the words of layout "
            f"{kind}, which holds {step_in} by {step_out}: leave the module plain (`modules_to_not_convert`)"
        )
    return None


def _kinds(name: str, found: Mapping[str, TensorSpec], label: Label) -> list[str]:
    if "weight_packed" in found:
        return ["compressed", "compressed_dense"]
    weight = found.get("weight", TensorSpec(dtype="", shape=()))
    if weight.dtype == "I8":
        if label.floating:
            raise ValueError(f"tensor {name}.weight: expected F8_E4M3, as quantization_config says, found {weight}")
        return ["int8"]
    if "qweight" not in found:
        some = next(iter(found))
        raise ValueError(
            f"tensor {name}.{some} ({found[some]}) has no packed weight beside it: expected "
            f"{name}.qweight, {name}.weight_packed or a quantized {name}.weight; {REMEDY}"
        )
    if label.planar:
        return ["gptq_p"]
    if found["qweight"].dtype == "I16" and label.method == "awq":
        return ["llm_awq" if "scaled_zeros" in found else "awq_gemv_fast"]
    awq = ["awq_gemm", "awq_gemv"]
    return [*awq, "gptq"] if label.method == "awq" else ["gptq", *awq]


def _candidate_bits(kind: str, label: Label) -> list[int]:
    every = (*BITS, *PLANAR_BITS)
    allowed = {"gptq": BITS, "gptq_p": every, "compressed": every, "compressed_dense": PLANAR_BITS, "int8": (8,)}.get(
        kind, (4,)
    )
    first = [label.bits] if label.bits in allowed else []
    if kind == "int8" and label.bits in every:
        return [label.bits]  # the words do not tell it
    return [*first, *(bits for bits in allowed if bits not in first)]


def _check_bits(name: str, bits: int, label: Label) -> None:
    if label.bits is not None and label.bits != bits:
        raise ValueError(
            f"module {name}: quantization_config says {label.bits} bits, the tensors hold {bits}; correct "
            "`bits`, or add a `dynamic` rule for the module"
        )


def _check_promised(name: str, kind: str, found: Mapping[str, TensorSpec], label: Label) -> None:
    """Refuse a file that lost a tensor which others may lack: without it the weight is another."""
    zeros, order = _PROMISED.get(kind, ("", ""))
    if kind == "int8" and math.prod(found["weight_scale"].shape) < _MANY:
        zeros = ""  # left out where all of them are 0, which a few may be
    for suffix, missed, meaning in (
        (zeros, label.symmetric is False, "quantized with zero points"),
        (order, label.act_order is True, "in act-order"),
    ):
        if suffix and missed and suffix not in found:
            raise ValueError(f"tensor {name}.{suffix} is missing: quantization_config says the weight is {meaning}")


def _group_size(kind: str, found: Mapping[str, TensorSpec], in_features: int, label: Label) -> int:
    promised = label.group_size if label.group_size is not None else 128
    promised = in_features if promised in (-1, 0) else promised
    compressed = kind in COMPRESSED
    scales = found.get("weight_scale" if compressed else "scales")
    if compressed and scales is not None and len(scales.shape) < 2:
        return in_features  # one scale for all, or one to an output channel
    if scales is None or len(scales.shape) != 2 or kind in ("awq_gemv", "awq_gemv_fast", "llm_awq"):
        return promised  # padded group axes do not tell the group size
    groups = scales.shape[1] if compressed else scales.shape[0]
    if groups > 0 and -(-in_features // promised) != groups and in_features % groups == 0:
        return in_features // groups  # the file is consistent with itself: the label's group_size is not the one used
    return min(promised, in_features)


def gemv_width(in_features: int, group_size: int) -> int:
    """AWQ's padded count of zero words per row, W in the table above (`calculate_zeros_width`)."""
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    base = -(-(in_features // group_size) // 8)
    return -(-base // multiple) * multiple


_Expected = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]  # suffix -> allowed dtypes, shape


def _expected(kind: str, found: Mapping[str, TensorSpec], k: int, n: int, bits: int, group_size: int) -> _Expected:
    groups = -(-k // group_size)
    ints = ("I32",)
    if kind in ("gptq", "gptq_p"):
        return {
            "qweight": (ints, (words_for(k, bits), n)),
            "qzeros": (ints, (groups, words_for(n, bits))),
            "scales": (FLOATS, (groups, n)),
            "g_idx": (("I32", "I64"), (k,)),
        }
    if kind == "awq_gemm":
        return {"qweight": (ints, (k, n // 8)), "qzeros": (ints, (groups, n // 8)), "scales": (FLOATS, (groups, n))}
    width = gemv_width(k, group_size)
    if kind == "awq_gemv":
        return {"qweight": (ints, (n, k // 8)), "qzeros": (ints, (n, width)), "scales": (FLOATS, (n, width * 8))}
    if kind in ("awq_gemv_fast", "llm_awq"):
        zeros = "scaled_zeros" if kind == "llm_awq" else "qzeros"
        padded = (width * 8, n)
        return {"qweight": (("I16",), (n // 4, k)), zeros: (FLOATS, padded), "scales": (FLOATS, padded)}
    return _expected_compressed(kind, found, k, n, bits, groups)


def _expected_compressed(
    kind: str, found: Mapping[str, TensorSpec], k: int, n: int, bits: int, groups: int
) -> _Expected:
    """Scales may lack an axis of one, and zero points may be unpacked."""
    scales, zeros = found.get("weight_scale"), found.get("weight_zero_point")
    one = scales is not None and groups == 1 and scales.shape in ((n,), (1,), ())
    grid = scales.shape if scales is not None and one else (n, groups)
    count = dense_words_for if kind == "compressed_dense" else whole_words_for
    unpacked = kind == "int8" or (zeros is not None and zeros.dtype == "I8")
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "weight_scale": (FLOATS, grid),
        "weight_zero_point": (("I8",), grid) if unpacked else (("I32",), (count(n, bits), groups)),
        "weight_g_idx": (("I32", "I64"), (k,)),
    }
    if kind == "int8":
        return {"weight": (("I8",), (n, k)), **expected}
    words = {"weight_packed": (("I32",), (n, count(k, bits)))}
    return {**words, **expected, "weight_shape": (("I64", "I32"), (2,))}


_OPTIONAL = {
    "gptq": ("qzeros", "g_idx"),
    "gptq_p": ("qzeros", "g_idx"),
    "awq_gemm": ("qzeros",),
    "compressed": ("weight_zero_point", "weight_shape", "weight_g_idx"),
    "compressed_dense": ("weight_zero_point", "weight_shape", "weight_g_idx"),
    "int8": ("weight_zero_point", "weight_g_idx"),
}
_MANY = 32  # zero points are not all 0 by chance
_PROMISED = {  # kind -> the tensors of asymmetric weights and of act-order
    "gptq": ("qzeros", "g_idx"),
    "gptq_p": ("qzeros", "g_idx"),
    "awq_gemm": ("qzeros", ""),
    "compressed": ("weight_zero_point", "weight_g_idx"),
    "compressed_dense": ("weight_zero_point", "weight_g_idx"),
    "int8": ("weight_zero_point", "weight_g_idx"),
}


def _mismatch(
    name: str, kind: str, bits: int, expected: _Expected, found: Mapping[str, TensorSpec], ragged: str | None
) -> tuple[int, str] | None:
    """None when the tensors agree, else how many did and the first that did not, as a sentence."""
    what = f"{kind}, {bits} bits"
    agree, problem = 0, ragged
    for suffix, (dtypes, shape) in expected.items():
        tensor = found.get(suffix)
        if tensor is None:
            if suffix not in _OPTIONAL.get(kind, ()):
                problem = problem or f"tensor {name}.{suffix} is missing: expected {dtypes[0]} {list(shape)} ({what})"
        elif tensor.dtype in dtypes and tensor.shape == shape:
            agree += 1
        else:
            wanted = f"{' or '.join(dtypes)} {list(shape)} ({what})"
            problem = problem or f"tensor {name}.{suffix}: expected {wanted}, found {tensor}"
    for suffix in sorted(set(found) - set(expected)):
        problem = problem or f"tensor {name}.{suffix} ({found[suffix]}) does not belong to layout {kind}"
    return None if problem is None else (agree, problem)
