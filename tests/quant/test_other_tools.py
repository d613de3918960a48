"""Files as other tools and earlier years wrote them: read exactly, or refused with the layout's name and a remedy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from model_zoo import tiny_model
from quant_files import EXACT, Cell, load, logit_error, save_files, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_utils

from hf_paged import LLM, SamplingParams
from hf_paged.quant import registry
from hf_paged.quant.config import GPTQConfig
from hf_paged.quant.linear import PackedLinear

GPTQ = Cell(act_order=True)


def _edit(folder: Path, **changes: object) -> None:
    """Change (None: remove) entries of the folder's `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    label = {**config["quantization_config"], **changes}
    config["quantization_config"] = {key: value for key, value in label.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def _unlabel(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_planar_words_of_gptqmodel_are_not_read_as_continuous_ones(bits: int, tmp_path: Path) -> None:
    """`gptq_p` has the shapes of `gptq`: at 3 bits only the label tells them apart, and the wrong one is silent."""
    cell = Cell(kind="gptq_p", bits=bits, act_order=True)
    truth = write_model(tiny_model("llama"), tmp_path, cell)
    loaded = load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.layout.kind == "gptq_p"
    assert logit_error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("cell", "packing"),
    [
        (Cell(version=1), "auto_round:auto_gptq"),
        (Cell(version=2), "auto_round"),
        (Cell(version=2, bits=2), "auto_round:gptqmodel"),
        (Cell(kind="awq_gemm"), "auto_round:auto_awq"),
    ],
    ids=lambda value: str(value),
)
def test_auto_round_files_are_gptq_or_awq_by_their_packing_format(cell: Cell, packing: str, tmp_path: Path) -> None:
    """Its zero points are those of v1 only under `auto_gptq`; modules differ by name or by pattern."""
    eight = "model.layers.1.mlp.down_proj"
    cells = {eight: Cell(version=cell.version, bits=8)} if cell.kind == "gptq" else {}
    label = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": cell.bits,
        "group_size": 32,
        "sym": False,
        "data_type": "int",
        "extra_config": {r".*\.1\.mlp\.down_.*" if cell.bits == 2 else eight: {"bits": 8 if cells else 4}},
    }
    truth = write_model(tiny_model("llama"), tmp_path, cell, config=label, cells=cells)
    loaded = load(tmp_path)
    assert isinstance(loaded.model.layers[0].mlp.up_proj, PackedLinear)
    assert logit_error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == label
    assert logit_error(load(tmp_path / "again"), truth) < EXACT


