"""`from_pretrained` on quantized files of every family, head, expert and place."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from model_zoo import tiny_model
from quant_files import (
    EXACT,
    INPUT,
    Cell,
    load,
    logit_error,
    pack_linear,
    quantize,
    save_files,
    write_fp8_model,
    write_model,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_paged.info import checkpoint_bytes
from hf_paged.model_view import ModelFingerprint, build_view
from hf_paged.quant.check import check_layer
from hf_paged.quant.experts import PackedExperts
from hf_paged.quant.formats import read
from hf_paged.quant.fp8 import Fp8Linear
from hf_paged.quant.layout import Label, TensorSpec, identify
from hf_paged.quant.linear import PackedLinear

GPTQ = Cell(act_order=True)
AWQ = Cell(kind="awq_gemm")


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
    loaded = load(tmp_path, **attention)
    assert logit_error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert logit_error(load(tmp_path / "again", **attention), truth) < EXACT


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_a_head_is_what_the_file_holds(head: bool, tied: bool, tmp_path: Path) -> None:
    """sglang 2935, vllm 45543: a quantized head under a tied config, and a tied head without a tensor of its own."""
    model = tiny_model("llama", tie_word_embeddings=tied and not head)
    model.config.tie_word_embeddings = False if head else tied
    truth = write_model(model, tmp_path, AWQ, head=head)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    loaded = load(tmp_path)
    assert isinstance(loaded.lm_head, PackedLinear) == head
    assert logit_error(loaded, truth) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), truth) < EXACT


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
    loaded = load(tmp_path)
    assert loaded.get_submodule(eight).layout.bits == 8
    assert isinstance(loaded.get_submodule(skipped), torch.nn.Linear)
    assert logit_error(loaded, truth) < EXACT


def test_groups_that_no_kernel_cuts_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They still load and compute, dequantized at each call: a user should know why the model is slow."""
    truth = write_model(tiny_model("llama"), tmp_path, Cell(group_size=24))
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert logit_error(load(tmp_path), truth) < EXACT
    told = [record.getMessage() for record in caplog.records if "no kernel cuts" in record.getMessage()]
    assert len(told) == 1 and "21 packed linears (model.layers.0" in told[0]


