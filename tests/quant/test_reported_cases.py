"""What users of other loaders reported about AWQ and GPTQ files, where no other test here says it."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import tiny_model
from quant_files import (
    EXACT,
    Cell,
    config_of,
    load,
    logit_error,
    pack_linear,
    quantize,
    random_integers,
    write_model,
)
from transformers import AutoModelForCausalLM

import hf_paged.quant.config
from hf_paged.quant.formats import read, write
from hf_paged.quant.layout import Label, TensorSpec, identify
from hf_paged.quant.linear import PackedLinear

INPUT = torch.arange(3, 25).reshape(2, 11)
NAMES = {torch.int32: "I32", torch.float16: "F16"}


def linear(cell: Cell, weight: torch.Tensor, dtype: torch.dtype) -> tuple[PackedLinear, torch.Tensor]:
    """A packed `weight` `[N, K]` as read from a file, and its dequantized values."""
    integers = quantize(weight, cell)
    tensors = pack_linear(cell, integers)
    specs = {name: TensorSpec(dtype=NAMES[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}
    n, k = weight.shape
    method = "gptq" if cell.kind == "gptq" else "awq"
    layout = identify("m", specs, k, n, Label(bits=cell.bits, group_size=cell.group_size, method=method))
    module = PackedLinear(layout, bias=False, dtype=dtype, scales_dtype=torch.float16)
    module.load(read("m", layout, tensors))
    return module, integers.dequantize()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    version=st.sampled_from((1, 2)),
    groups=st.integers(2, 3),  # zeros that are all the same, and no midpoint, are no tool's
    rows=st.integers(1, 3),
    data=st.data(),
)
def test_either_convention_of_zero_points_comes_back_bit_for_bit(
    bits: int, version: int, groups: int, rows: int, data: st.DataObject
) -> None:
    """AutoGPTQ 325 and 640: the zero 0, stored as 0 - 1, and the largest zero are where conventions break.

    Few zeros are drawn: where codes are far from most zeros, as no tool writes them, the data would speak against the
    label.
    """
    n, k = 32 * rows, 32 * groups
    cell = Cell(bits=bits, version=version)
    integers = random_integers(cell, n, k, seed=data.draw(st.integers(0, 99)))
    zeros = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=8))
    integers.zeros[0, : len(zeros)] = torch.tensor(zeros, dtype=torch.uint8)
    tensors = pack_linear(cell, integers)
    specs = {name: TensorSpec(dtype=NAMES[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}
    layout = identify("m", specs, k, n, Label(bits=bits, group_size=32, zero_offset=2 - version))
    weight = read("m", layout, tensors)
    found = torch.full_like(integers.zeros, 2 ** (bits - 1)) if weight.zeros is None else weight.zeros
    assert torch.equal(found, integers.zeros)
    again = write(layout, weight)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_the_loaders_need_no_private_name_of_transformers() -> None:
    """Qwen3-VL 875, lmdeploy 2877: `shard_checkpoint` was removed, and nothing loaded any more."""
    for file in Path(hf_paged.quant.config.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{file.name} imports {private}"


@pytest.mark.parametrize("cell", [Cell(kind="awq_gemm", group_size=64), Cell(group_size=64, act_order=True)], ids=str)
def test_activations_beyond_fp16_stay_finite_in_bf16(cell: Cell) -> None:
    """vllm 1114 and 1941, CTranslate2 1956: bf16 models run in fp16 overflow at 65,504, and only pads come out."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) / 11
    module, dense = linear(cell, weight, torch.bfloat16)
    x = (1e6 * torch.randn(5, 128, generator=torch.Generator().manual_seed(1))).bfloat16()
    truth = x.float() @ dense.t()
    out = module(x).float()
    assert float(truth.abs().max()) > 65504 and bool(torch.isfinite(out).all())
    assert float((out - truth).abs().max() / truth.abs().max()) < 2**-7  # scales and outputs are rounded to bf16


@pytest.mark.parametrize(
    ("k", "cell"),
    [
        (10944, Cell(kind="awq_gemm", group_size=64)),  # DeepSeek-V2-Lite: 85.5 groups of 128
        (10944, Cell(group_size=128, act_order=True)),  # GPTQ's last group is short
        (7392, Cell(kind="awq_gemm", group_size=32)),  # Qwen2-72B, a quarter: 57.75 groups of 128
        (7392, Cell(group_size=128)),
        (2752, Cell(kind="awq_gemm", group_size=64)),  # WizardCoder-7B, a quarter of 11008
    ],
    ids=str,
)
def test_sizes_that_other_kernels_cannot_divide(k: int, cell: Cell) -> None:
    """vllm 9913, 7075 and 1258, llm-compressor 57: K is a multiple of the group and of nothing larger, or not even."""
    weight = torch.randn(24, k, generator=torch.Generator().manual_seed(0)) / k**0.5
    module, dense = linear(cell, weight, torch.float32)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(module(x), x @ dense.t(), atol=1e-5)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gemma_with_a_head_of_its_own_or_none(tied: bool, head: bool, tmp_path: Path) -> None:
    """vllm 53170 and 45543: GPTQ Gemma files hold a head that the config calls tied, plain or quantized."""
    model = tiny_model("gemma2", tie_word_embeddings=tied and not head)
    attention = {"attn_implementation": "eager", "dtype": torch.float32}
    truth = write_model(model, tmp_path, Cell(symmetric=True, group_size=-1), head=head)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **attention)
    assert isinstance(loaded.lm_head, PackedLinear) == head
    with torch.no_grad():
        expected = truth(INPUT).logits
        assert float((loaded(INPUT).logits - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_a_label_that_lies_about_asymmetric_zeros_is_overruled_by_all_layers_together(
    bits: int, version: int, tmp_path: Path
) -> None:
    """vllm PR 38966 without symmetry: one small layer has too few groups to tell, the layers of a file have enough."""
    cell = Cell(bits=bits, version=version, group_size=-1, act_order=True)
    lie = {**config_of(cell), "checkpoint_format": "gptq_v2" if version == 1 else "gptq"}
    truth = write_model(tiny_model("llama"), tmp_path, cell, config=lie)
    loaded = load(tmp_path)
    assert logit_error(loaded, truth) < EXACT
    assert load(tmp_path, dtype=torch.float16).model.layers[0].mlp.up_proj.layout.stored_offset == 2 - version
    loaded.save_pretrained(tmp_path / "again")
    assert logit_error(load(tmp_path / "again"), truth) < EXACT  # its words now follow its label


def test_a_label_that_only_seems_to_lie_is_followed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With 8 bits a step is small: 2,700 groups hint at it, and settle it no more than the label does."""
    cell = Cell(bits=8, version=1)
    write_model(tiny_model("llama"), tmp_path, cell, config={**config_of(cell), "checkpoint_format": "gptq_v2"})
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert (
        "the label says GPTQ v2 (zero) zero points, which is followed, but the data looks more like v1" in caplog.text
    )
    caplog.clear()
    write_model(tiny_model("llama"), tmp_path, cell)
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert "zero points" not in caplog.text


def test_a_second_file_with_a_lying_label_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning came once per process: who loads two models to compare them heard of the first one only."""
    for symmetric, folder in ((False, "one"), (True, "two"), (True, "three")):
        cell = Cell(version=1, group_size=32, symmetric=symmetric)
        lie = {**config_of(cell), "checkpoint_format": "gptq_v2"}
        write_model(tiny_model("llama"), tmp_path / folder, cell, config=lie)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(tmp_path / folder)
        assert caplog.text.count("the label says GPTQ v2 (zero) zero points, the data holds v1") == 1, folder