@pytest.mark.parametrize(
    ("cell", "file", "label"),
    [
        (GPTQ, "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
        (
            Cell(kind="awq_gemm"),
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        ),
    ],
    ids=["autogptq", "autoawq"],
)
def test_a_label_and_a_file_name_from_before_config_json_knew_them(
    cell: Cell, file: str, label: dict[str, object], tmp_path: Path
) -> None:
    """Transformers alone finds no `gptq_model-4bit-128g.safetensors`; with the standard name its linears are random."""
    truth = write_model(tiny_model("llama"), tmp_path, cell)
    _unlabel(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    (tmp_path / file).write_text(json.dumps(label))
    loaded = load(tmp_path)
    assert logit_error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), truth) < EXACT
    (tmp_path / file).write_text("[")
    with pytest.raises(ValueError, match=rf"{file}: expected a JSON object"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("label", "beside"),
    [
        ({"bits": 8}, {"bits": 4}),
        ({"desc_act": True, "sym": False}, {"desc_act": False, "sym": True}),
        ({"desc_act": False, "group_size": 64}, {"desc_act": True, "group_size": 32}),
        ({"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}),
    ],
)
def test_two_labels_that_contradict_each_other_are_reported_and_the_tensors_decide(
    label: dict[str, object], beside: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoGPTQ and GPTQModel write quantize_config.json too; a file edited or copied from another model is wrong."""
    cell = Cell(symmetric=True, version=2)
    truth = write_model(tiny_model("llama"), tmp_path, cell)
    state = load_file(tmp_path / "model.safetensors")
    lost = "qzeros" if "sym" in label else "none"
    save_file({k: v for k, v in state.items() if not k.endswith(lost)}, tmp_path / "model.safetensors")
    _edit(tmp_path, **label)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"group_size": 32, "damp_percent": 0.1, **beside}))
    with caplog.at_level(logging.WARNING):
        assert logit_error(load(tmp_path), truth) < EXACT
    assert "the label beside it contradict each other" in caplog.text


def test_labels_that_agree_or_say_nothing_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tiny_model("llama"), tmp_path, Cell(version=2))
    beside = {"bits": 4, "group_size": 32, "desc_act": False, "model_name_or_path": None}
    (tmp_path / "quantize_config.json").write_text(json.dumps(beside))
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert "contradict" not in caplog.text


@pytest.mark.parametrize("cell", [Cell(), Cell(kind="awq_gemm"), Cell(kind="compressed")], ids=str)
def test_a_label_without_its_method_is_known_by_its_other_keys(cell: Cell, tmp_path: Path) -> None:
    """Transformers ends at it."""
    truth = write_model(tiny_model("llama"), tmp_path, cell)
    _edit(tmp_path, quant_method=None)
    assert logit_error(load(tmp_path), truth) < EXACT


@pytest.mark.parametrize("shards", [1, 2])
def test_fp8_weights_without_any_label_are_refused(shards: int, tmp_path: Path) -> None:
    """Transformers would cast the codes and leave out their scales."""
    model = tiny_model("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in [name for name in state if "proj" in name]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale"] = torch.ones(1)
    save_files(tmp_path, state, model.config.to_dict(), None, shards)
    with pytest.raises(ValueError, match=r"proj\.weight: quantized, but .*config\.json has no quantization_config"):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_packed_weights_without_any_label_are_refused_and_not_left_random(shards: int, tmp_path: Path) -> None:
    write_model(tiny_model("llama"), tmp_path, GPTQ, shards=shards)
    _unlabel(tmp_path)
    with pytest.raises(ValueError, match=r"qweight: quantized, but .*config\.json has no quantization_config; add"):
        load(tmp_path)
    registry.unregister()
    try:
        assert not hasattr(modeling_utils.get_hf_quantizer, "original")
    finally:
        registry.register()


@pytest.mark.parametrize(
    ("cell", "changes", "name"),
    [
        (GPTQ, {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ, {"checkpoint_format": None, "is_marlin_format": True}, "marlin"),
        (GPTQ, {"checkpoint_format": "gptq_v9"}, "gptq_v9"),
        (Cell(kind="awq_gemm"), {"version": "marlin"}, "marlin"),
        (GPTQ, {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
    ],
)
def test_a_layout_that_is_not_read_is_refused_by_name(
    cell: Cell, changes: dict[str, object], name: str, tmp_path: Path
) -> None:
    """Its shapes may fit a layout that is read: the words would then be read in the wrong order, without an error."""
    write_model(tiny_model("llama"), tmp_path, cell)
    _edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"layout '[\w:]*{name}' is not read; allowed: .*Save the model as"):
        load(tmp_path)


def test_gptqmodel_refuses_an_old_key_that_saving_replaces(tmp_path: Path) -> None:
    """AutoGPTQ 0.7 writes `is_marlin_format: false`; GPTQModel >= 7 ends at the key, whatever its value."""
    write_model(tiny_model("llama"), tmp_path, GPTQ)
    _edit(tmp_path, checkpoint_format=None, is_marlin_format=False, static_groups=False)
    load(tmp_path).save_pretrained(tmp_path / "again")
    label = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert label["checkpoint_format"] == "gptq" and "is_marlin_format" not in label and "static_groups" in label


def test_the_method_of_a_config_of_transformers_own_class_is_saved_by_its_value() -> None:
    """Its `to_dict` holds an enum, whose name in a file would be read by nobody."""
    fields = transformers.GPTQConfig(bits=4).to_dict()
    assert GPTQConfig(**fields).to_dict()["quant_method"] == "gptq"


def test_words_of_another_width_are_named(tmp_path: Path) -> None:
    """GPTQModel's `pack_dtype: int16`; int16 words are otherwise those of AWQ's `gemv_fast`."""
    write_model(tiny_model("llama"), tmp_path, Cell())
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(("qweight", "qzeros"))]:
        state[name] = state[name].view(torch.int16)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"qweight: expected I32 .*found I16"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("R4_weight", torch.eye(8), r"down_proj\.R4_weight .*belongs to no layout that is read"),
        ("weight", torch.zeros(64, 96), r"down_proj\.weight .*belongs to no layout that is read"),
        ("weight_global_scale", torch.ones(1), r"down_proj\.weight_global_scale .*belongs to no layout"),
    ],
)
def test_a_tensor_that_changes_what_packed_ones_mean_is_not_skipped(
    name: str, extra: Tensor, message: str, tmp_path: Path
) -> None:
    """Rotations, outliers or global scales beside the packed words: without them the layer computes something else."""
    write_model(
        tiny_model("llama"), tmp_path, Cell(kind="compressed"), extra={f"model.layers.1.mlp.down_proj.{name}": extra}
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_rotations_at_run_time_are_refused_and_those_of_weights_alone_are_not(tmp_path: Path) -> None:
    """A Hadamard transform of the input that nobody applies leaves fluent nonsense."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    apply = [{"targets": ["Linear"], "location": "weight_input"}]
    _edit(tmp_path, transform_config={"config_groups": {"R1": {"type": "hadamard", "apply": apply}}})
    assert logit_error(load(tmp_path), truth) < EXACT
    apply.append({"targets": ["re:.*down_proj$"], "location": "input"})
    _edit(tmp_path, transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": apply}}})
    with pytest.raises(ValueError, match=r"transform_config: transforms of input at run time are not read"):
        load(tmp_path)


def _nvfp4(state: dict[str, Tensor], base: str) -> None:
    state[f"{base}.weight_packed"] = torch.zeros(96, 32, dtype=torch.uint8)
    state[f"{base}.weight_scale"] = torch.ones(96, 4).to(torch.float8_e4m3fn)
    state[f"{base}.weight_global_scale"] = torch.ones(1)


def _mxfp4(state: dict[str, Tensor], base: str) -> None:
    state[f"{base}.weight_packed"] = torch.zeros(96, 32, dtype=torch.uint8)
    state[f"{base}.weight_scale"] = torch.zeros(96, 2, dtype=torch.uint8)


def _sparse(state: dict[str, Tensor], base: str) -> None:
    state[f"{base}.compressed"] = torch.zeros(96, 32)
    state[f"{base}.bitmask"] = torch.zeros(96, 8, dtype=torch.uint8)


def _marlin(state: dict[str, Tensor], base: str) -> None:
    state[f"{base}.weight_packed"] = torch.zeros(4, 192, dtype=torch.int32)
    state[f"{base}.scale_packed"] = torch.ones(2, 96)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_nvfp4, r"weight_packed: expected I32 .*found U8.*nvfp4.*re-save"),
        (_mxfp4, r"weight_packed: expected I32 .*found U8.*re-save"),
        (_sparse, r"up_proj\.weight is missing: .*found .*up_proj\.bitmask, .*sparse layouts are not read"),
        (_marlin, r"up_proj\.weight_packed: expected I32"),
    ],
    ids=["nvfp4", "mxfp4", "sparse 2:4", "marlin 24"],
)
def test_other_layouts_of_compressed_tensors_are_refused_with_a_remedy(
    write: object, message: str, tmp_path: Path
) -> None:
    assert callable(write)
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    state = load_file(tmp_path / "model.safetensors")
    base = "model.layers.0.mlp.up_proj"
    state = {name: value for name, value in state.items() if not name.startswith(base)}
    write(state, base)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_methods_that_are_not_ours_go_to_transformers_own_loaders(tmp_path: Path) -> None:
    """bitsandbytes, HQQ, torchao and others: their own packages answer, or their absence is named."""
    write_model(tiny_model("llama"), tmp_path, GPTQ)
    for label in ({"quant_method": "hqq", "quant_config": {}}, {"quant_method": "aqlm"}, {"quant_method": "quanto"}):
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = label
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ImportError):
            load(tmp_path)
    for unknown in ("exl2", "modelopt", "intel/auto-round"):
        config["quantization_config"] = {"quant_method": unknown}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"quant_method='{unknown}' is not allowed; allowed: .*gptq"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("family", "act", "behind"),
    [("gpt_neox", "mlp.act", "mlp.dense_4h_to_h"), ("starcoder2", "mlp.act", "mlp.c_proj")],
)
def test_activations_that_autoawq_scales_are_divided(family: str, act: str, behind: str, tmp_path: Path) -> None:
    """casperhansen/falcon-7b-awq: without `act.scales` its MLPs compute something else; transformers 29421."""
    model = tiny_model(family)
    plain = dict(model.state_dict())
    extra = {}
    for name in [name for name in plain if name.endswith(f"{behind}.weight")]:
        scales = torch.linspace(0.5, 2.0, plain[name].shape[1])
        plain[name] *= scales  # the input that it expects is divided by them
        extra[name.replace(f"{behind}.weight", f"{act}.scales")] = scales.half().float()
    model.load_state_dict(plain)
    truth = write_model(model, tmp_path, Cell(kind="awq_gemm"), extra=extra)
    state = truth.state_dict()
    for name, scales in extra.items():  # the truth has no such activation: the linear behind it divides
        state[name.replace(f"{act}.scales", f"{behind}.weight")] /= scales
    truth.load_state_dict(state)
    loaded = load(tmp_path)
    assert logit_error(loaded, truth) < EXACT
    prompt = [5, 6, 7, 8, 9]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    ours = LLM(loaded, num_blocks=8).generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    dense = truth.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    assert list(ours) == dense[0, len(prompt) :].tolist()
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), truth) < EXACT
    scales = {f"{next(iter(extra))}": torch.ones(3)}
    save_file({**load_file(tmp_path / "model.safetensors"), **scales}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"act\.scales: expected .* one for each input of the linear behind"):
        load(tmp_path)