def test_zero_biases_of_autogptq_are_dropped_and_real_ones_kept(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every linear; a non-zero one belongs to the function whatever the class says."""
    zero, real = "model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.down_proj.bias"
    extra = {zero: torch.zeros(96, dtype=torch.float16), real: torch.full((64,), 0.25, dtype=torch.float16)}
    truth = write_model(tiny_model("llama"), tmp_path, Cell(), extra=extra)
    truth.model.layers[0].mlp.down_proj.bias = torch.nn.Parameter(torch.full((64,), 0.25))
    loaded = load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.bias is None
    assert logit_error(loaded, truth) < EXACT


@pytest.mark.parametrize(
    ("grain", "static"), [("tensor", False), ("tensor", True), ("channel", False), ("block", False)]
)
def test_fp8_files_answer_within_the_step_of_their_activations(grain: str, static: bool, tmp_path: Path) -> None:
    """Per tensor, per channel and 128x128-style blocks; activations static, dynamic or left alone."""
    truth = write_fp8_model(tiny_model("llama"), tmp_path, grain, static=static)
    loaded = load(tmp_path)
    for name, module in loaded.named_modules():
        if isinstance(module, Fp8Linear):
            x = torch.randn(16, module.in_features, generator=torch.Generator().manual_seed(0))
            expected = x @ truth.get_submodule(name).weight.t()
            error = float((module(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
            # e4m3 keeps 3 bits of mantissa: a uniform error of 2 ** -4 of a value has an rms of 2 ** -4 / sqrt(3)
            assert error < (2**-4 / 3**0.5 if static or grain != "tensor" else EXACT), name
    assert sum(isinstance(module, Fp8Linear) for module in loaded.modules()) == 21
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), loaded) < EXACT


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
    loaded = load(tmp_path)
    assert isinstance(loaded.model.layers[0].mlp.experts, PackedExperts)
    assert logit_error(loaded, load(tmp_path / "dense")) < EXACT
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), loaded) < EXACT


def test_a_loaded_model_can_be_copied_moved_and_restored(tmp_path: Path) -> None:
    """The engine runs a deep copy that shares parameters and buffers: a tensor hidden elsewhere would be doubled or
    lost.
    """
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    loaded = load(tmp_path)
    shared = {id(value): value for value in [*loaded.parameters(), *loaded.buffers()]}
    view = copy.deepcopy(loaded, memo=shared)
    assert all(one is two for one, two in zip(loaded.parameters(), view.parameters()))
    assert logit_error(view, truth) < EXACT
    assert logit_error(copy.deepcopy(loaded), truth) < EXACT
    fresh = load(tmp_path)
    for value in fresh.parameters():
        value.data.zero_()
    fresh.load_state_dict(loaded.state_dict())
    assert logit_error(fresh.to("cpu"), truth) < EXACT
    assert all(not value.requires_grad for name, value in loaded.named_parameters() if "proj" in name)


def test_a_cast_of_the_model_leaves_scales_and_codes_as_they_are(tmp_path: Path) -> None:
    """Scales rounded to bf16 are others, FP8 codes in bf16 are none; Transformers refuses `.half()`, not this."""
    write_model(tiny_model("llama"), tmp_path / "packed", GPTQ)
    write_fp8_model(tiny_model("llama"), tmp_path / "fp8", "channel")
    for folder in ("packed", "fp8"):
        model, truth = load(tmp_path / folder).bfloat16(), load(tmp_path / folder, dtype=torch.bfloat16)
        for name, value in truth.state_dict().items():
            assert model.state_dict()[name].dtype == value.dtype, name
        x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model.model.layers[1].mlp.up_proj(x), truth.model.layers[1].mlp.up_proj(x))


def test_the_base_of_a_model_loads_without_its_quantized_head(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ, head=True)
    with torch.no_grad():
        expected, found = (m(INPUT).last_hidden_state for m in (truth.model, AutoModel.from_pretrained(tmp_path)))
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_forward_is_one_graph_for_the_compiler(tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ)
    loaded = load(tmp_path)
    compiled = torch.compile(loaded.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        error = (compiled(INPUT, use_cache=False).logits - truth(INPUT).logits).abs().max()
    assert float(error) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_can_be_offloaded_from_a_gpu(place: str, tmp_path: Path) -> None:
    truth = write_model(tiny_model("llama"), tmp_path, GPTQ).to("cuda")
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {**dict.fromkeys(names, 0), "model.layers.1": place, "model.layers.2": place}
    loaded = load(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    with torch.no_grad():
        expected = truth(INPUT.to("cuda")).logits
        actual = loaded(INPUT.to("cuda")).logits
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4  # cuBLAS sums in another order


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
    loaded = load(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    assert logit_error(loaded, truth) < EXACT
    linears = {name: module for name, module in loaded.named_modules() if isinstance(module, PackedLinear)}
    kept = {name.split(".")[2] for name, module in linears.items() if module.on_cpu.dense is not None}
    assert kept == ({"0"} if place == "disk" else {"0", "1", "2"})  # plain copies would hold the offloaded layers
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), truth) < EXACT


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
    assert linear.on_cpu.int4 is not None and linear.on_cpu.dense is not None
    for out, expected in ((few, truth[:4]), (many, truth), (plain, truth)):
        # scales and outputs are rounded to bf16 (2 ** -9 each), sums average the first
        assert float((out.float() - expected).abs().max() / expected.abs().max()) < 2**-7


def test_the_self_check_passes_good_layers_and_names_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on CUDA only; here its comparison is driven directly, with a kernel that is wrong in one column."""
    write_model(tiny_model("llama"), tmp_path, GPTQ)
    packed = load(tmp_path).model.layers[0].mlp.up_proj
    write_fp8_model(tiny_model("llama"), tmp_path / "fp8", "block")
    fp8 = load(tmp_path / "fp8").model.layers[0].mlp.up_proj
    for module in (packed, fp8):
        check_layer("layer", module, torch.float16, torch.device("cpu"))
        right = module.forward
        monkeypatch.setattr(module, "forward", lambda x, right=right: right(x) + (torch.arange(96) == 3))
        with pytest.raises(RuntimeError, match=r"layer .*differs from its definition by .*self_check=False"):
            check_layer("layer", module, torch.float16, torch.device("cpu"))


def test_what_a_cpu_derives_from_packed_weights_is_shared_by_views_and_changes_no_fingerprint(tmp_path: Path) -> None:
    """As buffers the plain copies made the first call's view stale, and every view held one of its own."""
    write_model(tiny_model("llama"), tmp_path, GPTQ)
    model = load(tmp_path)
    before, view = ModelFingerprint(model), build_view(model)
    model(torch.tensor([[3, 4]]))
    assert ModelFingerprint(model).structure == before.structure
    mine, theirs = (m.model.layers[0].mlp.up_proj.on_cpu for m in (model, view))
    assert mine is theirs and mine.dense is not None
    copied = pickle.loads(pickle.dumps(model.model.layers[0].mlp.up_proj))
    assert copied.on_cpu.dense is None
    model.to("cpu")
    assert model.model.layers[0].mlp.up_proj.on_cpu.dense is None and theirs.dense is not None


def test_three_bit_words_count_as_the_four_bit_fields_that_hold_them(tmp_path: Path) -> None:
    """A model that just fits by its files would not fit the device."""
    write_model(tiny_model("llama"), tmp_path, Cell(bits=3))
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    linears = [m for m in load(tmp_path).modules() if isinstance(m, PackedLinear)]
    words = sum(m.in_features * m.out_features for m in linears) * 3 // 8  # bytes in the file
    assert checkpoint_bytes(tmp_path) - files == pytest.approx(words / 3, rel=1e-6)
    (tmp_path / "five").mkdir()
    write_model(tiny_model("llama"), tmp_path / "five", Cell(kind="gptq_p", bits=5))
    files = (tmp_path / "five" / "model.safetensors").stat().st_size
    assert checkpoint_bytes(tmp_path / "five") - files == pytest.approx(words, rel=1e-6)  # five bits in eight
