"""What this package needs of Transformers' inside: a release that moves it fails here, and not in a user's call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import PAD, prompts, tiny_model
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_paged import private_transformers as private

IDS = torch.stack(prompts((6,)))


def test_a_prepared_call_says_how_it_pads() -> None:
    """Without a pad token the end token pads, as a tensor."""
    found: list[Tensor | None] = []

    def custom(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **prepared: Any) -> Tensor:
        found.append(private.pad_token(prepared["generation_config"]))
        return input_ids

    model: Any = tiny_model("llama")
    model.generate(IDS, custom_generate=custom, max_new_tokens=2, pad_token_id=PAD)
    model.generate(IDS, custom_generate=custom, max_new_tokens=2, pad_token_id=None, eos_token_id=7)
    assert [None if token is None else int(token) for token in found] == [PAD, 7]


def test_a_mode_refuses_what_it_cannot_stream() -> None:
    model, config = tiny_model("llama"), GenerationConfig(num_beams=2)
    private.check_mode(model, GenerationMode.BEAM_SEARCH, config, {})
    with pytest.raises(ValueError, match="streamer"):
        private.check_mode(model, GenerationMode.BEAM_SEARCH, config, {"streamer": object()})


def test_an_attention_that_was_registered_can_be_forgotten() -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register("for_a_moment", lambda *args, **kwargs: None)
        assert "for_a_moment" in interface()
    private.forget_attention("for_a_moment")
    assert all("for_a_moment" not in interface() for interface in (AttentionInterface, AttentionMaskInterface))


def test_models_with_attention_code_of_their_own_are_told_apart() -> None:
    own = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32))
    assert private.takes_attention(tiny_model("llama")) and not private.takes_attention(own)


def test_a_module_that_is_marked_keeps_its_weights_where_another_gets_new_ones() -> None:
    model: Any = tiny_model("llama")
    marked, other = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj
    for part in (*model.modules(), *model.parameters()):  # made with weights, all are marked
        part.__dict__.pop("_is_hf_initialized", None)
    private.skip_initialization(marked)
    for linear in (marked, other):
        linear.weight.data.fill_(0.5)
    model.init_weights()
    assert (marked.weight == 0.5).all() and not (other.weight == 0.5).all()


def test_a_module_gets_the_random_weights_of_its_family() -> None:
    model: Any = tiny_model("llama")
    linear, norm = model.lm_head, model.model.norm
    for module in (linear, norm):
        module.weight.data.zero_()
        private.initialize(model, module)
    assert linear.weight.std() > 0 and (norm.weight == 1).all()


def test_a_file_that_a_folder_lacks_is_none_and_no_error(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert private.find_file(str(tmp_path), "config.json") == str(tmp_path / "config.json")
    assert private.find_file(str(tmp_path), "model.safetensors.index.json") is None
