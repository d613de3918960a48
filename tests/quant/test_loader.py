"""`from_pretrained` on quantized files of every family and arrangement, and the errors of files that cannot be used."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from model_zoo import tiny_model
from quant_files import Cell, pack_linear, quantize, random_integers, save_files, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import auto

from hf_paged.quant import registry
from hf_paged.quant.config import GPTQConfig
from hf_paged.quant.experts import PackedExperts
from hf_paged.quant.formats import read
from hf_paged.quant.fp8 import Fp8Linear
from hf_paged.quant.layout import Label, TensorSpec, identify
from hf_paged.quant.linear import PackedLinear

GPTQ = Cell(act_order=True)
AWQ = Cell(kind="awq_gemm")
INPUT = torch.arange(3, 25).reshape(2, 11)
# fp32 on both sides: what remains is the order of the sums
EXACT = 1e-5


def _load(folder: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def _error(model: PreTrainedModel, truth: PreTrainedModel) -> float:
    with torch.no_grad():
        expected = truth(INPUT).logits.float()
        return float((model(INPUT).logits.float() - expected).abs().max() / expected.abs().max())


def _moe(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        shared_expert_intermediate_size=96,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("family", "cell"),
    [
        ("llama", GPTQ),
        ("qwen2", AWQ),  # biases on q, k, v
        ("gpt2", GPTQ),  # Conv1D: weights stored the other way round
        ("gpt2", AWQ),
        ("phi3", Cell(kind="compressed", bits=8, group_size=-1, symmetric=True)),
        ("gemma2", Cell(bits=3, group_size=-1, act_order=True)),
        ("gpt_neox", Cell(bits=8, act_order=True)),
        ("starcoder2", Cell(kind="awq_gemv")),
        ("mistral", Cell(bits=2, symmetric=True)),
        ("mixtral", AWQ),
        ("mixtral", GPTQ),
        ("qwen3_moe", Cell(kind="compressed", act_order=True)),
        ("qwen2_moe", AWQ),  # a shared expert beside the routed ones
    ],
    ids=lambda value: str(value),
)
def test_a_family_answers_as_its_dequantized_self_and_saves_back(family: str, cell: Cell, tmp_path: Path) -> None:
    """Experts that match no key start random without an error; biases, Conv1D and act-order each break in their own
    way.
    """
    model = _moe(family) if "moe" in family else tiny_model(family)
    truth = write_model(model, tmp_path, cell)
    attention = {"attn_implementation": model.config._attn_implementation}
    loaded = _load(tmp_path, **attention)
    assert _error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert _error(_load(tmp_path / "again", **attention), truth) < EXACT


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
    assert isinstance(_load(tmp_path).model.layers[0].mlp.up_proj, PackedLinear)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_a_head_is_what_the_file_holds(head: bool, tied: bool, tmp_path: Path) -> None:
    """sglang 2935, vllm 45543: a quantized head under a tied config, and a tied head without a tensor of its own."""
    model = tiny_model("llama", tie_word_embeddings=tied and not head)
    model.config.tie_word_embeddings = False if head else tied
    truth = write_model(model, tmp_path, AWQ, head=head)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    loaded = _load(tmp_path)
    assert isinstance(loaded.lm_head, PackedLinear) == head
    assert _error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert _error(_load(tmp_path / "again"), truth) < EXACT


def test_dynamic_rules_give_modules_their_own_bits_or_none(tmp_path: Path) -> None:
    """GPTQModel `dynamic`: one layer at 8 bits, one left plain; the rest of the config must not be applied to them."""
    eight, skipped = "model.layers.1.mlp.down_proj", "model.layers.2.self_attn.k_proj"
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "checkpoint_format": "gptq",
        "dynamic": {r"+:.*\.1\.mlp\.down.*": {"bits": 8, "group_size": 96}, r"-:.*\.2\.self_attn\.k.*": {}},
    }
    truth = write_model(
        tiny_model("llama"), tmp_path, Cell(), config=config, cells={eight: Cell(bits=8, group_size=96), skipped: None}
    )
    loaded = _load(tmp_path)
    assert loaded.get_submodule(eight).layout.bits == 8
    assert isinstance(loaded.get_submodule(skipped), torch.nn.Linear)
    assert _error(loaded, truth) < EXACT


def test_wrong_bits_in_the_config_are_an_error(tmp_path: Path) -> None:
    write_model(
        tiny_model("llama"), tmp_path, Cell(bits=8), config={"quant_method": "gptq", "bits": 4, "group_size": 32}
    )
    with pytest.raises(ValueError, match=r"self_attn.*quantization_config says 4 bits, the tensors hold 8"):
        _load(tmp_path)


def test_zero_biases_of_autogptq_are_dropped_and_real_ones_kept(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every linear; a non-zero one belongs to the function whatever the class says."""
    zero, real = "model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.down_proj.bias"
    extra = {zero: torch.zeros(96, dtype=torch.float16), real: torch.full((64,), 0.25, dtype=torch.float16)}
    truth = write_model(tiny_model("llama"), tmp_path, Cell(), extra=extra)
    truth.model.layers[0].mlp.down_proj.bias = torch.nn.Parameter(torch.full((64,), 0.25))
    loaded = _load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.bias is None
    assert _error(loaded, truth) < EXACT


