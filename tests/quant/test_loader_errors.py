"""Configs as tools and users write them, shards and pickles, and the errors of files that cannot be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_zoo import tiny_model
from quant_files import EXACT, INPUT, Cell, config_of, load, logit_error, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

from hf_paged.eval.random_checkpoint import Format, LlamaShape, write_checkpoint
from hf_paged.quant import registry
from hf_paged.quant.config import GPTQConfig
from hf_paged.quant.linear import PackedLinear

GPTQ = Cell(act_order=True)
AWQ = Cell(kind="awq_gemm")


def test_no_quantization_package_is_needed(tmp_path: Path) -> None:
    """Transformers' own loaders ask for gptqmodel, optimum and compressed-tensors."""
    import importlib.util

    for package in ("gptqmodel", "optimum", "awq", "auto_gptq", "compressed_tensors"):
        if importlib.util.find_spec(package):
            pytest.skip(f"{package} is installed here")
    write_model(
        tiny_model("llama"),
        tmp_path,
        Cell(),
        config={
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "modules_in_block_to_quantize": [["x"]],
        },
    )
    assert isinstance(load(tmp_path).model.layers[0].mlp.up_proj, PackedLinear)


def test_wrong_bits_in_the_config_are_an_error(tmp_path: Path) -> None:
    write_model(
        tiny_model("llama"), tmp_path, Cell(bits=8), config={"quant_method": "gptq", "bits": 4, "group_size": 32}
    )
    with pytest.raises(ValueError, match=r"self_attn.*quantization_config says 4 bits, the tensors hold 8"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("cell", "suffix"),
    [
        (GPTQ, "qzeros"),
        (GPTQ, "g_idx"),
        (Cell(kind="compressed"), "weight_zero_point"),
        (Cell(kind="compressed", act_order=True), "weight_g_idx"),
    ],
    ids=str,
)
def test_a_tensor_that_the_config_promises_is_missed(cell: Cell, suffix: str, tmp_path: Path) -> None:
    """Symmetric weights have no zero points and plain ones no g_idx: without them the others would load as noise."""
    config: dict[str, Any] = config_of(cell)
    if suffix == "weight_g_idx":
        config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    write_model(tiny_model("llama"), tmp_path, cell, config=config)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if not k.endswith(f"q_proj.{suffix}")}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"q_proj\.{suffix} is missing: quantization_config says"):
        load(tmp_path)


def test_one_missing_expert_is_an_error_and_not_a_random_one(tmp_path: Path) -> None:
    write_model(tiny_model("mixtral"), tmp_path, AWQ)
    state = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if ".1.block_sparse_moe.experts.2.w3." not in k}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.2\.w3 are missing: expected 4 experts"):
        load(tmp_path)


def test_a_router_that_is_a_linear_and_computes_more_is_not_replaced(tmp_path: Path) -> None:
    """Llama 4's router is a subclass of `nn.Linear` that returns two tensors: packed, its first call would fail."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}
    config = transformers.AutoConfig.for_model("llama4_text", vocab_size=96, pad_token_id=0, **sizes, **heads)
    write_model(AutoModelForCausalLM.from_config(config), tmp_path, Cell())
    with pytest.raises(ValueError, match=r"router\.\w+ .*: expected a linear layer, found Llama4Router"):
        load(tmp_path)


def test_shards_load_as_one_file_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ, shards=3)
    assert logit_error(load(tmp_path), truth) < EXACT
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="model-00002-of-00003"):
        load(tmp_path)


def test_bin_files_need_the_flag(tmp_path: Path) -> None:
    """A .bin is a pickle: it is opened only when the caller says so."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell())
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected \.safetensors.*allow_bin=True"):
        load(tmp_path)
    assert logit_error(load(tmp_path, quantization_config=GPTQConfig(allow_bin=True)), truth) < EXACT


def test_a_bin_file_of_any_age_is_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, Cell())
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file, options = tmp_path / "pytorch_model.bin", {"quantization_config": GPTQConfig(allow_bin=True)}
    torch.save(state, file, _use_new_zipfile_serialization=False)
    assert logit_error(load(tmp_path, **options), truth) < EXACT
    torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"weight file .*pytorch_model.bin: damaged or truncated .*fetch it again"):
        load(tmp_path, **options)
    torch.save({"model": state}, file)
    with pytest.raises(ValueError, match=r"weight file .*pytorch_model.bin: expected a dict of tensors"):
        load(tmp_path, **options)


def test_all_problems_of_a_header_come_in_one_error(tmp_path: Path) -> None:
    """Missing, extra and misshapen tensors, packed and plain: each named, before any weight is read."""
    write_model(tiny_model("llama"), tmp_path, Cell())
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.qweight"], state["model.norm.weight"]
    state["model.layers.9.mlp.up_proj.qweight"] = torch.zeros(8, 96, dtype=torch.int32)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].t().contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="this checkpoint cannot be loaded") as raised:
        load(tmp_path)
    for part in (
        r"model.layers.0.mlp.up_proj",
        "tensor model.layers.9.mlp.up_proj.qweight (I32 [8, 96]) belongs to no module of LlamaForCausalLM",
        "tensor model.embed_tokens.weight: expected float32 [96, 64], found F32 [64, 96]",
        "tensor model.norm.weight is missing: expected [64]",
    ):
        assert part in str(raised.value)


