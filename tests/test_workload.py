"""The work that benchmarks do, and the least time that it can take."""

from __future__ import annotations

import pytest

from hf_paged.eval.machine import Machine
from hf_paged.eval.workload import least_products, least_seconds, make_workload


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
    sizes = {"linear_parameters": 10**6, "head_parameters": 0, "weight_bytes": 0, "head_bytes": 0}
    least = least_seconds(
        machine, work.prompt_lens, [1] * 64, common_prefix=work.common_prefix, kv_bytes_per_token=0.0, **sizes
    )
    assert least == pytest.approx(2e6 * (2048 + 64 * 32) / 1e12)


def test_the_roof_of_a_step_is_the_sum_of_what_its_operations_take() -> None:
    """Layers that compute, a head that reads and keys and values come one after the other."""
    machine = Machine(name="", bytes_per_s=1e9, flops_per_s=1e12)
    sizes = {
        "linear_parameters": 5 * 10**6,
        "head_parameters": 10**6,
        "weight_bytes": 4 * 10**6,
        "head_bytes": 2 * 10**6,
    }
    layers, head = 2 * 4e6 * 500 / 1e12, 2e6 / 1e9  # 4 ms of products for 2 of reading, 2 of reading for 1 of products
    assert least_products(machine, 500, 500, **sizes) == pytest.approx(layers + head)
    prompts, outputs = [10] * 500, [3] * 500
    prefill = 2 * (4e6 * 5000 + 1e6 * 500) / 1e12
    live = 500 * 2 * (10 + 1.5) * 8 / 1e9
    least = least_seconds(machine, prompts, outputs, kv_bytes_per_token=8.0, **sizes)
    assert least == pytest.approx(prefill + 2 * (layers + head) + live)
