"""Files of compressed-tensors (llm-compressor) beyond its usual ones: other strategies, years, mixtures of formats."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_zoo import tiny_model
from quant_files import EXACT, Cell, config_of, load, logit_error, pack_linear, quantize, save_files, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_paged.quant.config import CompressedTensorsConfig
from hf_paged.quant.fp8 import Fp8Linear
from hf_paged.quant.linear import PackedLinear
from hf_paged.quant.loader import CheckpointLoader

Fields = dict[str, Any]
INT8 = Cell(kind="int8", bits=8, group_size=-1, symmetric=True)


def _group(folder: Path, **changes: object) -> None:
    """Change the one group of the folder's `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return state


def _saves_back(folder: Path, model: Any) -> bool:
    """Whether every tensor of the file comes back bit for bit, under its name."""
    model.save_pretrained(folder / "again")
    before, after = load_file(folder / "model.safetensors"), load_file(folder / "again" / "model.safetensors")
    return before.keys() == after.keys() and all(
        value.dtype == after[name].dtype and torch.equal(value.float(), after[name].float())
        for name, value in before.items()
    )


@pytest.mark.parametrize(
    ("cell", "family"),
    [
        (INT8, "llama"),
        (INT8, "gpt2"),
        (INT8, "mixtral"),
        (Cell(kind="int8", bits=8, group_size=-1), "llama"),
        (Cell(kind="int8", bits=8), "llama"),
        (Cell(kind="int8", bits=4, act_order=True), "llama"),
        (Cell(kind="compressed", unpacked_zeros=True), "qwen3"),
        (Cell(kind="compressed", bits=3), "llama"),
    ],
    ids=str,
)
def test_what_is_not_packed_as_usual_answers_as_its_dequantized_self(cell: Cell, family: str, tmp_path: Path) -> None:
    """`int-quantized` and `naive-quantized` (W8A8, W8A16), int8 zero points of versions before packed ones, words with
    idle bits; a layer left plain has a `weight`, too."""
    plain: dict[str, Cell | None] = {"model.layers.1.mlp.up_proj": None}
    truth = write_model(tiny_model(family), tmp_path, cell, cells=plain, head=family == "qwen3")
    loaded = load(tmp_path)
    assert any(isinstance(module, PackedLinear) for module in loaded.modules())
    assert logit_error(loaded, truth) < EXACT
    assert _saves_back(tmp_path, loaded)
    assert logit_error(load(tmp_path / "again"), truth) < EXACT


def test_static_scales_of_activations_beside_integers_are_told_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """W8A8 and W4A8: the weights are exact, activations stay in 16 bits, and a saved file asks for the same again."""
    truth = write_model(tiny_model("llama"), tmp_path, INT8)
    _group(tmp_path, input_activations={"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"})

    def add(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("weight_scale")]:
            state[name.replace("weight_scale", "input_scale")] = torch.tensor([0.02])
            state[name.replace("weight_scale", "input_zero_point")] = torch.zeros(1, dtype=torch.int8)

    _rewrite(tmp_path, add)
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert "quantized activations" in caplog.text
    assert logit_error(loaded, truth) < EXACT
    assert _saves_back(tmp_path, loaded)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_scales_of_channels_come_with_or_without_their_axis_of_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, INT8)

    def flatten(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("weight_scale")]:
            state[name] = state[name].reshape(shape)

    _rewrite(tmp_path, flatten)
    loaded = load(tmp_path)
    assert logit_error(loaded, truth) < EXACT
    assert _saves_back(tmp_path, loaded)


def test_one_scale_for_a_whole_weight_is_read(tmp_path: Path) -> None:
    """Strategy `tensor`: what comes back is codes times that scale."""
    write_model(tiny_model("llama"), tmp_path, INT8)

    def first(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("weight_scale")]:
            state[name] = state[name].flatten()[:1].clone()

    state = _rewrite(tmp_path, first)
    loaded = load(tmp_path)
    base = "model.layers.1.mlp.up_proj"
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = x @ (state[f"{base}.weight"].float() * state[f"{base}.weight_scale"].float()).t()
        assert torch.allclose(loaded.get_submodule(base)(x), expected, rtol=EXACT, atol=EXACT)
    assert _saves_back(tmp_path, loaded)


