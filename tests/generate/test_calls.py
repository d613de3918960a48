"""Which driver a call takes, what is said about it, and which models are refused before any work."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from model_zoo import PAD, VOCAB, left_padded, prompts, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CLIPVisionConfig,
    EosTokenCriteria,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer

from hf_paged import PagedCache
from hf_paged.loop_generation import ModeArguments
from hf_paged.paged_call import driver_for

BATCH = left_padded(prompts((5, 9)))
PAGED = {"cache_implementation": "paged"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def call(model: Any, **options: Any) -> Any:
    return model.generate(**{**BATCH, "do_sample": False, "max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "engine (greedy_search)"),
        ({"do_sample": True, "num_return_sequences": 2}, "engine (sample)"),
        ({"num_beams": 2}, "loop (beam_search)"),
        ({"return_dict_in_generate": True}, "loop (return_dict_in_generate returns the cache)"),
        ({"use_cache": False}, "dense (use_cache=False)"),
    ],
)
def test_the_choice_of_driver_is_said_once(
    model: PreTrainedModel, options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_paged.paged_call"):
        call(model, **PAGED, **options)
    assert [r.message for r in caplog.records if r.levelno == logging.INFO] == [f"paged generate: {said}"]


def test_options_that_a_loop_cannot_use_are_named_aloud(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Accepted and ignored at a level that nobody reads would be ignored in silence."""
    call(model, **PAGED, num_beams=2, cache_config={"swap_space": 1.0, "num_blocks": 64})
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING and r.name == "hf_paged.paged_call"]
    assert warned == ["swap_space only steers the engine, and this call runs in a loop (beam_search)"]


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["free", "lockstep"])
@pytest.mark.parametrize("columns", [12, 30])
def test_a_length_of_the_users_own_takes_the_place_of_max_new_tokens(
    model: PreTrainedModel, columns: int, options: dict[str, Any]
) -> None:
    """The engine stops by itself at the length and at eos: not at those that dense generate would have put aside."""
    options = {**options, "max_new_tokens": 8, "stopping_criteria": [MaxLengthCriteria(max_length=columns)]}
    dense = call(model, **options)
    assert dense.shape[1] == columns
    assert torch.equal(call(model, **options, **PAGED), dense)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["free", "lockstep"])
def test_an_eos_of_the_users_own_ends_and_pads_rows(model: PreTrainedModel, options: dict[str, Any]) -> None:
    options = {**options, "max_new_tokens": 12, "pad_token_id": PAD}
    eos = int(call(model, **options)[0, -9])
    options["stopping_criteria"] = [EosTokenCriteria(eos_token_id=eos)]
    dense = call(model, **options)
    assert (dense[0, -1] == PAD) or dense.shape[1] < 9 + 12
    assert torch.equal(call(model, **options, **PAGED), dense)


def test_a_model_on_several_gpus_takes_the_loop() -> None:
    """The engine's steps lie on one device; `device_map="auto"` may have spread the layers."""

    def driver(*devices: str) -> str:
        view = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device(name)) for name in devices])
        config = GenerationConfig(use_cache=True)
        return driver_for(cast(PreTrainedModel, view), config, ModeArguments(), {})[0]

    assert [driver("cuda:0", "cuda:0"), driver("cuda:0", "cuda:1"), driver("cpu")] == ["engine", "loop", "engine"]


def test_a_model_that_drops_keywords_is_reached_through_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """StableLM's layers hand no keyword on; an engine step must reach their attention all the same."""
    with caplog.at_level(logging.INFO, logger="hf_paged.paged_call"):
        call(tiny_model("stablelm"), **PAGED)
    assert "paged generate: engine" in caplog.text


def test_a_cache_that_was_given_brings_its_own_options(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="has its options already"):
        call(model, past_key_values=PagedCache(model), cache_config={"block_size": 16})


