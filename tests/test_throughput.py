"""The systems that `hf-paged bench throughput` compares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from model_zoo import tiny_model

from hf_paged.eval.machine import Machine, timed
from hf_paged.eval.steps import measure_steps, steps_workload
from hf_paged.eval.throughput import make_llm, measure_throughput
from hf_paged.eval.workload import make_workload


def test_a_row_of_the_native_path_has_set_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar against the path as users call it must not be met by, or missed against, a path that was tuned."""
    model = tiny_model("llama")
    work = make_workload("ragged3", prompt_tokens="8..24", new_tokens="4")
    configs: list[Any] = []

    def generate_batch(inputs: list[list[int]], **options: Any) -> dict[int, Any]:
        configs.append(options.pop("continuous_batching_config"))
        assert list(options) == ["generation_config"]
        return {i: SimpleNamespace(generated_tokens=[0] * 4) for i in range(len(inputs))}

    monkeypatch.setattr(model, "generate_batch", generate_batch, raising=False)
    llm, machine = make_llm(model, [work], {}), Machine(name="any", bytes_per_s=1e9, flops_per_s=1e9)
    names = ["native-as-called", "native", "native-tuned"]
    results = list(measure_throughput(llm, work, machine, baselines=names, repeats=1))
    assert [result.system for result in results] == [
        "hf_paged",
        "native, as called",
        "native, bounded",
        "native, tuned",
        "native, tuned",
    ]
    as_called, bounded, tuned, again = configs[-4:]
    assert as_called is None
    assert (bounded.num_blocks, bounded.max_batch_tokens, bounded.allow_block_sharing) == (3 + 8, 8192, True)
    assert (tuned.num_blocks, tuned.max_batch_tokens, tuned.allow_block_sharing) == (3 + 8, 512, False)
    assert again == tuned


def test_a_long_measurement_says_what_it_is_at() -> None:
    """Minutes without a word look like a process that hangs."""
    work = make_workload("ragged3", prompt_tokens="8..24", new_tokens="4")
    llm, machine = make_llm(tiny_model("llama"), [work], {}), Machine(name="any", bytes_per_s=1e9, flops_per_s=1e9)
    told: list[str] = []
    results = list(measure_throughput(llm, work, machine, repeats=2, tell=told.append))
    assert len(results) == 1
    assert told == [
        "ragged3: hf_paged warms up",
        "ragged3: hf_paged, run 1 of 2",
        "ragged3: hf_paged, run 2 of 2",
        "ragged3: hf_paged, to the first tokens",
    ]


def test_as_many_requests_run_in_timed_steps_as_their_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that take many steps let the first requests generate meanwhile; they must not end before the timing."""
    work = steps_workload(6, context=40, beside=0)
    llm = make_llm(tiny_model("llama"), [work], {"max_num_batched_tokens": 16})
    running: list[int] = []

    def noted(*args: Any, **options: Any) -> Any:
        running.append(len(llm.engine.scheduler.running))
        took = timed(*args, **options)
        running.append(len(llm.engine.scheduler.running))
        return took

    monkeypatch.setattr("hf_paged.eval.steps.timed", noted)
    machine = Machine(name="any", bytes_per_s=1e9, flops_per_s=1e9)
    assert measure_steps(llm, machine, running=6, context=40).running == 6
    assert running == [6, 6]
    assert not llm.engine.has_work
