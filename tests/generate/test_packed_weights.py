"""Every way to generate from packed weights: the tokens of the dequantized model, by pages of its dtype and of int8."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from generate.test_families import ENGINE_CASES, LENGTHS, LOOP_CASES, run
from model_zoo import left_padded, prompts, tiny_model
from quant_files import Cell, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_paged

CELLS = {"awq": Cell(kind="awq_gemm"), "gptq act-order": Cell(act_order=True)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@functools.lru_cache(maxsize=4)
def models(cell: str, device: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with dequantized weights, and its packed twin."""
    hf_paged.register()
    with tempfile.TemporaryDirectory() as folder:
        truth = write_model(tiny_model("llama"), Path(folder), CELLS[cell]).to(device)
        packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device)
    return truth, packed


def tokens(model: PreTrainedModel, case: str, **paged: Any) -> list[Tensor]:
    def on_device(model: PreTrainedModel) -> dict[str, Any]:
        call = {**ENGINE_CASES, **LOOP_CASES}[case](model)
        return {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in call.items()}

    return run(model, on_device, **paged)


def pages(kv_cache_dtype: str, **options: Any) -> dict[str, Any]:
    config = {"block_size": 16, "kv_cache_dtype": kv_cache_dtype, **options}
    return {"cache_implementation": "paged", "cache_config": config}


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", ENGINE_CASES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("device", DEVICES)
def test_paged_tokens_of_packed_weights_are_dense_tokens(device: str, cell: str, case: str, driver: str) -> None:
    truth, packed = models(cell, device)
    assert_same(tokens(packed, case, **pages("auto")), tokens(truth, case))


@pytest.mark.parametrize("case", LOOP_CASES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("device", DEVICES)
def test_paged_beams_and_lookup_of_packed_weights_are_dense(device: str, cell: str, case: str) -> None:
    truth, packed = models(cell, device)
    assert_same(tokens(packed, case, **pages("auto")), tokens(truth, case))


@pytest.mark.parametrize("case", [*ENGINE_CASES, *LOOP_CASES])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("device", DEVICES)
def test_int8_pages_hold_the_same_beside_packed_weights(device: str, cell: str, case: str) -> None:
    """Quantized weights and quantized pages change nothing of each other; replayed graphs and single kernels agree."""
    truth, packed = models(cell, device)
    expected = tokens(truth, case, **pages("int8"))
    assert_same(tokens(packed, case, **pages("int8")), expected)
    if device == "cuda" and case in ENGINE_CASES:
        assert_same(tokens(packed, case, **pages("int8", cuda_graphs=False)), expected)


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_gives_the_tokens_of_its_rows(cell: str) -> None:
    _, packed = models(cell, "cpu")
    options = {"max_new_tokens": 10, "do_sample": False, **pages("int8")}
    batch = packed.generate(**left_padded(prompts(LENGTHS)), **options)[:, max(LENGTHS) :]
    for row, prompt in zip(batch, prompts(LENGTHS), strict=True):
        assert torch.equal(packed.generate(input_ids=prompt[None], **options)[0, len(prompt) :], row)
