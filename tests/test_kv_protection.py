"""Layers that would err too much are stored finer, as cheaply as the budget allows, and the user has the last word."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from model_zoo import left_padded, prompts, tiny_model
from tiny_engine import engine_of
from transformers import PreTrainedModel

from hf_paged import LLM, PagedCache, SamplingParams
from hf_paged.config import EngineConfig
from hf_paged.kv_protection import ERROR_BUDGETS, KVPlan, plan_layers
from hf_paged.kv_scales import KVScales, LayerScales, SideScales
from hf_paged.layer_probe import LayerSpec

FINER = {"int4": ["int4", "int8", "auto"], "int8": ["int8", "auto"], "fp8": ["fp8", "int8", "auto"]}
ERRORS = {"int8": 0.006, "fp8": 0.02, "int4": 0.08}  # what ordinary layers have


def spec_of(layer_idx: int) -> LayerSpec:
    return LayerSpec(
        layer_idx=layer_idx,
        name=f"layer {layer_idx}",
        num_heads=4,
        kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        window=None,
        softcap=None,
        has_sinks=False,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )


def scales_with(bad: dict[int, dict[str, float]], num_layers: int = 8) -> KVScales:
    """Layers as they are, but for the key errors of some."""
    layers = {}
    for index in range(num_layers):
        keys = {**ERRORS, **bad.get(index, {})}
        layers[index] = LayerScales(
            keys={name: SideScales(offset=None, factor=None, error=error) for name, error in keys.items()},
            values={name: SideScales(offset=None, factor=None, error=error) for name, error in ERRORS.items()},
        )
    return KVScales(layers=layers, source="a test", probed=torch.zeros(1))


def plan(scales: KVScales | None, **options: object) -> KVPlan:
    num_layers = 8 if scales is None else len(scales.layers)
    return plan_layers([spec_of(i) for i in range(num_layers)], EngineConfig.parse(options), scales)


def formats(found: KVPlan) -> dict[int, tuple[str, str]]:
    return {choice.layer_idx: (choice.k_format, choice.v_format) for choice in found.choices}


@pytest.mark.parametrize("asked", ["int8", "fp8"])
def test_a_layer_that_eight_bits_break_keeps_its_keys_in_sixteen(asked: str) -> None:
    """Its values, and all other layers, stay as cheap as they were asked to be."""
    found = plan(scales_with({3: {"int8": 0.7, "fp8": 0.7, "int4": 1.0}}), kv_cache_dtype=asked)
    assert formats(found)[3] == ("auto", asked)
    assert all("auto" not in pair for i, pair in formats(found).items() if i != 3)
    assert "layers 3 in k=auto" in str(found)
    assert found.formats[3].k_codes is None and found.formats[3].v_codes is not None


def test_four_bits_give_way_to_eight_before_sixteen() -> None:
    found = formats(plan(scales_with({2: {"int4": 0.5}}), kv_cache_dtype="int4"))
    assert found[2][0] == "int8" and all("auto" not in pair for pair in found.values())


@pytest.mark.parametrize("asked", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("budget", [0.0, 0.01, 0.05, 0.1])
def test_the_budget_holds_and_no_side_is_refined_in_vain(asked: str, budget: float) -> None:
    """Taking any one refinement back would break the budget, or at least gain nothing."""
    scales = scales_with({1: {"int8": 0.05, "fp8": 0.2, "int4": 0.4}, 5: {"int4": 0.15}})
    chosen = formats(plan(scales, kv_cache_dtype=asked, kv_error_budget=budget))

    def error_of(pairs: dict[int, tuple[str, str]]) -> float:
        return math.sqrt(sum(scales.layers[i].error(*pair) ** 2 for i, pair in pairs.items()) / len(pairs))

    assert error_of(chosen) <= budget + 1e-12
    order = FINER[asked]
    refined = [(i, side) for i, pair in chosen.items() for side in (0, 1) if pair[side] != asked]
    assert not refined or error_of(dict.fromkeys(chosen, (asked, asked))) > budget
    if refined and budget:

        def coarser(i: int, side: int) -> dict[int, tuple[str, str]]:
            pair = list(chosen[i])
            pair[side] = order[order.index(pair[side]) - 1]
            return {**chosen, i: (pair[0], pair[1])}

        assert min(error_of(coarser(i, side)) for i, side in refined) > budget


def test_ordinary_layers_are_not_protected_from_eight_bits() -> None:
    """A default that stored ordinary layers in 16 bits would cost half the memory for nothing."""
    assert not plan(scales_with({}, num_layers=80), kv_cache_dtype="int8").protected
    assert ERRORS["int8"] < ERROR_BUDGETS["int8"]


def test_fp8_gives_way_to_int8_which_costs_nothing() -> None:
    """Keys in fp8 err four times as much as in int8: to store them in 16 bits instead would waste memory."""
    uneven = {index: {"fp8": 0.05} for index in range(0, 80, 4)}
    found = formats(plan(scales_with(uneven, num_layers=80), kv_cache_dtype="fp8"))
    assert set(found.values()) == {("fp8", "fp8"), ("int8", "fp8")}


def test_the_user_has_the_last_word() -> None:
    broken = scales_with({3: {"int8": 0.7}})
    off = plan(broken, kv_cache_dtype="int8", kv_error_budget="off")
    assert not off.protected
    skipped = formats(plan(broken, kv_cache_dtype="int8", skip_layers=(0, 3)))
    assert skipped == {i: ("auto", "auto") if i in (0, 3) else ("int8", "int8") for i in range(8)}
    assert formats(plan(None, kv_cache_dtype="int4")) == dict.fromkeys(range(8), ("int4", "int4"))


def test_an_engine_and_a_cache_of_one_model_store_it_alike() -> None:
    """Beam search after greedy decoding must read the same values."""
    model = tiny_model("qwen2")
    llm = LLM(model, kv_cache_dtype="int4", kv_error_budget=0.05, num_blocks=20)
    protected = {i: (f.k_codes, f.v_codes) for i, f in llm.engine.kv_plan.formats.items()}
    assert len(set(protected.values())) > 1, "a case without protection proves nothing"
    cache = PagedCache(model, kv_cache_dtype="int4", kv_error_budget=0.05)
    model.generate(**left_padded(prompts((5,))), max_new_tokens=2, past_key_values=cache)
    for index, pair in protected.items():
        layer = cache._pages.store.layer(index)
        assert [type(pages).__name__ for pages in (layer.k, layer.v)] == [
            type(pages).__name__ for pages in (llm.engine.kv_cache.layers[index].k, llm.engine.kv_cache.layers[index].v)
        ], pair
    assert llm.engine.kv_cache.bytes_per_token < 2 * 4 * 64 * 3, "protected bytes are counted, and below fp32"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "auto-quality"])
def test_chunks_batches_and_whole_prompts_give_the_same_tokens(kv_cache_dtype: str) -> None:
    """Smoothing is static: what is stored of a token depends on nothing but the token."""
    model = tiny_model("stablelm")
    batch = [p.tolist() for p in prompts((70, 33, 50))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    results = []
    for tokens in (16, 64, 256):
        llm = LLM(model, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=tokens, num_blocks=64)
        results.append([output.outputs[0].token_ids for output in llm.generate(batch, params, use_tqdm=False)])
    assert results[0] == results[1] == results[2]


def test_what_is_protected_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    inputs = left_padded(prompts((5, 9)))
    options = {"kv_cache_dtype": "int4", "kv_error_budget": 0.03}
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        for _ in range(2):
            model.generate(**inputs, max_new_tokens=3, cache_implementation="paged", cache_config=options)
    (record,) = [record for record in caplog.records if "protected" in record.getMessage()]
    message = record.getMessage()
    assert record.levelno == logging.INFO, "the default at work is no reason to worry anyone"
    assert "LlamaForCausalLM" in message and "layers" in message and "seed 0" in message


@pytest.mark.parametrize("driver", ["engine", "cache"])
def test_a_key_bias_that_nothing_smooths_is_warned_of_with_the_remedy(
    driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen2's answers turn to noise under naive 8-bit caches, and nothing else would say why."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[5] = 300.0
    make = LLM if driver == "engine" else PagedCache
    for options in ({"kv_scales": "off"}, {}, {"kv_scales": "off", "skip_layers": (1,)}):
        make(model, num_blocks=16, kv_cache_dtype="fp8", **options)
    warned = [r.getMessage() for r in caplog.records if "K channels" in r.getMessage()]
    assert len(warned) == 1, "smoothed or skipped layers need no warning"
    assert "layers 1 have K channels over 50 times the median" in warned[0] and 'kv_scales at "auto"' in warned[0]


def test_a_changed_model_is_measured_again() -> None:
    """An engine that is rebuilt for new weights must not smooth by what the old ones were."""
    model = tiny_model("qwen2")
    inputs = left_padded(prompts((9,)))
    options = {"kv_cache_dtype": "int8", "kv_error_budget": "off"}

    def offset() -> torch.Tensor:
        model.generate(**inputs, max_new_tokens=2, cache_implementation="paged", cache_config=options)
        engine = engine_of(model)
        assert engine is not None
        transform = engine.kv_cache.layers[0].transform
        assert transform is not None
        return transform.k_offset

    before = offset()
    projection = model.model.layers[0].self_attn.k_proj
    projection.bias = torch.nn.Parameter(projection.bias + 40.0)
    assert not torch.equal(offset(), before)


def test_the_mix_for_a_budget_keeps_it_and_is_found_once(caplog: pytest.LogCaptureFixture) -> None:
    model: PreTrainedModel = tiny_model("llama")
    options = {"kv_cache_dtype": "auto-quality", "num_blocks": 20}
    with caplog.at_level(logging.INFO, logger="hf_paged.kv_mix"):
        strict = LLM(model, **options, kv_perplexity_budget=0.0).engine  # type: ignore[arg-type]
        loose = LLM(model, **options, kv_perplexity_budget=1e9).engine  # type: ignore[arg-type]
        tried = len(caplog.records)
        LLM(model, **options, kv_perplexity_budget=1e9)  # type: ignore[arg-type]
    assert len(caplog.records) == tried + 1, "only the answer, no measurement"
    assert strict.config.kv_cache_dtype == "auto" and loose.config.kv_cache_dtype == "int4"
    assert replace(loose.config).kv_error_budget == "off"
    assert loose.kv_cache.bytes_per_token < strict.kv_cache.bytes_per_token