def test_bad_values_name_their_tensor(tmp_path: Path) -> None:
    for name, value in (("model.layers.1.mlp.up_proj.scales", float("inf")), ("model.norm.weight", float("nan"))):
        write_model(tiny_model("llama"), tmp_path, Cell())
        state = load_file(tmp_path / "model.safetensors")
        state[name].view(-1)[3] = value
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"tensor {name}: expected finite"):
            load(tmp_path)


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0])
def test_impossible_kv_scales_are_an_error(value: float, tmp_path: Path) -> None:
    extra = {
        f"model.layers.{i}.self_attn.{s}_scale": torch.tensor([value if (i, s) == (1, "v") else 0.1])
        for i in range(3)
        for s in "kv"
    }
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"), extra=extra)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_scale: expected a KV-cache scale > 0"):
        load(tmp_path)


def test_kv_scales_of_exactly_one_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"model.layers.{i}.self_attn.{s}_scale": torch.ones(1) for i in range(3) for s in "kv"}
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"), extra=extra)
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path).hf_paged_kv_scales) == 3
    assert "exactly 1.0" in caplog.text


def test_registration_is_reversible_and_leaves_calibration_to_transformers() -> None:
    registry.unregister()
    original = {name: auto.AUTO_QUANTIZER_MAPPING[name] for name in ("awq", "gptq", "compressed-tensors", "fp8")}
    configs = {name: auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] for name in original}
    registry.register()
    registry.register()
    with pytest.raises(ImportError, match="optimum"):  # quantizing an unquantized model is Transformers' own business
        auto.AutoHfQuantizer.from_config(transformers.GPTQConfig(bits=4), pre_quantized=False)
    registry.unregister()
    registry.unregister()
    assert {name: auto.AUTO_QUANTIZER_MAPPING[name] for name in original} == original
    assert {name: auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] for name in original} == configs
    registry.register()


@pytest.mark.parametrize(
    "options", [{"version": "GEMM"}, {"w_bit": 4, "q_group_size": 32, "bits": None}, {"backend": "autoawq"}]
)
def test_old_and_odd_awq_configs_are_read(options: dict[str, object], tmp_path: Path) -> None:
    """transformers 27318: `version: "GEMM"` in capitals was refused."""
    base = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "exllama_config": None,
        "do_fuse": True,
    }
    truth = write_model(tiny_model("llama"), tmp_path, AWQ, config={**base, **options})
    assert logit_error(load(tmp_path), truth) < EXACT


def test_a_config_passed_by_the_user_still_loads(tmp_path: Path) -> None:
    """Scripts pass GPTQConfig(bits=4, ...) to choose another package's backend: that must not stop ours."""
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    with pytest.warns(UserWarning, match="quantization_config"):
        loaded = load(tmp_path, quantization_config=transformers.GPTQConfig(bits=4, backend="marlin"))
    assert logit_error(loaded, truth) < EXACT


@pytest.mark.parametrize(
    "form",
    [Format(act_order=True, symmetric=False), Format(method="awq", symmetric=False), Format(bits=8, group_size=-1)],
    ids=str,
)
def test_a_random_checkpoint_loads_and_keeps_the_size_of_its_activations(form: Format, tmp_path: Path) -> None:
    """The 70B figures rest on this generator: sharded like a real file, and no layer may overflow or die out."""
    shape = LlamaShape(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, vocab=64)
    write_checkpoint(tmp_path, shape, form)
    model = load(tmp_path)
    assert isinstance(model.model.layers[1].mlp.down_proj, PackedLinear)
    with torch.no_grad():
        hidden = model.model(INPUT).last_hidden_state
    assert 0.3 < float(hidden.std()) < 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("config_groups",), "x"),
        (("config_groups", "group_0"), [None]),
        (("config_groups", "group_0", "weights"), 3),
        (("config_groups", "group_0", "weights", "group_size"), "x"),
        (("config_groups", "group_0", "weights", "num_bits"), 4.0),
        (("config_groups", "group_0", "targets"), 3),
        (("config_groups", "group_0", "targets"), [None]),
        (("config_groups", "group_0", "targets"), ["re:("]),
    ],
)
def test_a_config_of_the_wrong_shape_is_named_and_no_attribute_error(
    path: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"))
    config = json.loads((tmp_path / "config.json").read_text())
    place = config["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_quant_method_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    """Transformers skips it with a warning: the packed tensors stay unused and the linears random."""
    write_model(tiny_model("llama"), tmp_path, GPTQ, config={"quant_method": "gptq-next", "bits": 4})
    with pytest.raises(ValueError, match=r"quant_method='gptq-next' is not allowed; allowed: .*awq.*gptq"):
        load(tmp_path)
    registry.unregister()
    try:
        assert not auto.AutoHfQuantizer.supports_quant_method({"quant_method": "gptq-next"})
        assert isinstance(vars(auto.AutoHfQuantizer)["supports_quant_method"], staticmethod)
    finally:
        registry.register()
