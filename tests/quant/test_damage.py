"""Damage that leaves every shape right: what no tool writes, and what one module alone does, is an error naming the
tensor; what some tool does write still loads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_zoo import tiny_model
from quant_files import EXACT, Cell, load, logit_error, write_fp8_model, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_paged.quant.consistency import Promises

State = dict[str, Tensor]
ORDER = torch.arange(64, dtype=torch.int32).flip(0) // 32
LAYER = "model.layers.0.mlp.up_proj"
AWQ = Cell(kind="awq_gemm")
PACKED = Cell(kind="compressed", symmetric=True)
CHANNEL = Cell(kind="compressed", bits=8, group_size=-1, symmetric=True)


def _damage(folder: Path, change: Callable[[State], object]) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file({name: value.contiguous() for name, value in state.items()}, file)


def _zero(name: str) -> Callable[[State], object]:
    return lambda state: state[name].zero_()


def _cut(suffix: str, dim: int) -> Callable[[State], object]:
    def change(state: State) -> None:
        for name in (f"{LAYER}.{suffix}", f"{LAYER}.qzeros"):
            if name in state:
                state[name] = state[name].narrow(dim, 0, 1)

    return change


def _reread(name: str, dtype: torch.dtype) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name].view(dtype)})


@pytest.mark.parametrize(
    ("cell", "change", "tensor"),
    [
        # a download that broke off leaves zeros
        (Cell(), _zero(f"{LAYER}.qweight"), f"{LAYER}.qweight: expected the codes of a weight"),
        (Cell(version=2), _zero(f"{LAYER}.qzeros"), f"{LAYER}.qzeros: expected zero points that differ"),
        (Cell(), _zero(f"{LAYER}.scales"), f"{LAYER}.scales: expected a scale other than 0"),
        (PACKED, _zero(f"{LAYER}.weight_packed"), f"{LAYER}.weight_packed: expected the codes of a weight"),
        (Cell(kind="llm_awq"), _zero(f"{LAYER}.scaled_zeros"), f"{LAYER}.scaled_zeros: expected zero points"),
        (Cell(symmetric=True, act_order=True), _zero(f"{LAYER}.g_idx"), f"{LAYER}.g_idx: expected an act-order"),
        (
            Cell(),
            lambda state: state[f"{LAYER}.g_idx"].copy_(ORDER),
            f"{LAYER}.g_idx: expected the natural order, as 20",
        ),
        (AWQ, _zero("model.embed_tokens.weight"), "embed_tokens.weight: expected a weight, found only zeros"),
        (AWQ, _zero("model.norm.weight"), "model.norm.weight: expected a weight, found only zeros"),
        (AWQ, _zero("model.layers.1.input_layernorm.weight"), "input_layernorm.weight: expected a weight, found only"),
        # signs
        (AWQ, lambda state: state[f"{LAYER}.scales"].neg_(), f"{LAYER}.scales: expected scales >= 0"),
        (
            PACKED,
            lambda state: state[f"{LAYER}.weight_scale"].neg_(),
            "up_proj.weight_scale: expected scales of either",
        ),
        # half of the groups, and one scale for all channels
        (AWQ, _cut("scales", 0), f"{LAYER}.scales: expected one scale for 32 weights, which 20 others have"),
        (PACKED, _cut("weight_scale", 1), f"{LAYER}.weight_scale: expected one scale for 32 weights, which"),
        (
            CHANNEL,
            lambda state: state.update({f"{LAYER}.weight_scale": state[f"{LAYER}.weight_scale"][0]}),
            f"{LAYER}.weight_scale: expected one scale for each output channel, which",
        ),
        # another dtype of the same width
        (Cell(), _reread(f"{LAYER}.scales", torch.bfloat16), f"{LAYER}.scales: expected F16 as 20 others"),
        (
            Cell(scales=torch.bfloat16),
            _reread(f"{LAYER}.scales", torch.float16),
            f"{LAYER}.scales: expected BF16 as 20 others",
        ),
        (AWQ, _reread("model.embed_tokens.weight", torch.bfloat16), "embed_tokens.weight: expected the dtype of"),
        (AWQ, _reread("model.layers.1.input_layernorm.weight", torch.bfloat16), "input_layernorm.weight: expected F16"),
        # a tensor that others may lack
        (AWQ, lambda state: state.pop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros is missing"),
    ],
)
def test_damage_that_leaves_the_shapes_right_is_named(
    cell: Cell, change: Callable[[State], object], tensor: str, tmp_path: Path
) -> None:
    write_model(tiny_model("llama", intermediate_size=128).half(), tmp_path, cell)
    _damage(tmp_path, change)
    with pytest.raises(ValueError, match="tensor") as raised:
        load(tmp_path)
    assert tensor in str(raised.value)
    assert "(1 problem)" in str(raised.value), str(raised.value)  # what follows from it is not told


@pytest.mark.parametrize("kind", ["awq_gemv", "awq_gemv_fast", "llm_awq"])
def test_a_group_size_that_padding_hides_is_told_by_the_scales(kind: str, tmp_path: Path) -> None:
    """Groups of 16 and of 32 are padded to tensors of one shape where there are few."""
    write_model(tiny_model("llama", intermediate_size=128), tmp_path, Cell(kind=kind))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"up_proj.scales: expected scales of 4 groups of 16, .* found 2 groups"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_fp8_weights_are_looked_at_wherever_they_lie(place: str, tmp_path: Path) -> None:
    write_fp8_model(tiny_model("llama"), tmp_path, "channel")
    _damage(tmp_path, lambda state: state[f"{LAYER}.weight"].view(torch.uint8)[3].fill_(0x7F))
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{i}": place for i in range(3)}
    with pytest.raises(ValueError, match=f"tensor {LAYER}.weight: expected finite values, found 64 NaN"):
        load(tmp_path, device_map=places, offload_folder=tmp_path / "disk")


@pytest.mark.parametrize("part", ["weight", "weight_scale"])
def test_fp8_tensors_of_zeros_are_named(part: str, tmp_path: Path) -> None:
    write_fp8_model(tiny_model("llama"), tmp_path, "channel")
    _damage(tmp_path, lambda state: state[f"{LAYER}.{part}"].view(torch.uint8).zero_())
    with pytest.raises(ValueError, match=f"tensor {LAYER}.{part}: expected a"):
        load(tmp_path)


def test_one_fp8_scale_among_scales_of_channels_is_told(tmp_path: Path) -> None:
    write_fp8_model(tiny_model("llama"), tmp_path, "channel")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["g"]["weights"]["strategy"] = "channel"
    (tmp_path / "config.json").write_text(json.dumps(config))
    load(tmp_path)
    _damage(tmp_path, lambda state: state.update({f"{LAYER}.weight_scale": state[f"{LAYER}.weight_scale"][:1]}))
    with pytest.raises(
        ValueError, match=rf"tensor {LAYER}.weight_scale: expected one scale for each .* found one scale"
    ):
        load(tmp_path)


def test_zero_points_that_a_file_lost_altogether_are_missed(tmp_path: Path) -> None:
    """compressed-tensors leaves those out that are all 0: few can be, not those of every channel."""
    write_model(tiny_model("llama"), tmp_path, Cell(kind="int8", bits=8))
    _damage(tmp_path, lambda state: [state.pop(name) for name in list(state) if name.endswith("zero_point")])
    with pytest.raises(ValueError, match=rf"tensor {LAYER}.weight_zero_point is missing: .* with zero points"):
        load(tmp_path)


@pytest.mark.parametrize(
    "cell",
    [Cell(kind="int8", bits=8), Cell(kind="compressed", unpacked_zeros=True), Cell(kind="int8", bits=8, group_size=-1)],
)
def test_signed_zero_points_that_were_not_written_are_told_by_those_of_others(cell: Cell, tmp_path: Path) -> None:
    """They lie at the end of a file, and its zeros are the midpoint: the weight of a symmetric layer, and another."""
    write_model(tiny_model("llama"), tmp_path, cell)
    tail = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith("weight_zero_point")]
    lost = {name: f"tensor {name}: expected zero points that differ, as 18 others" for name in tail[-3:]}
    _damage(tmp_path, lambda state: [state[name].zero_() for name in lost])
    with pytest.raises(ValueError, match="tensor") as raised:
        load(tmp_path)
    assert all(problem in str(raised.value) for problem in lost.values()) and "(3 problems)" in str(raised.value)
    _damage(tmp_path, lambda state: [state[name].zero_() for name in tail])
    load(tmp_path)  # all alike: symmetric weights with a label that lies


def test_an_act_order_that_a_file_lost_altogether_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for and never made, compressed-tensors writes no order either: no error, but not silent."""
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert "the file has no weight_g_idx at all" in caplog.text


