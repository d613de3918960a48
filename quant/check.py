"""The last look at a loaded model: are the values usable, and do the kernels compute what they mean?

`check_kernels` runs one layer per distinct shape and format on a probe input and compares the path that generation will
take with the plain-torch definition: a wrong kernel, driver or compiler ends here and not in a wrong answer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_paged.kernels.fp8_linear import fp8_linear_reference, quantizes_activations
from hf_paged.kernels.packed_weight import TILE_N, packed_linear_reference
from hf_paged.quant.damage import MANY, is_constant
from hf_paged.quant.fp8 import Fp8Linear
from hf_paged.quant.linear import PackedLinear
from hf_paged.quant.scaled_activation import ScaledActivation

_PIECE = 1 << 22  # elements looked at in one go
_CHECKED_ROWS = 256  # output channels, a multiple of the 64 of a tile
_PROBE_ROWS = (1, 17, 100)  # the kernels of few and of many rows, and a masked tail
# relative to the largest output: inputs and output are rounded once to 16 bits (2 ** -8 for bf16), fp8 products once to
# bf16 on a matrix unit that accumulates with about 13 bits
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check_values(model: nn.Module, failed: Container[str] = ()) -> list[str]:
    """Parameters that hold NaN or infinity, or are zeros unlike others of their kind, as sentences. Offloaded (meta)
    parameters are not read, nor those of the modules `failed`, which were not loaded.
    """
    problems = []
    zeros: dict[str, list[str]] = defaultdict(list)  # a kind, its layers as one -> those of nothing but zeros
    kinds: Counter[str] = Counter()
    for name, value in model.named_parameters():
        unread = value.device.type == "meta" or name.rpartition(".")[0] in failed
        if unread or not value.dtype.is_floating_point or value.element_size() < 2:
            continue
        flat = value.detach().reshape(-1)  # in pieces: a sum of flags takes eight bytes for each
        bad = sum(int((~torch.isfinite(piece)).sum()) for piece in flat.split(_PIECE))
        if bad:
            problems.append(f"tensor {name}: expected finite values, found {bad} NaN or infinite of {value.numel()}")
        if name.endswith(".weight"):
            kind = "vector" if value.dim() == 1 else re.sub(r"\d+", "#", name)
            kinds[kind] += 1
            if not any(bool(piece.any()) for piece in flat.split(_PIECE)):  # the first answers for nearly all
                zeros[kind].append(name)
    for name, module in model.named_modules():
        if isinstance(module, ScaledActivation) and module.scales.device.type != "meta" and (module.scales <= 0).any():
            problems.append(f"tensor {name}.scales: expected scales > 0, which activations are divided by")
    # the norms of a Gemma are all zeros before it is trained; a matrix without its like is an embedding or a head
    alone = {kind for kind, count in kinds.items() if count == 1 and kind != "vector"}
    odd = [name for kind, names in zeros.items() if len(names) < kinds[kind] or kind in alone for name in names]
    return problems + [f"tensor {name}: expected a weight, found only zeros: the file is damaged" for name in odd]


def check_order(model: nn.Module, failed: Container[str] = ()) -> list[str]:
    """Linears that alone have an act-order, or the natural order, against what the label says and others do, as
    sentences. Where all contradict the label, the label lies."""
    keep: Counter[bool] = Counter()
    broken: list[tuple[str, bool]] = []
    for name, module in model.named_modules():
        suffix = _index_name(module)
        # an expert that no calibration text was routed to is rounded in the natural order
        if isinstance(module, PackedLinear) and suffix and name not in failed and ".experts." not in name:
            promised = module.layout.act_order
            if promised == (module.perm is not None):
                keep[promised] += 1
            else:
                broken.append((f"{name}.{suffix}", promised))
    words = {True: "an act-order", False: "the natural order"}
    return [
        f"tensor {name}: expected {words[promised]}, as {keep[promised]} others have, found {words[not promised]}: "
        "the file is damaged"
        for name, promised in broken
        if keep[promised]
    ]


def check_zeros(model: nn.Module, failed: Container[str] = ()) -> list[str]:
    """Linears that alone have no zero points but the midpoint, which is 0 in signed ones, as sentences: a file holds
    those behind all codes, and zeros where it was not written to its end. Where all are so, the label lies."""
    kept, lost = 0, []
    for name, module in model.named_modules():
        if not isinstance(module, PackedLinear) or name in failed or not module.layout.asymmetric:
            continue
        suffix, scales = module.layout.zeros_name, module.scales
        spec = module.layout.tensors.get(suffix)
        if spec is None or spec.dtype != "I8" or scales.numel() < MANY:
            continue
        if module.zeros is not None:
            kept += 1
        elif not scales.is_meta and not is_constant(scales):  # else a weight of zeros
            lost.append(f"{name}.{suffix}")
    return [
        f"tensor {name}: expected zero points that differ, as {kept} others have, found only 0: the file is damaged"
        for name in lost
        if kept
    ]


def _index_name(module: nn.Module) -> str | None:
    """The tensor that holds the order of channels, where there are groups to tell it."""
    if not isinstance(module, PackedLinear) or module.layout.groups == 1:
        return None
    return next((name for name in ("g_idx", "weight_g_idx") if name in module.layout.tensors), None)


def check_kernels(model: nn.Module) -> None:
    """Raise RuntimeError naming the first layer whose kernel disagrees with its definition. CUDA layers only."""
    seen = set()
    for name, module in model.named_modules():
        if not isinstance(module, (PackedLinear, Fp8Linear)):
            continue
        value = next(module.parameters())
        if not value.is_cuda:
            continue
        kind = (type(module), module.in_features, module.out_features, str(module.layout), str(value.device))
        if kind not in seen:
            seen.add(kind)
            for dtype in (torch.float16, torch.bfloat16):
                check_layer(name, module, dtype, value.device)


@torch.no_grad()
def check_layer(name: str, module: PackedLinear | Fp8Linear, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(0)
    for rows in _PROBE_ROWS:
        x = torch.randn(rows, module.in_features, generator=generator, device=device).to(dtype)
        result = module(x).float()
        error = 0.0
        for begin, end in _row_ranges(module.out_features):
            expected = reference(module, x, begin, end).float()
            error = max(
                error, float((result[:, begin:end] - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
            )
        allowed = _TOLERANCE[torch.bfloat16 if isinstance(module, Fp8Linear) else dtype]
        if not error <= allowed:
            raise RuntimeError(
                f"{name} ({module.extra_repr()}): the kernel differs from its definition by {error:.2e} of the "
                f"largest output ({dtype}, {rows} rows, allowed {allowed:.0e}). Please report this; "
                "self_check=False in the quantization_config skips the check"
            )


def _row_ranges(out_features: int) -> list[tuple[int, int]]:
    """Output channels to compare, cut at tiles: the first and the last. All of a large layer in fp32 would not fit
    beside a model that fills the device."""
    if out_features <= 2 * _CHECKED_ROWS:
        return [(0, out_features)]
    last = (out_features - 1) // _CHECKED_ROWS * _CHECKED_ROWS
    return [(0, _CHECKED_ROWS), (last, out_features)]


def reference(module: PackedLinear | Fp8Linear, x: Tensor, begin: int, end: int) -> Tensor:
    """Outputs `[begin, end)` of what `module(x)` means, in plain torch; `x` is `[M, K]`, `begin` a multiple of 64."""
    bias = None if module.bias is None else module.bias[begin:end]
    if isinstance(module, PackedLinear):
        whole = module.packed_weight
        part = replace(
            whole,
            packed=whole.packed[begin // TILE_N : -(-end // TILE_N)],
            scales=whole.scales[:, begin:end],
            zeros=None if whole.zeros is None else whole.zeros[:, begin:end],
            out_features=end - begin,
        )
        return packed_linear_reference(x, part, bias)
    weight = module.fp8_weight
    if not quantizes_activations(x, weight):
        weight = replace(weight, dynamic=False, input_scale=None)
    rows = weight.block[0]
    if rows < module.out_features and begin % rows == 0:
        scale = weight.scale[begin // rows : -(-end // rows)]
        return fp8_linear_reference(x, replace(weight, codes=weight.codes[begin:end], scale=scale), bias)
    if rows >= module.out_features:
        return fp8_linear_reference(x, replace(weight, codes=weight.codes[begin:end]), bias)
    return fp8_linear_reference(x, weight, module.bias)[:, begin:end]
