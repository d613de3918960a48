"""Quantized files written from the formats' definitions, independently of the package's own packing.

`pack_linear` packs integers the slow, obvious way (a bit string), `quantize` rounds a weight to the nearest code, and
`write_model` saves a tiny model with every linear quantized, beside a plain model that holds the dequantized weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INPUT = torch.arange(3, 25).reshape(2, 11)  # token ids
COMPRESSED = ("compressed", "compressed_dense", "int8")
EXACT = 1e-5  # fp32 on both sides: what remains is the order of the sums


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout to write."""

    kind: str = "gptq"  # gptq gptq_p awq_gemm awq_gemv awq_gemv_fast llm_awq compressed compressed_dense int8
    unpacked_zeros: bool = False  # compressed: zero points as compressed-tensors wrote them at first
    bits: int = 4
    group_size: int = 32  # -1: one group
    symmetric: bool = False
    act_order: bool = False
    version: int = 1  # GPTQ zero points: 1 = zero - 1, 2 = as they are
    scales: torch.dtype = torch.float16

    def __str__(self) -> str:
        flags = f"{'sym' if self.symmetric else 'asym'}{'-actorder' if self.act_order else ''}-v{self.version}"
        flags += "-unpacked" if self.unpacked_zeros else ""
        return f"{self.kind}-{self.bits}bit-g{self.group_size}-{flags}"


