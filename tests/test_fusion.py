"""Fusion: the same model with fewer kernels, or the model as it was and a reason."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from model_zoo import FAMILIES, prompts, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_paged import LLM, SamplingParams
from hf_paged.fused_modules import leaves_tokens_out
from hf_paged.fusion import FusionReport, fuse
from hf_paged.kernels.cpu_linear import can_reorder
from hf_paged.kernels.layout import AttentionMetadata
from hf_paged.kv_cache import KVCache, layer_formats
from hf_paged.model_runner import StepContext
from hf_paged.model_view import ModelFingerprint, build_view
from hf_paged.packed_model import PackedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK_SIZE = 16
needs_onednn = pytest.mark.skipif(
    not can_reorder(torch.zeros(32, 64, dtype=torch.bfloat16)), reason="oneDNN has no bf16 products here"
)
# Families whose layers keep a component: no RMSNorm, no gated MLP, a scaled residual, a norm across heads.
KEEPS_LAYERS = ("gpt_neox", "gpt2", "granite", "cohere", "starcoder2", "stablelm")
KEEPS_MLP = ("gpt_neox", "gpt2", "mixtral", "gpt_oss", "starcoder2")
KEEPS_ATTENTION = ("olmo2",)
# Two sets of frequencies, none at all, every angle once or twice in turn.
KEEPS_ROTARY = ("gemma3_text", "gpt2", "gpt_oss", "cohere")
KEEPS_LAST = (*KEEPS_LAYERS, *KEEPS_ATTENTION)


def fused_view(model: PreTrainedModel) -> tuple[PreTrainedModel, FusionReport]:
    view = build_view(model)
    return view, fuse(view)


@torch.no_grad()
def step_logits(view: PreTrainedModel, tokens: int = 21, wanted: Tensor | None = None) -> Tensor:
    """`[tokens, vocab]` of one packed prompt through fresh pages; with `wanted`, of those tokens."""
    device = next(view.parameters()).device
    model = PackedModel(view)
    specs = model.specs
    num_blocks = tokens // BLOCK_SIZE + 1
    formats = layer_formats(specs, "auto", ())
    empty = KVCache(specs, formats, num_blocks=0, block_size=BLOCK_SIZE)
    cache = KVCache(specs, formats, num_blocks=1 + num_blocks * len(empty.groups), block_size=BLOCK_SIZE)
    metadata = []
    for group in range(len(cache.groups)):
        blocks = torch.arange(1 + group * num_blocks, 1 + (group + 1) * num_blocks, device=device)
        metadata.append(
            AttentionMetadata(
                cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
                block_tables=blocks.int().unsqueeze(0),
                slot_mapping=blocks[0] * BLOCK_SIZE + torch.arange(tokens, device=device),
                num_decodes=0,
                max_seqlen_q=tokens,
                max_seq_len=tokens,
            )
        )
    ids = prompts((tokens,))[0].to(device)
    positions = torch.arange(tokens, device=device)
    return model(ids, positions, StepContext(cache, tuple(metadata), wanted))


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """A few roundings per layer, each half a step of the dtype, grow through at most 4 layers and the norms between:
    8 steps of the logits' root mean square; in fp32 the order of sums adds to that, 2^-18 in all."""
    step = 2.0**-21 if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
    error = (actual.double() - expected.double()).square().mean().sqrt()
    assert error <= 8 * step * expected.double().square().mean().sqrt()
    torch.testing.assert_close(actual.double().std(), expected.double().std(), rtol=8 * step, atol=0)