def test_attentions_come_from_the_models_own_eager_attention() -> None:
    """Paged attention has no weights to give; asked for them, the call runs under the model's attention over pages."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    options = {"return_dict_in_generate": True, "output_attentions": True}
    dense, paged = call(model, **options), call(model, **options, **PAGED)
    assert torch.equal(paged.sequences, dense.sequences)
    for ours, theirs in zip(paged.attentions, dense.attentions, strict=True):
        torch.testing.assert_close(ours[0], theirs[0])


def test_self_speculation_runs_over_pages(model: PreTrainedModel) -> None:
    ids = BATCH["input_ids"][1:]
    options = {"do_sample": False, "max_new_tokens": 10}
    dense = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, assistant_early_exit=1, **PAGED), dense)
    model.generation_config.cache_implementation = "paged"
    try:
        assert torch.equal(model.generate(ids, **options, assistant_early_exit=1), dense)
        assert torch.equal(model.generate(ids, **options, assistant_model=model), dense)
    finally:
        model.generation_config.cache_implementation = None
    assert model.config.num_hidden_layers == 3


class Interrupting(BaseStreamer):
    def __init__(self) -> None:
        self.seen = 0

    def put(self, value: Any) -> None:
        self.seen += 1
        if self.seen == 3:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_an_interrupted_call_leaves_nothing_behind(model: PreTrainedModel, driver: str) -> None:
    ids = BATCH["input_ids"][1:]
    expected = model.generate(ids, do_sample=False, max_new_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, do_sample=False, max_new_tokens=8, streamer=Interrupting(), **PAGED)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=8, **PAGED), expected)


_SMALL = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": (
        {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        "encoder-decoder",
    ),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 1}, "linear_attention|attention interface"),
    "bloom": ({"hidden_size": 32, "n_layer": 1, "n_head": 2}, "attention interface"),
    "lfm2": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "full_attention"],
        },
        "conv",
    ),
    "diffllama": (_DECODER, "layer 0 .* attends more than once"),
    "doge": (_DECODER, "layer 0 .* brings a mask of its own"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_pages_cannot_serve_are_refused_by_name(family: str) -> None:
    options, reason = REFUSED[family]
    config = AutoConfig.for_model(family, **_SMALL, **options)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=reason) as error:
        call(model, **PAGED)
    assert type(model).__name__.partition("For")[0] in str(error.value)
    assert model.config.to_dict() == before
    call(model)  # and dense generation still works


def test_a_call_from_inside_a_call_on_the_same_model_is_refused_and_does_not_hang(model: PreTrainedModel) -> None:
    """A processor that generates with the same model would wait for its own call to end."""

    def nested(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        call(model, **PAGED)
        return scores

    with pytest.raises(RuntimeError, match="inside its own paged generate"):
        call(model, logits_processor=LogitsProcessorList([nested]), **PAGED)
    call(model, **PAGED)


_IMAGE = VOCAB - 1  # the token that stands for a piece of the image
_TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": PAD}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": None}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXELS = {"image_size": 16, "patch_size": 8}


def seeing(model: Any) -> tuple[Any, dict[str, Any]]:
    """A model and a call with an image of four pieces and some text."""
    model.eval().generation_config.pad_token_id = PAD
    ids = torch.cat([torch.full((1, 4), _IMAGE), BATCH["input_ids"][-1:]], dim=1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return model, {**inputs, "do_sample": False, "max_new_tokens": 6}


def test_an_image_is_seen_through_pages() -> None:
    torch.manual_seed(0)
    text, vision = LlamaConfig(**_TEXT, **_HEADS), CLIPVisionConfig(**_VISION, **_PIXELS)
    llava = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=_IMAGE))
    model, options = seeing(llava)
    dense = model.generate(**options)
    assert torch.equal(model.generate(**options, **PAGED), dense)
    blank = {**options, "pixel_values": torch.zeros(1, 3, 16, 16)}
    assert not torch.equal(model.generate(**blank), dense), "the image was meant to matter"


def test_an_image_whose_pieces_see_each_other_both_ways_is_refused() -> None:
    text, vision = {**_TEXT, **_HEADS, "sliding_window": 6}, {**_VISION, **_PIXELS}
    tokens = {"image_token_index": _IMAGE, "boi_token_index": 94, "eoi_token_index": 93, "mm_tokens_per_image": 4}
    gemma = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))
    model, options = seeing(gemma)
    options["token_type_ids"] = (options["input_ids"] == _IMAGE).long()
    with pytest.raises(ValueError, match="masks more than causality"):
        model.generate(**options, **PAGED)