def test_some_negative_scales_of_symmetric_weights_load(tmp_path: Path) -> None:
    """AutoRound gives a group the sign of its largest weight."""
    write_model(tiny_model("llama"), tmp_path, PACKED)

    def turn(state: State) -> None:
        for name in [name for name in state if name.endswith("weight_scale")]:
            state[name][::2] *= -1

    _damage(tmp_path, turn)
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_scale"]
    assert torch.equal(load(tmp_path).get_submodule(LAYER).scales, scales.t())


@pytest.mark.parametrize("cell", [Cell(symmetric=True), AWQ, PACKED, Cell(kind="int8", bits=8, group_size=-1)])
def test_a_weight_of_zeros_loads(cell: Cell, tmp_path: Path) -> None:
    """An expert that nothing was routed to, or a pruned layer: codes and scales are constant, but they are meant."""
    model = tiny_model("llama")
    model.get_submodule(LAYER).weight.data.zero_()
    truth = write_model(model, tmp_path, cell)
    assert logit_error(load(tmp_path), truth) < EXACT


def test_the_codes_of_floats_and_of_integers_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Both are bytes: I8 in the place of F8_E4M3 has the right shape."""
    write_model(tiny_model("llama"), tmp_path, Cell(kind="int8", bits=8, group_size=-1, symmetric=True))
    _damage(tmp_path, _reread(f"{LAYER}.weight", torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=rf"tensor {LAYER}.weight: quantization_config says integers, found F8_E4M3"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "float"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"mlp.down_proj.weight: expected F8_E4M3, as quantization_config says, found I8"
    ):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"metadata": {}}'])
def test_an_index_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    write_model(tiny_model("llama"), tmp_path, AWQ, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json: expected a JSON object .*fetch it again"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", torch.float16])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file_is_named_with_what_to_do(shards: int, dtype: object, tmp_path: Path) -> None:
    write_model(tiny_model("llama"), tmp_path, AWQ, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=rf"weight file .*{file.name}: damaged or truncated .*; fetch it again"):
        load(tmp_path, dtype=dtype)


def test_a_router_of_another_name_in_the_file_gets_the_dtype_of_the_model(tmp_path: Path) -> None:
    """Transformers before 5.23 left it in fp16: a Mixtral in bf16 failed at the first token."""
    write_model(tiny_model("mixtral").half(), tmp_path, AWQ)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(torch.arange(3, 9)[None]).logits.isfinite().all()


def test_one_module_that_keeps_a_wrong_label_does_not_make_all_others_damaged() -> None:
    """Files of two group sizes without rules: told apart from a cut tensor by how many are alike."""
    mixed, cut = Promises(), Promises()
    mixed.note("head.scales", "one scale for 128 weights", "one scale for 128 weights")
    for layer in range(4):
        mixed.note(f"{layer}.scales", "one scale for 128 weights", "one scale for 64 weights")
        cut.note(f"{layer}.scales", "one scale for 128 weights", f"one scale for {256 if layer == 2 else 128} weights")
    assert mixed.problems() == {} and list(cut.problems()) == ["2"]