@pytest.mark.parametrize("order", ["group", "dynamic", "weight", "static", None])
def test_an_order_that_was_never_filled_in_is_the_natural_one(order: str | None, tmp_path: Path) -> None:
    """Rounded to nearest with `actorder`, `weight_g_idx` holds -1 everywhere; or it is not there at all."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
    (tmp_path / "config.json").write_text(json.dumps(config))

    def unfilled(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("weight_shape")]:
            value = torch.full((int(state[name][1]),), -1, dtype=torch.int32)
            state[name.replace("weight_shape", "weight_g_idx")] = value

    assert logit_error(load(tmp_path), truth) < EXACT
    _rewrite(tmp_path, unfilled)
    assert logit_error(load(tmp_path), truth) < EXACT


def _fp8(weight: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales [N / rows, K / columns] and values."""
    n, k = weight.shape
    blocks = weight.view(n // rows, rows, k // columns, columns)
    scales = (blocks.abs().amax((1, 3)).clamp_min(1e-6) / 448).to(dtype)
    wide = scales.float()[:, None, :, None]
    codes = (blocks / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(n, k), scales, (codes.float() * wide).view(n, k)


@pytest.mark.parametrize("structure", [[16, 32], "16x32"])
def test_blocks_of_fp8_are_as_large_as_the_config_says(structure: object, tmp_path: Path) -> None:
    """`block_structure`; the count of scales alone would fit other sizes, too."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    truth = _write_fp8(
        tmp_path, {"g": {"targets": ["Linear"], "weights": weights}}, lambda weight: _fp8(weight, 16, 32)
    )
    loaded = load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.layout.block == (16, 32)
    assert logit_error(loaded, truth) < EXACT
    assert _saves_back(tmp_path, loaded)


def test_formats_of_one_file_differ_by_module(tmp_path: Path) -> None:
    """`mixed-precision`: FP8 attention with bf16 scales beside 4-bit MLPs, each by its own target patterns."""
    packed = config_of(Cell(kind="compressed"))["config_groups"]
    assert isinstance(packed, dict)
    groups = {
        "a": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
        "b": {**packed["group_0"], "targets": ["re:.*mlp.*"], "format": "pack-quantized"},
    }
    truth = _write_fp8(
        tmp_path, groups, lambda weight: _fp8(weight, 1, weight.shape[1], torch.bfloat16), integers="mlp"
    )
    loaded = load(tmp_path)
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, Fp8Linear)
    assert isinstance(loaded.model.layers[0].mlp.up_proj, PackedLinear)
    assert logit_error(loaded, truth) < EXACT
    assert _saves_back(tmp_path, loaded)


def _write_fp8(
    folder: Path, groups: Fields, make: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], integers: str = "-"
) -> Any:
    """A tiny Llama with FP8 linears, but 4-bit ones where the name holds `integers`; returns its dequantized self."""
    model = tiny_model("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dense = dict(state)
    for name in [name for name in state if "proj" in name]:
        weight, base = state.pop(name), name.removesuffix(".weight")
        if integers in name:
            cell = Cell(kind="compressed")
            some = quantize(weight, cell)
            dense[name] = some.dequantize()
            state |= {f"{base}.{suffix}": tensor for suffix, tensor in pack_linear(cell, some).items()}
        else:
            state[name], state[f"{base}.weight_scale"], dense[name] = make(weight)
    label = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    save_files(folder, state, model.config.to_dict(), label)
    save_files(folder / "dense", dense, model.config.to_dict(), None)
    return load(folder / "dense")


@pytest.mark.parametrize(
    ("scheme", "tensors"),
    [
        ("static", {"weight_scale_inv": (), "activation_scale": ()}),
        ("dynamic", {"weight_scale_inv": ()}),
        ("static", {"weight_scale": (), "input_scale": ()}),
        ("dynamic", {"weight_scale": (1,)}),
    ],
)
def test_fp8_with_one_scale_comes_under_the_names_of_transformers_and_autofp8(
    scheme: str, tensors: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """Transformers without `weight_block_size` (Ministral 3) and AutoFP8: the product of a layer within e4m3's step."""
    model = tiny_model("llama")
    state = dict(model.state_dict())
    base = "model.layers.1.mlp.up_proj"
    codes, scale, values = _fp8(state[f"{base}.weight"], 96, 64)
    state[f"{base}.weight"] = codes
    for suffix, shape in tensors.items():
        value = torch.tensor(4 / 448) if suffix in ("activation_scale", "input_scale") else scale
        state[f"{base}.{suffix}"] = value.reshape(shape)
    label = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None}
    save_files(tmp_path, state, model.config.to_dict(), label)
    loaded = load(tmp_path)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    with torch.no_grad():
        error = loaded.get_submodule(base)(x) - x @ values.t()
    assert float(error.square().mean().sqrt() / (x @ values.t()).square().mean().sqrt()) < 2**-4 / 3**0.5
    assert _saves_back(tmp_path, loaded)


def test_a_label_under_its_old_name_is_read(tmp_path: Path) -> None:
    """`compression_config`, and before that with the label inside of it; sparsity of another format stays refused."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    config = json.loads((tmp_path / "config.json").read_text())
    label = config.pop("quantization_config")
    for old in (label, {"quantization_config": {**label, "quant_method": "sparseml"}, "sparsity_config": None}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "compression_config": old}))
        loaded = load(tmp_path)
        assert isinstance(loaded.hf_quantizer, CheckpointLoader)
        assert logit_error(loaded, truth) < EXACT


@pytest.mark.parametrize("cell", [INT8, Cell(kind="compressed"), Cell(act_order=True)], ids=str)
def test_a_vision_tower_of_the_same_names_stays_plain(cell: Cell, tmp_path: Path) -> None:
    """Its `q_proj.weight` is no int8 one: taken for it, it was lost, and the tower started at random with a warning."""
    text = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if "language_model" in name and "proj" in name]:
        integers = quantize(state.pop(name), cell)
        tensors = pack_linear(cell, integers)
        state |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_files(tmp_path, state, config.to_dict(), config_of(cell))
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    packed = [name for name, module in loaded.named_modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14 and all("language_model" in name for name in packed)
    tower = dict(model.model.vision_tower.named_parameters())
    for name, value in loaded.model.vision_tower.named_parameters():
        assert torch.equal(value, tower[name]), name
    assert _saves_back(tmp_path, loaded)


def test_experts_of_some_layers_only_leave_the_others_plain(tmp_path: Path) -> None:
    """`ignore: re:.*layers.1.*`: a file's plain experts are fused by Transformers, whatever other layers are called."""
    names = [f"model.layers.1.block_sparse_moe.experts.{e}.{p}" for e in range(4) for p in ("w1", "w2", "w3")]
    for cell in (INT8, Cell(kind="compressed")):
        truth = write_model(tiny_model("mixtral"), tmp_path, cell, cells=dict.fromkeys(names))
        loaded = load(tmp_path)
        assert logit_error(loaded, truth) < EXACT
        assert _saves_back(tmp_path, loaded)


def test_a_module_belongs_to_the_group_that_names_it_most_closely() -> None:
    """In any order of the file: a name before a pattern before the class, as the tool that writes it applies them."""
    bits = {"class": 8, "pattern": 4, "name": 2}
    targets = {"class": ["Linear"], "pattern": ["re:.*_proj"], "name": ["model.layers.0.mlp.up_proj"]}
    for order in (bits, reversed(bits)):
        groups = {
            kind: {"targets": targets[kind], "weights": {"type": "int", "num_bits": bits[kind]}} for kind in order
        }
        config = CompressedTensorsConfig(config_groups=groups)
        modules = ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj")
        assert [config.label(module).bits for module in modules] == [8, 4, 2]
