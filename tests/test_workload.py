"""The work that benchmarks do, and the least time that it can take."""

from __future__ import annotations

import pytest

from hf_paged.eval.machine import Machine
from hf_paged.eval.workload import least_seconds, make_workload


def test_a_workload_is_the_same_every_time_so_that_figures_compare() -> None:
    work = make_workload("ragged128")
    assert work == make_workload("ragged128")
    assert len(work.prompt_lens) == 128
    assert min(work.prompt_lens) >= 128
    assert max(work.prompt_lens) <= 1024
    assert [len(prompt) for prompt in work.prompts(50)] == list(work.prompt_lens)


def test_a_shared_prefix_is_common_to_all_prompts_and_counted_once_in_the_roof() -> None:
    work = make_workload("shared-prefix")
    prompts = work.prompts(1000)
    assert {tuple(prompt[:2048]) for prompt in prompts} == {tuple(prompts[0][:2048])}
    assert len({tuple(prompt) for prompt in prompts}) == 64
    machine = Machine(name="", bytes_per_s=1e12, flops_per_s=1e12)
    sizes = {"linear_parameters": 10**6, "head_parameters": 0, "weight_bytes": 0, "kv_bytes_per_token": 0.0}
    least = least_seconds(machine, work.prompt_lens, [1] * 64, common_prefix=work.common_prefix, **sizes)
    assert least == pytest.approx(2e6 * (2048 + 64 * 32) / 1e12)
