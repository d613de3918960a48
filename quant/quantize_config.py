"""What `hf_paged.quantize` may be told. Everything is checked on construction, and `resolved()` says what "auto" means.

| method | bits | group_size | format | calibration |
| --- | --- | --- | --- | --- |
| gptq | 2 3 4 8 | any, -1 | gptq (symmetric), gptq_v2 (asymmetric) | needed |
| awq | 2 3 4 8 | any that divides K, -1 | awq (4 bits), gptq_v2 (others) | needed |
| rtn | 2 3 4 8 | any, -1 | as gptq | none |
| int8 | 8 | any that divides K, -1 (default) | compressed-tensors | none |
| fp8 | 8 | per output channel | compressed-tensors | none |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_paged.config import check_bool, check_float, check_int, refuse

METHODS = ("awq", "gptq", "rtn", "fp8", "int8")
FORMATS = ("auto", "awq", "gptq", "gptq_v2", "compressed-tensors")
CALIBRATED = ("awq", "gptq")
_DEFAULT_GROUP = 128
_TOKENS, _SEQLEN = 128 * 2048, 2048  # of calibration text, and of one window of it
_OWN_SETTINGS = {
    "static_groups": ("gptq",),
    "scale": ("gptq",),
    "clip": ("awq",),
    "descent": CALIBRATED,
    "true_sequential": CALIBRATED,
    "damping": CALIBRATED,
    "samples": CALIBRATED,
    "seqlen": CALIBRATED,
    "seed": CALIBRATED,
    "activations_from": ("fp8",),
}


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Settings of one quantization. None and "auto" are chosen by the method; `resolved()` says how.

    Raises ValueError for a value, or a combination, that no file can hold.
    """

    method: str = "gptq"
    bits: int | None = None  # None: 4, and 8 for fp8 and int8
    group_size: int | None = None  # input channels per scale, -1: all of a row; None: 128, and -1 for fp8 and int8
    sym: bool | None = None  # the zero point is the middle; None: yes, and no for awq
    format: str = "auto"  # the tensors and the quantization_config that are written
    act_order: bool | None = None  # gptq: channels of large activations first; None: with gptq and static groups
    static_groups: bool = True  # gptq with act_order: groups stay where they lie in the file
    damping: float = 0.01  # gptq, awq: added to the Hessian's diagonal, as a share of its mean
    mse: bool | None = None  # search each group's range for the least squared error; None: yes with gptq
    scale: bool = False  # gptq: scale channels first, as AWQ does (which always does)
    asymmetry: float | None = None  # gptq, awq: share of earlier layers' errors that a linear makes up for; None: 0.5
    true_sequential: bool = True  # gptq, awq: later linears of a layer see what earlier ones became
    clip: bool = True  # awq: search each group's range
    descent: bool = True  # gptq, awq: then move codes, one at a time, to where the output's error is least
    activations_from: int = 1  # fp8: the first layer whose inputs are rounded too; those before it keep 16 bits
    skip: tuple[str, ...] = ()  # regular expressions; linears whose name one of them is found in stay plain
    samples: int | None = None  # gptq, awq: windows of calibration text; None: as many as hold 262,144 tokens
    seqlen: int | None = None  # gptq, awq: tokens per window; None: 2048, or the model's context where that is less
    seed: int = 0  # gptq, awq: which windows are drawn

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            refuse("method", self.method, " | ".join(METHODS))
        if self.format not in FORMATS:
            refuse("format", self.format, " | ".join(FORMATS))
        for name in ("static_groups", "scale", "true_sequential", "clip", "descent"):
            check_bool(name, getattr(self, name))
        for name in ("sym", "mse", "act_order"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.bits is not None and (not isinstance(self.bits, int) or self.bits not in (2, 3, 4, 8)):
            refuse("bits", self.bits, "2, 3, 4 or 8")
        size = self.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1)):
            refuse("group_size", size, "an integer >= 1, or -1 for all of a row")
        check_float("damping", self.damping, minimum=0.0, maximum=1.0)
        if self.damping in (0, 1):
            refuse("damping", self.damping, "a number between 0 and 1")
        if self.asymmetry is not None:
            check_float("asymmetry", self.asymmetry, minimum=0.0, maximum=1.0)
        if self.samples is not None:
            check_int("samples", self.samples, minimum=1)
        if self.seqlen is not None:
            check_int("seqlen", self.seqlen, minimum=2)
        check_int("activations_from", self.activations_from, minimum=0)
        check_int("seed", self.seed, minimum=0, maximum=2**63 - 1)
        object.__setattr__(self, "skip", _patterns(self.skip))
        self._check_method()
        self._check_format()

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations."""
        return self.method in CALIBRATED

    def resolved(self, context: int | None = None) -> QuantizeConfig:
        """The same with nothing left to choose; `context`: the tokens that the model was made for, if it says so."""
        if not self.calibrated:
            return replace(self, **self._choices())
        seqlen = self.seqlen or min(_SEQLEN, context or _SEQLEN)
        samples = self.samples or max(1, _TOKENS // seqlen)
        return replace(self, **self._choices(), seqlen=seqlen, samples=samples)

    def _choices(self) -> dict[str, Any]:
        whole = self.method in ("fp8", "int8")
        sym = self.method != "awq" if self.sym is None else self.sym
        bits = self.bits or (8 if whole else 4)
        form = self.format
        if form == "auto":
            if whole:
                form = "compressed-tensors"
            elif self.method == "awq" and bits == 4:
                form = "awq"
            else:  # v1 stores zero - 1 and its readers disagree about a zero point of 0: only symmetric files are safe
                form = "gptq" if sym else "gptq_v2"
        group_size = self.group_size if self.group_size is not None else (-1 if whole else _DEFAULT_GROUP)
        gptq = self.method == "gptq"
        return {
            "bits": bits,
            "group_size": group_size,
            "sym": sym,
            "format": form,
            "act_order": gptq and self.static_groups if self.act_order is None else self.act_order,
            "mse": gptq if self.mse is None else self.mse,
            "asymmetry": (0.5 if self.calibrated else 0.0) if self.asymmetry is None else self.asymmetry,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _check_method(self) -> None:
        if self.method in ("fp8", "int8"):
            if self.bits not in (None, 8):
                refuse("bits", self.bits, f"8 with method={self.method!r}")
            if self.sym is False:
                refuse("sym", self.sym, f"True with method={self.method!r}")
        if self.method == "fp8" and self.group_size not in (None, -1):
            refuse("group_size", self.group_size, "-1 with method='fp8': one scale per output channel")
        if self.method != "gptq" and self.act_order:
            refuse("act_order", self.act_order, f"False with method={self.method!r}; only gptq orders channels")
        if self.mse and self.method not in ("gptq", "rtn"):
            refuse("mse", self.mse, f"False with method={self.method!r}")
        if self.asymmetry and not self.calibrated:
            refuse("asymmetry", self.asymmetry, f"nothing with method={self.method!r}, which looks at no activations")
        for name, owners in _OWN_SETTINGS.items():
            default = type(self).__dataclass_fields__[name].default
            if self.method not in owners and getattr(self, name) != default:
                only = " and ".join(owners)
                refuse(name, getattr(self, name), f"{default} with method={self.method!r}; it belongs to {only}")

    def _check_format(self) -> None:
        chosen = self._choices()
        form = chosen["format"]
        if (self.method in ("fp8", "int8")) != (form == "compressed-tensors"):
            refuse("format", self.format, "compressed-tensors with method fp8 or int8, another with other methods")
        if form == "awq" and (self.bits not in (None, 4) or (chosen["act_order"] and not self.static_groups)):
            refuse("format", self.format, "gptq or gptq_v2: awq files hold 4 bits, and groups in the natural order")
        if form == "gptq" and not chosen["sym"]:
            refuse("format", self.format, "gptq_v2 with sym=False: readers of gptq disagree about a zero point of 0")


def _patterns(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse("skip", value, "a sequence of regular expressions")
    patterns = tuple(value)
    for pattern in patterns:
        _check_pattern(pattern)
    return patterns


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"skip={pattern!r} is no regular expression: {error}") from error
