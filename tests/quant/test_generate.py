"""Generation from packed weights: the paged calls give the tokens of the dequantized model, int8 pages included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import PAD, tiny_model
from quant_files import Cell, write_model
from transformers import AutoModelForCausalLM

import hf_paged

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


CALLS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sequences": {"do_sample": True, "num_return_sequences": 2, "top_k": 5},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 4},
}


@pytest.mark.gpu
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("cell", [Cell(kind="awq_gemm"), Cell(act_order=True)], ids=lambda value: str(value))
def test_packed_weights_on_a_gpu_give_the_tokens_of_the_dequantized_model(
    cell: Cell, call: str, tmp_path: Path
) -> None:
    """fp32 activations, int8 pages, left padding; replayed graphs, then kernel by kernel."""
    hf_paged.register()
    truth = write_model(tiny_model("llama"), tmp_path, cell).to("cuda")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="cuda")
    rows = 1 if call == "prompt lookup" else 3
    ids, mask = PROMPTS[:rows].to("cuda"), torch.ones_like(PROMPTS[:rows], device="cuda")
    if rows == 3:
        ids[1, :4], mask[1, :4] = PAD, 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "pad_token_id": PAD, **CALLS[call]}
    for cuda_graphs in ("auto", False):
        config = {"num_blocks": 64, "kv_cache_dtype": "int8", "cuda_graphs": cuda_graphs}
        if call in ("beams", "prompt lookup"):
            del config["cuda_graphs"]
        paged = {"cache_implementation": "paged", "cache_config": config}
        torch.manual_seed(3)
        expected = truth.generate(ids, **options, **paged)
        torch.manual_seed(3)
        assert torch.equal(loaded.generate(ids, **options, **paged), expected)
