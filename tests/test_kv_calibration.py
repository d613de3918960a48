"""Smoothing from a calibration saves the models that break naive quantized caches, and changes nothing in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_zoo import prompts, tiny_model
from transformers import PreTrainedModel

from hf_paged import LLM, calibrate_on
from hf_paged.config import EngineConfig
from hf_paged.kv_cache import layer_formats
from hf_paged.kv_calibration import CALIBRATIONS, FORMATS, _places, calibrate
from hf_paged.kv_mix import paged_log_probs
from hf_paged.kv_protection import plan_storage
from hf_paged.kv_scales import KVScales, LayerScales, SideScales, load_kv_scales, save_kv_scales, transform_of
from hf_paged.model_view import build_view
from hf_paged.packed_model import PackedModel


def packed(model: PreTrainedModel) -> PackedModel:
    return PackedModel(build_view(model))


def log_probs(model: PreTrainedModel, **options: object) -> torch.Tensor:
    """`[T, vocab]` of a prompt read through pages; nothing is protected, so that formats alone are seen."""
    view = packed(model)
    config = EngineConfig.parse({"kv_error_budget": "off", **options})
    (prompt,) = prompts((90,), seed=3)
    with torch.no_grad():
        return paged_log_probs(view, plan_storage(model, view, config).formats, prompt)


def divergence(model: PreTrainedModel, **options: object) -> float:
    """Mean KL divergence of the next-token distributions from those over fp32 pages."""
    truth, found = log_probs(model, kv_cache_dtype="auto"), log_probs(model, **options)
    return float((truth.exp() * (truth - found)).sum(-1).mean())


def huge_unrotated_channels() -> PreTrainedModel:
    """Partial RoPE; keys of the channels that do not rotate are 512 times as large, their queries 1/512: fp32 sees no
    difference, and neither does any score."""
    model = tiny_model("stablelm", use_qkv_bias=False)
    for layer in model.model.layers:
        attention = layer.self_attn
        head_dim = attention.head_dim
        unrotated = torch.arange(attention.k_proj.weight.shape[0]) % head_dim >= head_dim - 2
        with torch.no_grad():
            attention.k_proj.weight[unrotated] *= 512.0
            queries = torch.arange(attention.q_proj.weight.shape[0]) % head_dim >= head_dim - 2
            attention.q_proj.weight[queries] /= 512.0
    return model


def value_bias() -> PreTrainedModel:
    """A bias of V 300 times its size, taken back by the bias of the output projection."""
    model = tiny_model("starcoder2")
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            bias = torch.zeros_like(attention.v_proj.bias)
            bias[::3] = 300.0
            per_head = bias.view(-1, attention.head_dim)
            groups = model.config.num_attention_heads // len(per_head)
            attention.v_proj.bias += bias
            attention.o_proj.bias -= attention.o_proj.weight @ per_head.repeat_interleave(groups, 0).flatten()
    return model


def key_bias() -> PreTrainedModel:
    """A Qwen2 with a few huge key biases in the slowest channels of its first and last layers, as Qwen2.5-7B has."""
    model = tiny_model("qwen2", rope_theta=1e6)
    for layer in (model.model.layers[0], model.model.layers[-1]):
        bias = layer.self_attn.k_proj.bias
        half = layer.self_attn.head_dim // 2
        with torch.no_grad():
            bias.zero_()
            bias.view(-1, 2 * half)[:, [half - 1, 2 * half - 1]] = 150.0
    return model


BREAKING = {"key bias": key_bias, "huge channels without rotation": huge_unrotated_channels, "value bias": value_bias}


@pytest.mark.parametrize("name", ["huge channels without rotation", "value bias"])
def test_what_breaks_naive_caches_is_nothing_to_full_precision(name: str) -> None:
    """A fixture that changed the model would prove nothing about the cache."""
    ordinary = {"value bias": tiny_model("starcoder2")}.get(name, tiny_model("stablelm", use_qkv_bias=False))
    # the output of a value bias of 300 is a difference of numbers 300 times as large
    torch.testing.assert_close(
        log_probs(BREAKING[name](), kv_cache_dtype="auto"), log_probs(ordinary, kv_cache_dtype="auto"),
        rtol=0, atol=2e-3,
    )  # fmt: skip


@pytest.mark.parametrize("name", BREAKING)
def test_models_that_break_naive_caches_keep_their_distributions(name: str) -> None:
    """The largest channel takes the whole range of a row's codes, and the others are rounded away."""
    model = BREAKING[name]()
    naive = divergence(model, kv_cache_dtype="int8", kv_scales="off")
    ours = divergence(model, kv_cache_dtype="int8")
    ordinary = divergence(tiny_model("llama"), kv_cache_dtype="int8", kv_scales="off")
    assert naive > 20 * ours, (naive, ours)
    assert ours < 10 * ordinary, (ours, ordinary)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int4", "k=int8,v=int4"])
