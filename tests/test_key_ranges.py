"""Models whose keys an 8-bit cache would crush are named, with the remedy, when the engine is made."""

import logging

import pytest
import torch
from model_zoo import tiny_model

from hf_paged import LLM


def with_key_bias(size: float) -> torch.nn.Module:
    """A Qwen2 whose last layer has a few huge key biases, as Qwen2.5-7B has."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        bias = model.model.layers[-1].self_attn.k_proj.bias
        bias.zero_()
        bias[::8] = size
    return model


def warnings_of(model: torch.nn.Module, caplog: pytest.LogCaptureFixture, **options: object) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        LLM(model, num_blocks=8, **options)  # type: ignore[arg-type]  # mixed values
    return [record.getMessage() for record in caplog.records if "skip_layers" in record.getMessage()]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_huge_key_bias_is_named_with_its_layer_and_remedy(
    caplog: pytest.LogCaptureFixture, kv_cache_dtype: str
) -> None:
    (message,) = warnings_of(with_key_bias(300.0), caplog, kv_cache_dtype=kv_cache_dtype)
    assert "Qwen2ForCausalLM" in message and "layers [2]" in message and "skip_layers=(2,)" in message


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "k=auto,v=int8"}, {"kv_cache_dtype": "int8", "skip_layers": (2,)}],
    ids=["16-bit", "16-bit keys", "remedy taken"],
)
def test_nothing_is_said_where_keys_are_not_quantized(
    caplog: pytest.LogCaptureFixture, options: dict[str, object]
) -> None:
    assert warnings_of(with_key_bias(300.0), caplog, **options) == []


def test_an_even_model_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for family in ("llama", "gemma2"):
        assert warnings_of(tiny_model(family), caplog, kv_cache_dtype="int8") == []
