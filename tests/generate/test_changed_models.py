"""A model that changed since the last paged call: the next one gives what dense `generate` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import prompts, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_tokenizer import tiny_tokenizer
from torch import nn
from transformers import PreTrainedModel, pipeline

BATCH = torch.stack(prompts((9, 9)))
PAGED = {"cache_implementation": "paged"}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def check(model: Any, driver: str) -> torch.Tensor:
    """The paged tokens, which must be the dense ones."""
    dense, paged = (
        model.generate(input_ids=BATCH, do_sample=False, max_new_tokens=10, **options) for options in ({}, PAGED)
    )
    assert torch.equal(paged, dense), driver
    return paged


def adapted(model: PreTrainedModel) -> PeftModel:
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return peft_model.eval()


def test_lora_loaded_switched_merged_and_unloaded(model: PreTrainedModel, driver: str) -> None:
    before = check(model, driver)
    peft_model = adapted(model)
    with_adapter = check(peft_model, driver)
    assert not torch.equal(with_adapter, before)
    with peft_model.disable_adapter():
        assert torch.equal(check(peft_model, driver), before)
    assert torch.equal(check(peft_model, driver), with_adapter)
    peft_model.merge_adapter()
    check(peft_model, driver)
    peft_model.unmerge_adapter()
    check(peft_model, driver)
    merged = peft_model.merge_and_unload()
    check(merged, driver)


def test_an_optimizer_step_is_seen(model: PreTrainedModel, driver: str) -> None:
    before = check(model, driver)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        model(BATCH, labels=BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(check(model, driver), before)


def test_moved_and_replaced_weights_are_seen(model: PreTrainedModel, driver: str) -> None:
    check(model, driver)
    model.to(torch.float64)
    check(model, driver)
    model.to(torch.float32)
    check(model, driver)
    layer = model.model.layers[1].mlp
    layer.down_proj = nn.Linear(layer.down_proj.in_features, layer.down_proj.out_features, bias=False)
    check(model, driver)
    model.load_state_dict(tiny_model("llama", seed=5).state_dict())
    check(model, driver)


def test_a_resized_vocabulary_is_seen(model: PreTrainedModel, driver: str) -> None:
    check(model, driver)
    model.resize_token_embeddings(128)
    with torch.no_grad():
        model.get_output_embeddings().weight[96:] += 0.4
    check(model, driver)


def test_a_hook_added_later_runs(model: PreTrainedModel, driver: str) -> None:
    """Steering and logging hooks belong to the model: a view built before must not hide them."""
    before = check(model, driver)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    steered = check(model, driver)
    assert not torch.equal(steered, before)
    handle.remove()
    assert torch.equal(check(model, driver), before)


def test_pipelines_pass_the_options_through(model: PreTrainedModel, driver: str) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer(96), device="cpu")
    options = {"do_sample": False, "max_new_tokens": 6, "return_full_text": False}
    texts = ["abc", "hello", "x"]
    dense = generator(texts, batch_size=3, **options)
    assert generator(texts, batch_size=3, **options, **PAGED, cache_config={"block_size": 16}) == dense