def test_every_format_gains_on_a_model_with_a_key_bias(kv_cache_dtype: str) -> None:
    model = key_bias()
    naive = divergence(model, kv_cache_dtype=kv_cache_dtype, kv_scales="off")
    assert naive > 3 * divergence(model, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "stablelm", "gpt_oss", "gemma2"])
def test_smoothing_changes_nothing_where_pages_round_nothing(family: str, kv_format: str) -> None:
    """Exact algebra through whole models in fp32: GQA, partial RoPE, sinks, softcap; "int4" rotates besides.

    Offsets of 3, factors of 1/8 to 8, all over the channels; those that do not cancel are not taken.
    """
    view = packed(tiny_model(family))
    generator = torch.Generator().manual_seed(0)
    plain = layer_formats(view.specs, "auto")
    smoothed = {}
    for spec in view.specs:
        shape = (spec.kv_heads, spec.head_dim)
        offset = 3 * torch.randn(shape, generator=generator) if spec.softcap is None else None
        factor = 2.0 ** torch.randint(-3, 4, shape, generator=generator)
        shift = None if spec.has_sinks else 3 * torch.randn(spec.kv_heads, spec.v_head_dim, generator=generator)
        scales = LayerScales(
            keys={kv_format: SideScales(offset=offset, factor=factor, error=0.0)},
            values={kv_format: SideScales(offset=shift, factor=None, error=0.0)},
        )
        transform = transform_of(spec, kv_format, kv_format, scales)
        smoothed[spec.layer_idx] = replace(plain[spec.layer_idx], transform=transform)
    assert any(spec.softcap for spec in view.specs) == (family == "gemma2")
    assert any(spec.has_sinks for spec in view.specs) == (family == "gpt_oss")
    (prompt,) = prompts((90,), seed=3)
    with torch.no_grad():
        exact, ours = (paged_log_probs(view, formats, prompt) for formats in (plain, smoothed))
    # roundings of scores of about 100, which a few layers enlarge; what does not cancel moves these by 1 and more
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-3)


def test_layers_with_a_softcap_take_no_offset_of_keys_and_those_with_sinks_none_of_values() -> None:
    """Neither would cancel; factors are exact all the same, and protection is for what is left."""
    for layer in calibrate(packed(tiny_model("gemma2")), list(FORMATS), list(FORMATS)).layers.values():
        assert all(side.offset is None or not side.offset.any() for side in layer.keys.values())
    model = sinks_and_key_bias()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias += 50.0  # an offset would pay
    for layer in calibrate(packed(model), list(FORMATS), list(FORMATS)).layers.values():
        assert all(side.offset is None for side in layer.values.values())


def sinks_and_key_bias() -> PreTrainedModel:
    """A GPT-OSS, whose rows attend to a learned sink, with huge key biases in the slowest channels."""
    model = tiny_model("gpt_oss", rope_theta=1e6)
    for layer in model.model.layers:
        half = layer.self_attn.head_dim // 2
        with torch.no_grad():
            layer.self_attn.k_proj.bias.view(-1, 2 * half)[:, [half - 1, 2 * half - 1]] = 150.0
    return model


def test_sinks_beside_a_key_bias_lose_what_the_scores_lose() -> None:
    """Were q.z taken from the scores alone, the sink would weigh more or less than it should: another model."""
    model = sinks_and_key_bias()
    smoothed = plan_storage(model, packed(model), EngineConfig(kv_cache_dtype="int8", kv_error_budget="off"))
    assert any(fmt.transform is not None and fmt.transform.sink_offset is not None for fmt in smoothed.formats.values())
    naive, ours = (divergence(model, kv_cache_dtype="int8", kv_scales=scales) for scales in ("off", "auto"))
    assert naive > 10 * ours, (naive, ours)