def generated(model: PreTrainedModel, **options: object) -> list[list[int]]:
    llm = LLM(model, num_blocks=200, block_size=BLOCK_SIZE, max_num_batched_tokens=20, **options)  # type: ignore[arg-type]  # mixed values
    ids = [prompt.tolist() for prompt in prompts((5, 19, 1, 33))]
    return [output.outputs[0].token_ids for output in llm.generate(ids, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_fused_in_every_family(family: str) -> None:
    """A pattern that silently stops matching a family would only show as lost speed."""
    model = tiny_model(family)
    _, report = fused_view(model)
    layers = model.config.num_hidden_layers
    expected = {
        "decoder layer": 0 if family in KEEPS_LAYERS else layers,
        "MLP": 0 if family in KEEPS_MLP else layers,
        "attention": 0 if family in KEEPS_ATTENTION or family == "stablelm" else layers,
    }
    assert {name: report.component(name).fused for name in expected} == expected
    assert report.component("rotary tables").fused == (family not in KEEPS_ROTARY)
    for name, count in expected.items():
        if count == 0 and not (name != "MLP" and family == "stablelm"):
            assert sum(report.component(name).kept.values()) == layers and all(report.component(name).kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_step_gives_the_logits_of_the_model(family: str) -> None:
    model = tiny_model(family)
    expected = step_logits(build_view(model))
    assert_same_logits(step_logits(fused_view(model)[0]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_computes_only_the_token_that_becomes_logits(family: str) -> None:
    """A family whose last layer is read by something else than a norm and the head keeps all tokens."""
    view, report = fused_view(tiny_model(family))
    assert leaves_tokens_out(view) == (family not in KEEPS_LAST), report
    if leaves_tokens_out(view):
        logits = step_logits(view, wanted=torch.tensor([20]))
        assert logits.shape[0] == 1
        assert_same_logits(logits, step_logits(view)[-1:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "olmo2"])
def test_a_fused_step_in_bf16_stays_within_a_few_roundings(family: str) -> None:
    """Not for mixtures of experts, where one rounding may choose another expert."""
    model = tiny_model(family).bfloat16()
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    assert report.component("decoder layer").fused == model.config.num_hidden_layers
    assert_same_logits(step_logits(view), expected)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_engine_generates_the_same_tokens(family: str, kv_cache_dtype: str) -> None:
    model = tiny_model(family)
    expected = generated(model, fuse=False, kv_cache_dtype=kv_cache_dtype)
    assert generated(model, fuse=True, kv_cache_dtype=kv_cache_dtype) == expected


def test_the_user_s_model_computes_the_very_same_and_holds_no_second_copy() -> None:
    model = tiny_model("qwen2")
    ids = prompts((9,))[0].unsqueeze(0)
    before = model(ids).logits
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    identities = [id(parameter) for parameter in model.parameters()]
    view, _ = fused_view(model)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model(ids).logits, before)
    attention = model.model.layers[1].self_attn
    q, k, v = (getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj"))
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.data_ptr() == q.data_ptr() + q.numel() * 4 and v.data_ptr() == k.data_ptr() + k.numel() * 4
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.numel() * 4 for p in model.parameters())
    assert view.model.layers[1].self_attn.q_proj.weight is q


def test_a_second_engine_moves_no_weight() -> None:
    """Moving them again would make the first engine's fingerprint stale, and every call would rebuild."""
    model = tiny_model("llama")
    fused_view(model)
    fingerprint = ModelFingerprint(model)
    fused_view(model)
    assert ModelFingerprint(model).structure == fingerprint.structure


def test_one_engine_serves_many_calls() -> None:
    llm = LLM(tiny_model("llama"), num_blocks=50, block_size=16, fuse=True)
    engine = llm.engine
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert llm.engine is engine


def test_weights_written_in_place_are_seen() -> None:
    model = tiny_model("llama")
    llm = LLM(model, num_blocks=50, block_size=16, fuse=True)
    prompt = [[5, 6, 7, 8]]
    before = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    loss = model(torch.tensor(prompt), labels=torch.tensor(prompt)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=3.0).step()
    after = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    fresh = LLM(model, num_blocks=50, block_size=16, fuse=False)
    assert after == fresh.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert after != before


@needs_onednn
def test_reordered_copies_are_made_once_and_follow_writes_that_no_version_tells() -> None:
    """Tokens of old weights would be wrong without an error; a copy of a joined weight's parts would never be read."""
    model = tiny_model("llama").bfloat16()
    prompt = [[5, 6, 7, 8]]

    def tokens(llm: LLM) -> list[int]:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    llm = LLM(model, num_blocks=50, block_size=16)
    engine, before = llm.engine, tokens(llm)
    assert len(engine.reordered) == 3 * len(("qkv", "o", "gate and up", "down")) + len(("output",))
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        model.get_parameter(f"model.layers.1.{name}.weight").data.neg_()
        after = tokens(llm)
        assert llm.engine is engine
        assert after == tokens(LLM(model, num_blocks=50, block_size=16)) != before
        before = after


@needs_onednn
def test_weights_whose_copies_do_not_fit_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama").bfloat16()
    memory = psutil.virtual_memory()
    with caplog.at_level("INFO", "hf_paged"):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=100_000))
        llm = LLM(model, num_blocks=50, block_size=16)
    assert not len(llm.engine.reordered) and "not reordered" in caplog.text
    assert llm.generate([[5, 6, 7, 8]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_moved_model_is_fused_again() -> None:
    model = tiny_model("llama")
    llm = LLM(model, num_blocks=50, block_size=16, fuse=True)
    model.bfloat16()
    tokens = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    fresh = LLM(model, num_blocks=50, block_size=16, fuse=True)
    assert llm.engine.fusion.component("decoder layer").fused == 3
    assert tokens == fresh.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_fused_model_is_saved_whole(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = prompts((9,))[0].unsqueeze(0)
    expected = model(ids).logits
    fused_view(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, expected)


def test_a_call_without_pages_runs_the_model_s_own_attention() -> None:
    model = tiny_model("llama")
    view, _ = fused_view(model)
    ids = prompts((9,))[0].unsqueeze(0).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected, actual = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, view))
    assert_same_logits(actual, expected)


def test_a_view_goes_without_a_garbage_collection() -> None:
    """A cycle through a fused forward would keep a deleted model's weights on the GPU."""
    view, _ = fused_view(tiny_model("llama"))
    layers = [weakref.ref(module) for module in view.model.layers]
    gc.collect()
    gc.disable()
    try:
        del view
        assert all(layer() is None for layer in layers)
    finally:
        gc.enable()


def test_frequencies_that_change_with_the_length_are_not_fused() -> None:
    """Four tokens of a short context do not show that they do."""
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    _, report = fused_view(model)
    assert report.component("rotary tables").fused == 0 and report.component("decoder layer").fused == 3


def test_fusion_is_on_unless_refused() -> None:
    model = tiny_model("llama")
    assert LLM(model, num_blocks=50, block_size=16).engine.fusion.component("decoder layer").fused == 3
    assert "not fused" in str(LLM(model, num_blocks=50, block_size=16, fuse=False).engine.fusion)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_engine_generates_the_same_tokens_on_the_gpu(family: str) -> None:
    model = tiny_model(family).cuda()
    assert generated(model, fuse=True) == generated(model, fuse=False)


@pytest.mark.gpu
def test_joining_weights_leaves_no_holes_in_device_memory() -> None:
    """`from_pretrained` carves all weights out of one allocation: what fits no hole there costs KV blocks."""
    model = tiny_model("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=12)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    torch.cuda.empty_cache()
    arena = torch.empty(size + (64 << 20), dtype=torch.uint8, device="cuda")
    del arena
    model.cuda()
    before = torch.cuda.memory_reserved()
    view, report = fused_view(model)
    layer = sum(parameter.numel() * 4 for parameter in view.model.layers[0].parameters())
    assert report.component("joined projections").fused == 24
    assert torch.cuda.memory_reserved() - before <= 2 * layer


@pytest.mark.gpu
def test_a_fused_decode_step_takes_ten_kernels_a_layer() -> None:
    """Two norms with residual, QKV, RoPE and write, attention and its reduction, output, gate-up, act, down."""
    counts = []
    for layers in (2, 6):
        llm = LLM(tiny_model("llama", num_hidden_layers=layers, head_dim=64).cuda().half(), num_blocks=50, fuse=True)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate([[5, 6, 7]], params, use_tqdm=False)
        counts.append(sum(event.count for event in profile.key_averages() if "mem" not in event.key.lower()))
    assert (counts[1] - counts[0]) / 4 / 40 <= 11.0


class WritesBefore(nn.Module):
    """A decoder layer behind a write in place into what the layer before it gave."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self.layer(hidden_states.mul_(1.5), **kwargs)


class WritesItsInput(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.mul_(1.5), **kwargs)


@pytest.mark.parametrize("where", ["between layers", "in a layer"])
def test_a_write_in_place_into_the_residual_stream_is_not_lost(where: str) -> None:
    """The trace holds tensors, not copies: what was written later is compared with itself, and the norm that one layer
    hands to the next is that of what was there before."""
    model = tiny_model("llama")
    if where == "in a layer":
        model.model.layers[1].__class__ = WritesItsInput
    else:
        model.model.layers[1] = WritesBefore(model.model.layers[1])
    expected = step_logits(build_view(model))
    view, report = fused_view(model)
    assert_same_logits(step_logits(view), expected)
    assert report.component("decoder layer").fused < 3
    if where == "in a layer":
        assert report.component("decoder layer").kept["it writes its input in place"] == 1
