"""bf16 engines on a CPU, with Numba's kernels where they are there and without."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from tiny_engine import GREEDY, llm, prompts, run, tiny_llama, tiny_mistral, tokens
from transformers import PreTrainedModel

from hf_paged.cuda_graph import StepBucket
from hf_paged.kernels import cpu_launch
from hf_paged.model_inputs import StepSizes
from hf_paged.request import Request, ScheduledRequest

needs_numba = pytest.mark.skipif(not cpu_launch.has_kernels(torch.bfloat16), reason="needs Numba and libgomp")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_without_numba_runs_and_meets_none_of_its_kernels(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba is an extra, which CI has. (In fp32, where tokens are compared, there are no kernels of it anyway.)"""
    torch.manual_seed(0)
    model = tiny_llama().bfloat16()
    monkeypatch.setattr(cpu_launch, "_available", lambda: False)
    monkeypatch.setattr(cpu_launch, "launch", lambda *args: pytest.fail("a kernel of an extra that is not there"))
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_scales": "off"}
    assert [len(row) for row in run(model, **options)] == [24] * 6


def test_a_numba_that_does_not_work_here_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numba refuses a NumPy that is too new when it is imported: not in the middle of a forward of somebody's."""
    monkeypatch.setitem(sys.modules, "hf_paged.kernels.cpu_kernels", None)
    monkeypatch.delattr("hf_paged.kernels.cpu_kernels", raising=False)
    monkeypatch.setattr(cpu_launch.importlib.util, "find_spec", lambda name: object())
    cpu_launch._available.cache_clear()
    try:
        assert not cpu_launch.has_kernels(torch.bfloat16)
    finally:
        cpu_launch._available.cache_clear()
    if sys.platform == "linux":
        assert "Numba does not work here" in caplog.text


@needs_numba
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "k=int8,v=auto"])
def test_recorded_steps_give_the_logits_of_others_to_the_bit(
    make: type[PreTrainedModel], kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in while others decode, rows end one by one, sequences outgrow the bound of a recorded step."""
    torch.manual_seed(0)
    model = make().bfloat16()
    monkeypatch.setattr("hf_paged.cuda_graph._SMALLEST_LENGTH", 64)
    params = [replace(GREEDY, max_tokens=20 - 3 * i, logprobs=2) for i in range(6)]

    def outputs(**options: object) -> tuple[list[object], int]:
        engine = llm(model, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=48, **options)
        found = engine.generate(prompts(), params, use_tqdm=False)
        graphs = engine.engine.runner.graphs
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found], graphs.num_captured if graphs else 0

    recorded, captured = outputs()
    expected, none = outputs(cuda_graphs=False)
    assert recorded == expected
    assert captured > 3 and none == 0


@needs_numba
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int4"])
def test_what_cannot_be_recorded_runs_as_it_did(kv_cache_dtype: str) -> None:
    torch.manual_seed(0)
    model = tiny_llama().bfloat16()
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_scales": "off"}
    assert run(model, **options) == run(model, **options, cuda_graphs=False)


@needs_numba
@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "input_layernorm.weight"])
def test_recorded_steps_follow_weights_that_are_written(name: str) -> None:
    """The one is copied into the order in which a step reads it, the other is read where it lies."""
    torch.manual_seed(0)
    model = tiny_llama().bfloat16()
    engine = llm(model)
    before = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    with torch.no_grad():
        model.model.layers[1].get_parameter(name).mul_(-1)
    after = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    assert after == run(model, cuda_graphs=False) != before


@needs_numba
def test_hooks_are_called_in_every_step() -> None:
    model = tiny_llama().bfloat16()
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    engine = llm(model)
    calls.clear()
    engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(calls) == GREEDY.max_tokens


def test_kernels_are_there_before_a_request_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile them takes ten seconds once, several times that on a busy machine."""
    asked: list[torch.dtype] = []
    monkeypatch.setattr("hf_paged.model_runner.has_kernels", lambda dtype: asked.append(dtype) or False)
    llm(tiny_llama().bfloat16(), fuse=False, cuda_graphs=False)
    assert asked == [torch.bfloat16]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 4), (9, 16), (16, 16), (17, 32), (80, 80), (81, None)])
def test_rows_are_padded_on_a_cpu_where_that_is_free(rows: int, padded: int | None) -> None:
    requests = [Request(f"{i}", [1, 2, 3], GREEDY) for i in range(rows)]
    scheduled = [ScheduledRequest(request, 1, 2, True) for request in requests]
    bucket = StepBucket.on_cpu(StepSizes.of(scheduled), max_num_seqs=256, max_model_len=512)
    assert (bucket and bucket.num_decodes) == padded
    prompt = StepSizes.of([ScheduledRequest(requests[0], 2, 0, True)])
    assert StepBucket.on_cpu(prompt, max_num_seqs=256, max_model_len=512) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_does_not_follow_torchs_default_dtype(dtype: torch.dtype) -> None:
    """A caller may have set it for models that it builds; settings of rows are fp32, and pages what they are."""
    torch.manual_seed(0)
    model = tiny_llama()
    expected = run(model, kv_cache_dtype="int8")
    torch.set_default_dtype(dtype)
    try:
        assert run(model, kv_cache_dtype="int8") == expected
    finally:
        torch.set_default_dtype(torch.float32)