def test_a_softcap_beside_a_key_bias_is_left_to_factors_and_protection() -> None:
    """No offset is exact there, so the keys of such layers must not be stored in a way that breaks them."""
    model = tiny_model("gemma2", attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            half = layer.self_attn.head_dim // 2
            layer.self_attn.k_proj.bias.view(-1, 2 * half)[:, [half - 1, 2 * half - 1]] = 150.0
    naive = divergence(model, kv_cache_dtype="int8", kv_scales="off")
    ours = divergence(model, kv_cache_dtype="int8", kv_error_budget="auto")
    assert naive > 3 * ours, (naive, ours)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss", "stablelm", "mistral"])
def test_factors_are_powers_of_two_and_transforms_fit_the_layers(family: str) -> None:
    model = packed(tiny_model(family))
    scales = calibrate(model, ["int8", "int4"], ["int8", "int4"])
    assert set(scales.layers) == {spec.layer_idx for spec in model.specs}
    for spec in model.specs:
        transform = transform_of(spec, "int8", "int4", scales.layers[spec.layer_idx])
        assert transform is not None and not transform.rotates_k and transform.rotates_v
        exponents = transform.k_factor.log2()
        assert torch.equal(exponents, exponents.round()) and transform.k_factor.shape == (spec.kv_heads, spec.head_dim)


def test_a_calibration_is_the_same_every_time_and_made_once_per_model() -> None:
    """Two engines of a model must agree, and a second one costs no forward."""
    model = tiny_model("llama")
    first, second = (calibrate(packed(model), ["int8"], ["int8"]) for _ in range(2))
    for index, layer in first.layers.items():
        assert torch.equal(layer.keys["int8"].offset, second.layers[index].keys["int8"].offset)
        assert layer.keys["int8"].error == second.layers[index].keys["int8"].error
    known = CALIBRATIONS.get(model, packed(model), ["int8"], ["int8"])
    assert CALIBRATIONS.get(model, packed(model), ["int8"], ["int8"]) is known
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
    assert CALIBRATIONS.get(model, packed(model), ["int8"], ["int8"]) is not known, "weights were written"


def test_a_text_of_the_users_is_what_the_next_cache_rests_on() -> None:
    model = key_bias()
    own = calibrate(packed(model), ["int8"], ["int8"]).layers[0].keys["int8"].offset
    calibrate_on(model, prompts((70,), seed=5)[0].tolist())
    plan = LLM(model, kv_cache_dtype="int8", num_blocks=8).engine.kv_plan
    assert plan.source == "70 tokens of text"
    transform = plan.formats[0].transform
    assert transform is not None and not torch.equal(transform.k_offset, own)
    with pytest.raises(ValueError, match="at least 2 are needed"):
        calibrate_on(model, [5])


def errors(scales: KVScales) -> list[float]:
    return [
        found.error
        for layer in scales.layers.values()
        for side in (layer.keys, layer.values)
        for found in side.values()
    ]


def test_errors_are_those_of_the_current_block_that_will_run() -> None:
    """Layers would be protected from errors that no query reads, or not from those that one does."""
    ids = torch.tensor(prompts((64,), seed=5)[0].tolist())

    def measured(family: str, count: int, recent: int) -> list[float]:
        return errors(calibrate(packed(tiny_model(family)), ["int4"], ["int4"], token_ids=ids[:count], recent=recent))

    assert measured("llama", 8, recent=16) == [0.0] * 6  # every query reads every token as it came
    codes, small, large = (measured("llama", 64, recent) for recent in (0, 16, 32))
    assert all(a > b > c > 0 for a, b, c in zip(codes, small, large, strict=True))
    assert measured("mistral", 64, recent=16) == measured("mistral", 64, recent=0)  # windows: these keep codes only


def test_a_passage_in_one_block_does_not_make_larger_blocks_look_exact() -> None:
    """Passages of the model's own are no longer than 32 tokens, and read nothing before them: a text does."""
    model = packed(tiny_model("llama"))
    assert errors(calibrate(model, ["int4"], ["int4"], recent=256)) == errors(
        calibrate(model, ["int4"], ["int4"], recent=32)
    )


def test_an_engine_with_current_blocks_protects_what_they_leave() -> None:
    """It measures on the text that `calibrate_on` was given, though that was before."""
    model = key_bias()
    calibrate_on(model, prompts((70,), seed=5)[0].tolist())
    options = {"kv_cache_dtype": "int4", "num_blocks": 8, "kv_error_budget": 0.05, "max_num_seqs": 2}
    plain = LLM(model, **options).engine
    recent = LLM(model, **options, kv_recent_block=True).engine
    assert plain.kv_plan.source == "70 tokens of text"
    assert recent.kv_plan.source == "70 tokens of text, current blocks in the model's dtype"
    assert recent.kv_cache.bytes_per_token < plain.kv_cache.bytes_per_token


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    model = packed(tiny_model("qwen2"))
    scales = calibrate(model, list(FORMATS), list(FORMATS))
    save_kv_scales(scales, tmp_path / "kv.safetensors")
    loaded = load_kv_scales(tmp_path / "kv.safetensors", model)
    assert loaded.source == scales.source and loaded.mix is None
    for index, layer in scales.layers.items():
        for side, again in ((layer.keys, loaded.layers[index].keys), (layer.values, loaded.layers[index].values)):
            assert set(side) == set(again)
            for name, found in side.items():
                assert found.error == again[name].error
                for a, b in ((found.offset, again[name].offset), (found.factor, again[name].factor)):
                    assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))


