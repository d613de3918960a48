"""Errors by layer and head must be the layer's own, and be found where they were put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import prompts, tiny_model

from hf_paged import model_runner
from hf_paged.eval.kv_error import LayerError, measure_kv_error
from hf_paged.kernels.layout import LayerKV

TEXT = prompts((100,), seed=3)[0].tolist()


def figures(error: LayerError) -> list[float]:
    return [*error.key, *error.value, *error.score, *error.output]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt_neox", "gpt2"])
def test_pages_of_the_models_own_dtype_have_no_error_and_fewer_bits_have_more(family: str) -> None:
    model = tiny_model(family)
    auto, int8, fp8 = (
        measure_kv_error(model, TEXT, kv_cache_dtype=name, kv_error_budget="off") for name in ("auto", "int8", "fp8")
    )
    layers = model.config.num_hidden_layers
    assert [error.layer_idx for error in int8] == list(range(layers))
    assert all(max(figures(error)) == 0 for error in auto)
    for exact, fine, coarse in zip(auto, int8, fp8, strict=True):
        assert len(fine.key) == len(fine.value) <= len(fine.score) == len(fine.output)
        assert fine.bytes_per_token == coarse.bytes_per_token < exact.bytes_per_token
        # int8: at most half a step of 1/127 of the row's largest; fp8: half of 1/8 of the value itself
        assert all(0 < x < 0.02 for x in fine.value)
        assert all(x < y < 0.0625 for x, y in zip(fine.value, coarse.value, strict=True))
        assert all(0 < x < y for x, y in zip(fine.output, coarse.output, strict=True))
        assert all(0 < x < y for x, y in zip(fine.score, coarse.score, strict=True))


def test_a_pair_of_formats_errs_on_its_quantized_side_only() -> None:
    model = tiny_model("llama")
    for error in measure_kv_error(model, TEXT, kv_cache_dtype="k=int8,v=auto"):
        assert min(error.key) > 0 == max(error.value)
        assert min(error.score) > 0
        assert min(error.output) > 0
    for error in measure_kv_error(model, TEXT, kv_cache_dtype="k=auto,v=int8"):
        assert max(error.key) == 0 == max(error.score)
        assert min(error.value) > 0
        assert min(error.output) > 0


def test_a_skipped_layer_has_no_error_and_costs_its_bytes() -> None:
    first, second, third = measure_kv_error(tiny_model("llama"), TEXT, kv_cache_dtype="int8", skip_layers=(1,))
    assert max(figures(second)) == 0
    assert min(figures(first)) > 0 < min(figures(third))
    assert second.bytes_per_token > 2 * first.bytes_per_token == 2 * third.bytes_per_token


def test_the_error_of_one_head_is_found_in_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift of a key head moves its keys and its group's scores and outputs, and nothing else's."""
    write = model_runner.write_kv

    def write_off(layer: LayerKV, key: torch.Tensor, *others: Any) -> None:
        if layer.k.tensor.dtype == torch.int8:
            key = key.clone()
            key[::2, 1] *= 1.5
        write(layer, key, *others)

    model = tiny_model("llama")
    honest = measure_kv_error(model, TEXT, kv_cache_dtype="int8")[1]
    monkeypatch.setattr(model_runner, "write_kv", write_off)
    off = measure_kv_error(model, TEXT, kv_cache_dtype="int8")[1]
    assert off.key[0] == honest.key[0]
    assert off.key[1] > 10 * honest.key[1]
    assert off.value == honest.value
    for before, after in ((honest.score, off.score), (honest.output, off.output)):
        assert after[:2] == before[:2]
        assert after[2] > 10 * before[2]
        assert after[3] > 10 * before[3]


def test_what_all_keys_share_is_no_error_of_scores() -> None:
    """q . z is the same for every key of a row: the softmax cancels it."""
    from hf_paged.attention import AttentionCall
    from hf_paged.eval.kv_error import _score_errors

    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 30, 16, generator=generator), torch.zeros(1, 2, 30, 16)
    call = AttentionCall(
        layer_idx=0, layer_name="", query=query, key=key, value=key, scale=0.25, window=9, softcap=None, sinks=None
    )
    shared = torch.randn(2, 1, 16, generator=generator).expand(2, 30, 16)
    assert max(_score_errors(call, shared)) < 1e-3  # cancellation in fp32
    own = torch.randn(2, 30, 16, generator=generator)
    # 0.25 x the sum of 16 products of unit normals has RMS 1
    assert _score_errors(call, own) == pytest.approx([1.0] * 4, rel=0.2)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"window=300 .*2\.\.256"):
        measure_kv_error(tiny_model("llama"), prompts((300,))[0].tolist(), kv_cache_dtype="int8")
