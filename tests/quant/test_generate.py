"""Packed weights of several families: paged tokens are those of the dequantized model (all calls: `generate/`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import PAD, tiny_model
from quant_files import Cell, write_model
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged.eval.throughput import weight_sizes

PROMPTS = torch.arange(3, 30).reshape(3, 9)


@pytest.mark.parametrize(
    ("family", "cell"),
    [("llama", Cell(act_order=True)), ("qwen2", Cell(kind="awq_gemm")), ("mixtral", Cell(kind="awq_gemm"))],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_packed_weights_and_pages_give_the_tokens_of_the_dequantized_model(
    family: str, cell: Cell, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """fp32 on both sides: quantized weights and quantized pages meet in one model and change nothing of each other."""
    hf_paged.register()
    truth = write_model(tiny_model(family), tmp_path, cell)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    paged = {"cache_implementation": "paged", "cache_config": {"num_blocks": 64, "kv_cache_dtype": kv_cache_dtype}}
    expected = truth.generate(PROMPTS, **options, **(paged if kv_cache_dtype != "auto" else {}))
    assert torch.equal(loaded.generate(PROMPTS, **options, **paged), expected)


def test_packed_experts_count_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    """Their words were counted as parameters, an eighth of them, and the ceiling of prompts rose by as much."""
    hf_paged.register()
    truth = write_model(tiny_model("mixtral"), tmp_path, Cell(kind="awq_gemm"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert weight_sizes(loaded)["linear_parameters"] == weight_sizes(truth)["linear_parameters"]