def test_the_file_of_another_model_and_no_file_are_refused(tmp_path: Path) -> None:
    """Smoothing by another model's numbers would still be exact, and useless."""
    file = tmp_path / "kv.safetensors"
    save_kv_scales(calibrate(packed(tiny_model("llama")), ["int8"], ["int8"]), file)
    with pytest.raises(ValueError, match=r"layers\.0\.k\.int8\.\w+ has shape .* this model needs"):
        LLM(tiny_model("qwen3"), kv_cache_dtype="int8", kv_scales=str(file), num_blocks=8)
    with pytest.raises(ValueError, match="3 attention layers; this one has 4"):
        LLM(tiny_model("gemma3_text"), kv_cache_dtype="int8", kv_scales=str(file), num_blocks=8)
    with pytest.raises(ValueError, match=r"kv\.safetensors is of another model of this shape.* differ by 1\d\d%"):
        LLM(tiny_model("llama", seed=1), kv_cache_dtype="int8", kv_scales=str(file), num_blocks=8)
    other = tmp_path / "text.txt"
    other.write_text("no safetensors, but long enough to be some")
    with pytest.raises(ValueError, match=r"text\.txt is no file of hf-paged calibrate"):
        LLM(tiny_model("llama"), kv_cache_dtype="int8", kv_scales=str(other), num_blocks=8)
    with pytest.raises(OSError, match="calibrate"):
        LLM(tiny_model("llama"), kv_cache_dtype="int8", kv_scales=str(tmp_path / "none"), num_blocks=8)


def test_a_file_serves_its_model_in_another_dtype(tmp_path: Path) -> None:
    """What a model is known by must survive rounding: calibrated in fp32, served in bf16."""
    file = tmp_path / "kv.safetensors"
    ids = torch.tensor(prompts((40,), seed=5)[0].tolist())
    scales = calibrate(packed(tiny_model("llama")), ["int8"], ["int8"], token_ids=ids, source="this text")
    save_kv_scales(scales, file)
    engine = LLM(tiny_model("llama").bfloat16(), kv_cache_dtype="int8", kv_scales=str(file), num_blocks=8).engine
    assert engine.kv_plan.source == "this text"
    for index, layer in scales.layers.items():
        transform, offset = engine.kv_cache.layers[index].transform, layer.keys["int8"].offset
        assert transform is not None and offset is not None and torch.equal(transform.k_offset, offset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_scales": 3}, "kv_scales=3"),
        ({"kv_error_budget": "much"}, "kv_error_budget='much'"),
        ({"kv_error_budget": -1.0}, "kv_error_budget=-1.0"),
        ({"kv_scales": "off", "kv_error_budget": 0.1}, 'kv_scales="off"'),
        ({"kv_scales": "off", "kv_cache_dtype": "auto-quality"}, 'kv_scales="off"'),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model("llama"), num_blocks=8, **options)  # type: ignore[arg-type]  # mixed values


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_a_gpu_reads_the_distributions_that_a_cpu_reads(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Sums in another order turn a code now and then; an offset applied twice, or a rotation not undone, turns all."""
    model, file = key_bias(), tmp_path / "kv.safetensors"
    save_kv_scales(calibrate(packed(model), list(FORMATS), list(FORMATS)), file)
    cost = divergence(model, kv_cache_dtype=kv_cache_dtype, kv_scales=str(file))
    here = log_probs(model, kv_cache_dtype=kv_cache_dtype, kv_scales=str(file))
    view = packed(model.cuda())
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_scales=str(file), kv_error_budget="off")
    (prompt,) = prompts((90,), seed=3)
    with torch.no_grad():
        there = paged_log_probs(view, plan_storage(model, view, config).formats, prompt.cuda()).cpu()
    # two roundings that have nothing to do with each other lie twice as far apart as one lies from the truth
    assert float((here.exp() * (here - there)).sum(-1).mean()) < cost


def test_calibration_looks_all_over_the_context_and_no_further_than_rope_is_unscaled() -> None:
    """An offset of the first positions alone is the wrong one further on: RoPE has turned it."""
    for config, end in (({}, 256), ({"rope_parameters": SCALED}, 128)):
        model = packed(tiny_model("llama", **config))
        places = _places(model, 64)
        assert places[0] == 0 and end - 16 <= places[-1] < end
        assert places.diff().min() == 1 and (places.diff() > 1).sum() == 15
    assert torch.equal(_places(model, 500), torch.arange(500)), "a text longer than that stays as it is"


SCALED = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        (torch.ones(1, 30, dtype=torch.long), r"shape \[1, 30\]"),
        (torch.rand(20), "float32"),
        ([1, 2, 10**6], "1000000 is not one of"),
        ([1, -1, 2], "-1 is not one of"),
    ],
)
def test_what_is_not_one_list_of_the_models_ids_calibrates_nothing(token_ids: list[int], says: str) -> None:
    """A batch of one is what tokenizers give; floats were cut to zeros."""
    with pytest.raises(ValueError, match=says):
        calibrate_on(tiny_model("llama"), token_ids)