@dataclass(frozen=True, kw_only=True)
class Integers:
    """What was written: codes [N, K], zeros and scales [groups, N], g_idx [K]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def dequantize(self) -> Tensor:
        """[N, K] fp32, exact."""
        zeros, scales = self.zeros[self.g_idx.long()].t(), self.scales[self.g_idx.long()].t()
        return (self.codes.float() - zeros.float()) * scales.float()


def bit_string(fields: np.ndarray, bits: int) -> Tensor:
    """[R, C] unsigned fields -> [R, words] int32: each row one little-endian bit string, padded to whole words."""
    planes = (fields[..., None] >> np.arange(bits)) & 1
    stream = planes.reshape(fields.shape[0], -1).astype(np.uint8)
    step = 96 if bits == 3 else 32
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % step)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4").copy())


def whole(fields: np.ndarray, bits: int) -> Tensor:
    """As `bit_string`, but no field straddles two words: compressed-tensors leaves the bits at the top idle."""
    step = 32 // bits
    padded = np.pad(fields, ((0, 0), (0, -fields.shape[1] % step))).reshape(fields.shape[0], -1, step)
    words = (padded.astype(np.uint32) << (bits * np.arange(step, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return torch.from_numpy(words.view("<i4").copy())


def dense(fields: np.ndarray, bits: int) -> Tensor:
    """As `bit_string`, but padded to whole words only, whatever the width."""
    planes = (fields[..., None] >> np.arange(bits)) & 1
    stream = planes.reshape(fields.shape[0], -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4").copy())


def planar(fields: np.ndarray, bits: int) -> Tensor:
    """As `bit_string`, but every 32 fields are cut into planes of 4, 2 and 1 bits, low bits first."""
    if bits in (2, 4, 8):
        return bit_string(fields, bits)
    words = []
    for block in np.split(fields, fields.shape[1] // 32, axis=1):
        low = 0
        for width in (4, 2, 1):
            if bits - low >= width:
                words.append(bit_string((block >> low) & ((1 << width) - 1), width))
                low += width
    return torch.cat(words, dim=1)


def interleave(codes: np.ndarray) -> Tensor:
    """AWQ's interleaved int16 words, one element at a time, from the description of its kernel."""
    n, k = codes.shape
    words = np.zeros((n // 4, k), dtype=np.uint16)
    for column in range(k):
        block, inside = divmod(column, 32)
        quarter, eighth, half = inside // 8, (inside % 8) // 2, inside % 2  # pairs 0,1,8,9,16,17,24,25,2,3,...
        position = eighth * 8 + quarter * 2 + half
        group, value = divmod(position, 8)  # every eight stored as 0,2,4,6,1,3,5,7
        position = block * 32 + group * 8 + AWQ_ORDER.index(value)
        for row in range(n):
            flat = (row % 4) * 64 + position % 64  # four rows after one another per 64 columns
            words[row // 4, position // 64 * 64 + flat // 4] |= int(codes[row, column]) << (4 * (flat % 4))
    return torch.from_numpy(words.view(np.int16).copy())


def pack_linear(cell: Cell, integers: Integers) -> dict[str, Tensor]:
    """The file tensors of one linear, by suffix."""
    codes = integers.codes.numpy().astype(np.int64)
    zeros = integers.zeros.numpy().astype(np.int64)
    n, groups, bits = len(codes), zeros.shape[0], cell.bits
    if cell.kind in ("gptq", "gptq_p"):
        stored = (zeros - (1 if cell.kind == "gptq" and cell.version == 1 else 0)) % (1 << bits)
        # words run along K in qweight and along N in qzeros
        string = planar if cell.kind == "gptq_p" else bit_string
        return {
            "qweight": string(codes, bits).t().contiguous(),
            "qzeros": string(stored, bits),
            "scales": integers.scales,
            "g_idx": integers.g_idx,
        }
    if cell.kind in COMPRESSED:
        return _compressed(cell, integers)
    if cell.kind == "awq_gemm":

        def awq(fields: np.ndarray) -> Tensor:
            return bit_string(fields.reshape(fields.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(fields.shape[0], -1), 4)

        return {"qweight": awq(codes.T), "qzeros": awq(zeros), "scales": integers.scales}
    width = -(-groups // 8)
    multiple = {64: 2, 32: 4}.get(cell.group_size, 1)
    width = -(-width // multiple) * multiple
    padded = torch.zeros(n, width * 8, dtype=integers.scales.dtype)
    padded[:, :groups] = integers.scales.t()
    if cell.kind == "awq_gemv":
        fields = np.zeros((n, width * 8), dtype=np.int64)
        fields[:, :groups] = zeros.T
        return {"qweight": bit_string(codes, 4), "qzeros": bit_string(fields, 4), "scales": padded}
    scaled = torch.zeros_like(padded)
    scaled[:, :groups] = -(integers.scales.float() * integers.zeros.float()).t().to(padded.dtype)
    name = "scaled_zeros" if cell.kind == "llm_awq" else "qzeros"
    return {"qweight": interleave(codes), "scales": padded.t().contiguous(), name: scaled.t().contiguous()}


def _compressed(cell: Cell, integers: Integers) -> dict[str, Tensor]:
    codes, zeros, bits = integers.codes.numpy().astype(np.int64), integers.zeros.numpy().astype(np.int64), cell.bits
    middle = 1 << (bits - 1)  # int8 values lie around zero
    words = dense if cell.kind == "compressed_dense" else whole
    out = {"weight_scale": integers.scales.t().contiguous()}
    if cell.kind == "int8":
        out["weight"] = torch.from_numpy((codes - middle).astype(np.int8))
    else:
        out |= {"weight_packed": words(codes, bits), "weight_shape": torch.tensor(codes.shape)}
    if not cell.symmetric and (cell.kind == "int8" or cell.unpacked_zeros):
        out["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8)).t().contiguous()
    elif not cell.symmetric:
        out["weight_zero_point"] = words(zeros, bits).t().contiguous()
    if cell.act_order:
        out["weight_g_idx"] = integers.g_idx
    return out


def random_integers(cell: Cell, n: int, k: int, seed: int = 0) -> Integers:
    """Uniform codes, zeros around the middle, scales that keep an activation's size."""
    generator = torch.Generator().manual_seed(seed)
    group_size = k if cell.group_size == -1 else cell.group_size
    groups, levels = -(-k // group_size), 1 << cell.bits
    codes = torch.randint(0, levels, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.full((groups, n), levels // 2, dtype=torch.uint8)
    if not cell.symmetric:
        zeros = torch.randint(0, levels, (groups, n), generator=generator, dtype=torch.uint8)
    scales = ((torch.rand(groups, n, generator=generator) + 0.5) / levels / k**0.5).to(cell.scales)
    g_idx = torch.arange(k, dtype=torch.int32) // group_size
    if cell.act_order:
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]  # whatever `n` is
    return Integers(codes=codes, zeros=zeros, scales=scales, g_idx=g_idx)


def quantize(weight: Tensor, cell: Cell, seed: int = 0) -> Integers:
    """Round `[N, K]` to the nearest codes of its groups."""
    n, k = weight.shape
    base = random_integers(cell, n, k, seed)
    levels = (1 << cell.bits) - 1
    groups = base.zeros.shape[0]
    low = torch.zeros(groups, n)
    high = torch.zeros(groups, n)
    for group in range(groups):
        part = weight[:, base.g_idx == group].float()
        low[group], high[group] = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
    if cell.symmetric:
        high = torch.maximum(high, -low)
        scales, zeros = high / (levels // 2), torch.full_like(high, (levels + 1) // 2)
    else:
        scales = (high - low) / levels
        zeros = torch.round(-low / scales.clamp_min(1e-8)).clamp(0, levels)
    scales = scales.clamp_min(1e-4).to(cell.scales)
    index = base.g_idx.long()
    codes = torch.round(weight.float() / scales.float()[index].t()) + zeros[index].t()
    return Integers(
        codes=codes.clamp(0, levels).to(torch.uint8), zeros=zeros.to(torch.uint8), scales=scales, g_idx=base.g_idx
    )


def config_of(cell: Cell) -> dict[str, object]:
    """The `quantization_config` that a tool writes for `cell`."""
    if cell.kind in ("gptq", "gptq_p"):
        return {
            "quant_method": "gptq",
            "bits": cell.bits,
            "group_size": cell.group_size,
            "sym": cell.symmetric,
            "desc_act": cell.act_order,
            "checkpoint_format": "gptq_p" if cell.kind == "gptq_p" else "gptq" if cell.version == 1 else "gptq_v2",
        }
    if cell.kind in COMPRESSED:
        weights = {
            "num_bits": cell.bits,
            "type": "int",
            "symmetric": cell.symmetric,
            "strategy": "channel" if cell.group_size == -1 else "group",
            "group_size": None if cell.group_size == -1 else cell.group_size,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if cell.kind == "int8" else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }
    version = {"awq_gemm": "GEMM", "awq_gemv": "gemv", "awq_gemv_fast": "gemv_fast", "llm_awq": "llm-awq"}[cell.kind]
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": cell.group_size,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": None,
        "do_fuse": False,
    }


def write_model(
    model: PreTrainedModel,
    folder: Path,
    cell: Cell,
    *,
    cells: dict[str, Cell | None] | None = None,
    head: bool = False,
    config: dict[str, object] | None = None,
    extra: dict[str, Tensor] | None = None,
    shards: int = 1,
) -> PreTrainedModel:
    """Save `model` with its linears quantized as `cell` (or by file name as `cells`; None: left plain), and return the
    plain model that holds the dequantized weights. `head`: quantize `lm_head` too."""
    state = _file_state(model, folder)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    dense, packed = dict(state), dict(state)
    for key, weight in state.items():
        base = key.removesuffix(".weight")
        module = next((m for name, m in linears.items() if key.endswith(".weight") and name.endswith(base)), None)
        expert = re.search(r"experts\.\d+\.\w+\.weight$", key)
        one = (cells or {}).get(base, cell)
        if one is None or not (module or expert) or (module is model.get_output_embeddings() and not head):
            continue
        transposed = isinstance(module, Conv1D)
        if one.kind.startswith("awq") and weight.shape[0] % 8:
            continue  # AWQ packs eight output channels in a word: tools leave such a layer plain
        # linears of one input have one channel order, since they share its Hessian
        integers = quantize(weight.t() if transposed else weight, one, seed=len(base.rpartition(".")[0]))
        value = integers.dequantize().to(weight.dtype)
        dense[key] = (value.t() if transposed else value).contiguous()
        del packed[key]
        packed |= {f"{base}.{suffix}": tensor for suffix, tensor in pack_linear(one, integers).items()}
    save_files(folder, packed | (extra or {}), model.config.to_dict(), config or config_of(cell), shards)
    save_files(folder / "dense", dense, model.config.to_dict(), None)
    attention = model.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=model.dtype, attn_implementation=attention)


def write_fp8_model(model: PreTrainedModel, folder: Path, grain: str, *, static: bool = False) -> PreTrainedModel:
    """Save `model` in FP8 with scales per `grain` (tensor, channel, block), and return its dequantized self."""
    state = _file_state(model, folder)
    dense: dict[str, Tensor] = dict(state)
    for name in [name for name in state if "proj" in name]:
        weight = state.pop(name)
        n, k = weight.shape
        rows, columns = {"tensor": (n, k), "channel": (1, k), "block": (16, 32)}[grain]
        blocks = weight.view(n // rows, rows, k // columns, columns)
        scale = blocks.abs().amax((1, 3)).clamp_min(1e-6) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        dense[name] = (codes.float() * scale[:, None, :, None]).view(n, k)
        base = name.removesuffix(".weight")
        state[name] = codes.view(n, k)
        state[f"{base}.weight_scale{'_inv' if grain == 'block' else ''}"] = (
            scale.view(1) if grain == "tensor" else scale
        )
        if static:
            state[f"{base}.input_scale"] = torch.tensor([0.02])
    config: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
    if grain != "block":
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": not static} if static or grain == "channel" else None,
        }
        config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    save_files(folder, state, model.config.to_dict(), config)
    save_files(folder / "dense", dense, model.config.to_dict(), None)
    return load(folder / "dense")


def _file_state(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The model's tensors under the names its files use."""
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return state


def save_files(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, object],
    quantization: dict[str, object] | None,
    shards: int = 1,
) -> None:
    """Write weights (in `shards` files) and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in config.items() if key not in ("quantization_config",)}
    dtype = config.get("dtype")
    config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(folder: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def logit_error(model: PreTrainedModel, truth: PreTrainedModel) -> float:
    """Largest, as a share of the largest logit; `EXACT` where both compute in fp32."""
    with torch.no_grad():
        expected = truth(INPUT).logits.float()
        return float((model(INPUT).logits.float() - expected).abs().max() / expected.abs().max())