def _fp8_model(folder: Path, grain: str, static: bool = False) -> tuple[PreTrainedModel, dict[str, object]]:
    """A tiny Llama (or Mixtral) in FP8 with scales per `grain`, and its dequantized self."""
    model = tiny_model("llama")
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
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
    return _load(folder / "dense"), config


@pytest.mark.parametrize(
    ("grain", "static"), [("tensor", False), ("tensor", True), ("channel", False), ("block", False)]
)
def test_fp8_files_answer_within_the_step_of_their_activations(grain: str, static: bool, tmp_path: Path) -> None:
    """Per tensor, per channel and 128x128-style blocks; activations static, dynamic or left alone."""
    truth, _ = _fp8_model(tmp_path, grain, static)
    loaded = _load(tmp_path)
    for name, module in loaded.named_modules():
        if isinstance(module, Fp8Linear):
            x = torch.randn(16, module.in_features, generator=torch.Generator().manual_seed(0))
            expected = x @ truth.get_submodule(name).weight.t()
            error = float((module(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
            # e4m3 keeps 3 bits of mantissa: a uniform error of 2 ** -4 of a value has an rms of 2 ** -4 / sqrt(3)
            assert error < (2**-4 / 3**0.5 if static or grain != "tensor" else EXACT), name
    assert sum(isinstance(module, Fp8Linear) for module in loaded.modules()) == 21
    loaded.save_pretrained(tmp_path / "again")
    assert _error(_load(tmp_path / "again"), loaded) < EXACT


def test_fp8_experts_load_stacked(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    dense = dict(state)
    for name in [name for name in state if ".experts." in name]:
        scale = state[name].abs().amax(1, keepdim=True) / 448
        state[name] = (state[name] / scale).to(torch.float8_e4m3fn)
        dense[name] = state[name].float() * scale
        state[name.replace("weight", "weight_scale")] = scale
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    save_files(tmp_path, state, model.config.to_dict(), config)
    save_files(tmp_path / "dense", dense, model.config.to_dict(), None)
    loaded = _load(tmp_path)
    assert isinstance(loaded.model.layers[0].mlp.experts, PackedExperts)
    assert _error(loaded, _load(tmp_path / "dense")) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert _error(_load(tmp_path / "again"), loaded) < EXACT


def test_one_missing_expert_is_an_error_and_not_a_random_one(tmp_path: Path) -> None:
    write_model(tiny_model("mixtral"), tmp_path, AWQ)
    state = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if ".1.block_sparse_moe.experts.2.w3." not in k}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.2\.w3 are missing: expected 4 experts"):
        _load(tmp_path)


def test_shards_load_as_one_file_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ, shards=3)
    assert _error(_load(tmp_path), truth) < EXACT
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="model-00002-of-00003"):
        _load(tmp_path)


def test_bin_files_need_the_flag(tmp_path: Path) -> None:
    """A .bin is a pickle: it is opened only when the caller says so."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell())
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected \.safetensors.*allow_bin=True"):
        _load(tmp_path)
    assert _error(_load(tmp_path, quantization_config=GPTQConfig(allow_bin=True)), truth) < EXACT


def test_all_problems_of_a_header_come_in_one_error(tmp_path: Path) -> None:
    """Missing, extra and misshapen tensors, packed and plain: each named, before any weight is read."""
    write_model(tiny_model("llama"), tmp_path, Cell())
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.qweight"], state["model.norm.weight"]
    state["model.layers.9.mlp.up_proj.qweight"] = torch.zeros(8, 96, dtype=torch.int32)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].t().contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="this checkpoint cannot be loaded") as raised:
        _load(tmp_path)
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
            _load(tmp_path)


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0])
def test_impossible_kv_scales_are_an_error(value: float, tmp_path: Path) -> None:
    extra = {
        f"model.layers.{i}.self_attn.{s}_scale": torch.tensor([value if (i, s) == (1, "v") else 0.1])
        for i in range(3)
        for s in "kv"
    }
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"), extra=extra)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_scale: expected a KV-cache scale > 0"):
        _load(tmp_path)


def test_kv_scales_of_exactly_one_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"model.layers.{i}.self_attn.{s}_scale": torch.ones(1) for i in range(3) for s in "kv"}
    write_model(tiny_model("llama"), tmp_path, Cell(kind="compressed"), extra=extra)
    with caplog.at_level(logging.WARNING):
        assert len(_load(tmp_path).hf_paged_kv_scales) == 3
    assert "exactly 1.0" in caplog.text


def test_a_loaded_model_can_be_copied_moved_and_restored(tmp_path: Path) -> None:
    """The engine runs a deep copy that shares parameters and buffers: a tensor hidden elsewhere would be doubled or
    lost.
    """
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    loaded = _load(tmp_path)
    shared = {id(value): value for value in [*loaded.parameters(), *loaded.buffers()]}
    view = copy.deepcopy(loaded, memo=shared)
    assert all(one is two for one, two in zip(loaded.parameters(), view.parameters()))
    assert _error(view, truth) < EXACT
    assert _error(copy.deepcopy(loaded), truth) < EXACT
    fresh = _load(tmp_path)
    for value in fresh.parameters():
        value.data.zero_()
    fresh.load_state_dict(loaded.state_dict())
    assert _error(fresh.to("cpu"), truth) < EXACT
    assert all(not value.requires_grad for name, value in loaded.named_parameters() if "proj" in name)


def test_the_forward_is_one_graph_for_the_compiler(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    loaded = _load(tmp_path)
    compiled = torch.compile(loaded.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        error = (compiled(INPUT, use_cache=False).logits - truth(INPUT).logits).abs().max()
    assert float(error) < 1e-3


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_can_be_offloaded(place: str, tmp_path: Path) -> None:
    """accelerate moves parameters in and out around each forward; the converted ones must be what it stores."""
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    first = "cpu" if place == "disk" else "meta"
    if first == "meta":
        device_map: dict[str, str] = {"": "cpu"}
    else:
        device_map = {
            "model.embed_tokens": "cpu",
            "model.layers.0": "cpu",
            "model.layers.1": "disk",
            "model.layers.2": "disk",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
    loaded = _load(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    assert _error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert _error(_load(tmp_path / "again"), truth) < EXACT


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
    assert _error(_load(tmp_path), truth) < EXACT


def test_a_config_passed_by_the_user_still_loads(tmp_path: Path) -> None:
    """Scripts pass GPTQConfig(bits=4, ...) to choose another package's backend: that must not stop ours."""
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    with pytest.warns(UserWarning, match="quantization_config"):
        loaded = _load(tmp_path, quantization_config=transformers.GPTQConfig(bits=4, backend="marlin"))
    assert _error(loaded, truth) < EXACT


@pytest.mark.parametrize("k", [10944 // 16, 7392 // 16, 96])
def test_input_sizes_that_fill_no_tile_load(k: int) -> None:
    """vllm 9913, llm-compressor 57: K = 10944 or 7392, a multiple of the group and of nothing larger."""
    cell = Cell(group_size=k // 6 if k % 32 else 32, symmetric=False)
    integers = random_integers(cell, 24, k)
    tensors = pack_linear(cell, integers)
    names = {torch.int32: "I32", torch.float16: "F16"}
    specs = {name: TensorSpec(dtype=names[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}
    layout = identify("m", specs, k, 24, Label(bits=4, group_size=cell.group_size))
    linear = PackedLinear(layout, bias=False, dtype=torch.float32, scales_dtype=torch.float16)
    linear.load(read("m", layout, tensors))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(linear(x), x @ integers.dequantize().t(), atol=1e-5)


def test_the_cpu_paths_agree(tmp_path: Path) -> None:
    """bf16 goes to torch's int4 kernel for few rows, to a plain copy for many, and with cpu_cache off to the
    definition.
    """
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)) / 11
    integers = quantize(weight, Cell(group_size=64, act_order=True))
    tensors = pack_linear(Cell(), integers)
    names = {torch.int32: "I32", torch.float16: "F16"}
    specs = {name: TensorSpec(dtype=names[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}
    layout = identify("m", specs, 128, 48, Label(bits=4, group_size=64))
    linear = PackedLinear(layout, bias=False, dtype=torch.bfloat16, scales_dtype=torch.float16)
    linear.load(read("m", layout, tensors))
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    few, many = linear(x[:4]), linear(x)
    linear.cpu_cache = False
    plain = linear(x)
    truth = x.float() @ integers.dequantize().t()
    assert linear.int4 is not None and linear.dense is not None
    for out, expected in ((few, truth[:4]), (many, truth), (plain, truth)):
        # scales and outputs are rounded to bf16 (2 ** -9 each), sums average the first
        assert float((out.float() - expected).abs().max() / expected.abs().max()) < 2**-7
