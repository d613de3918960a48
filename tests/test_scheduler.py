"""What the scheduler promises about steps and ends. `test_scheduler_machine` tries all its promises at once."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import EOS, add, make, shares, step

from hf_paged.request import FinishReason, Request
from hf_paged.sampling_params import SamplingParams

# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_with_the_last() -> None:
    scheduler = make(max_num_batched_tokens=30)
    request = add(scheduler, 70)
    seen = [shares(step(scheduler))[0][1:] for _ in range(4)]
    assert seen == [(30, 0, False), (30, 30, False), (10, 60, True), (1, 70, True)]
    assert request.output_token_ids == [7, 7]


def test_running_requests_decode_while_a_long_prompt_takes_the_rest_of_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=32)
    first = add(scheduler, 10)
    step(scheduler)
    second = add(scheduler, [9] * 100)
    assert shares(step(scheduler)) == [(first, 1, 10, True), (second, 31, 0, False)]


def test_requests_with_one_token_come_first_whoever_arrived_first() -> None:
    scheduler = make(max_num_batched_tokens=32)
    first = add(scheduler, 33)
    second = add(scheduler, [5])
    step(scheduler)
    third = add(scheduler, [6] * 3)
    entries = shares(step(scheduler))
    assert entries == [(first, 1, 32, True), (second, 1, 0, True), (third, 3, 0, True)]


def test_no_more_rows_are_used_than_there_are_and_each_comes_back() -> None:
    scheduler = make(max_num_seqs=2)
    requests = [add(scheduler, 5, max_tokens=1) for _ in range(3)]
    assert [entry.request for entry in step(scheduler).scheduled] == requests[:2]
    output = step(scheduler)
    assert output.admitted == requests[2:]
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_arrival_order_is_kept_when_the_first_in_line_does_not_fit() -> None:
    scheduler = make(num_blocks=9)
    running = add(scheduler, 80, max_tokens=20)
    step(scheduler)
    add(scheduler, [8] * 100, max_tokens=1)
    small = add(scheduler, 3, max_tokens=1)
    assert [entry.request for entry in step(scheduler).scheduled] == [running]
    assert small.row is None


# ---- asynchronous stepping -------------------------------------------------------------------------------------------


def test_the_next_step_is_scheduled_before_the_token_is_known() -> None:
    scheduler = make()
    request = add(scheduler, 10)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert shares(second) == [(request, 1, 10, True)]
    scheduler.update(first, [5])
    scheduler.update(second, [6])
    assert request.output_token_ids == [5, 6]


def test_a_request_whose_last_token_is_in_flight_is_not_computed_any_further() -> None:
    scheduler = make()
    request = add(scheduler, 10, max_tokens=1)
    output = scheduler.schedule()
    assert output is not None
    assert scheduler.schedule() is None
    scheduler.update(output, [5])
    assert request.finish_reason is FinishReason.LENGTH


def test_the_token_of_a_step_launched_after_the_stop_is_dropped_and_its_blocks_are_free_at_once() -> None:
    scheduler = make()
    request = add(scheduler, 10)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert scheduler.update(first, [EOS]) == [request]
    assert scheduler.blocks.pool.num_free == 99
    assert scheduler.update(second, [5]) == []
    assert request.output_token_ids == [EOS]
    assert request.finish_reason is FinishReason.STOP


def test_a_row_that_the_sampler_holds_back_runs_again_only_with_its_token() -> None:
    scheduler = make()
    request = add(scheduler, 10)
    output = scheduler.schedule()
    assert output is not None
    assert scheduler.update(output, [None]) == []
    assert scheduler.schedule() is None
    scheduler.append(request, 5)
    assert shares(step(scheduler)) == [(request, 1, 10, True)]
    with pytest.raises(ValueError, match="not held back"):
        scheduler.append(request, 5)


def test_rows_held_back_make_room_when_the_others_do_not_fit_beside_them() -> None:
    scheduler = make(num_blocks=4, enable_prefix_caching=False)
    first, second = add(scheduler, 30, max_tokens=2), add(scheduler, 31, max_tokens=2)
    for _ in range(2):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, [None])
    assert first.is_held
    assert second.is_held
    for request in (first, second):
        scheduler.append(request, 5)
    for _ in range(10):
        if scheduler.has_work:
            step(scheduler)
    assert first.output_token_ids == second.output_token_ids == [5, 7]


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_request_and_is_named_and_eos_is_not() -> None:
    scheduler = make()
    by_eos, by_token = add(scheduler, 5), add(scheduler, 6, stop_token_ids=[4])
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(output, [EOS, 4])
    assert (by_eos.finish_reason, by_eos.stop_reason) == (FinishReason.STOP, None)
    assert (by_token.finish_reason, by_token.stop_reason) == (FinishReason.STOP, 4)


def test_eos_neither_ends_a_request_that_ignores_it_nor_one_short_of_min_tokens() -> None:
    scheduler = make()
    ignoring = add(scheduler, 5, ignore_eos=True, max_tokens=4)
    minimal = add(scheduler, 5, min_tokens=3, max_tokens=4, stop_token_ids=[EOS])
    step(scheduler, EOS)
    step(scheduler, EOS)
    assert not minimal.is_finished
    step(scheduler, EOS)
    assert minimal.finish_reason is FinishReason.STOP
    step(scheduler, EOS)
    assert ignoring.finish_reason is FinishReason.LENGTH


def test_a_request_ends_at_the_length_of_the_model() -> None:
    scheduler = make(max_model_len=8)
    request = add(scheduler, 6, max_tokens=None)
    while scheduler.has_work:
        step(scheduler)
    assert request.output_token_ids == [7, 7]
    assert request.finish_reason is FinishReason.LENGTH


def test_a_stop_string_found_by_the_detokenizer_ends_the_request_once() -> None:
    scheduler = make()
    request = add(scheduler, 5)
    step(scheduler)
    scheduler.finish(request, FinishReason.STOP, "\n\n")
    scheduler.finish(request, FinishReason.ABORT)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")


def test_aborting_is_possible_at_any_time_and_only_once() -> None:
    scheduler = make()
    running = add(scheduler, 5)
    step(scheduler)
    waiting = add(scheduler, 5)
    assert scheduler.abort(running.request_id) is running
    assert scheduler.abort(waiting.request_id) is waiting
    assert scheduler.abort(running.request_id) is None
    assert not scheduler.has_work
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (0, {}, "prompt of 0 tokens"),
        (512, {}, "max_model_len"),
        (200, {"max_tokens": None}, "needs up to 32 KV blocks; allowed: 19"),
        (290, {"max_tokens": 16}, "needs up to 20 KV blocks"),
    ],
)
def test_a_request_that_can_never_finish_is_refused_before_any_work(prompt: int, params: Any, message: str) -> None:
    scheduler = make(num_blocks=20)
    with pytest.raises(ValueError, match=message):
        add(scheduler, prompt, **params)
    assert not scheduler.has_work
    add(scheduler, 289, max_tokens=16)  # 304 positions, the last token needs none: 19 blocks


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    request = add(scheduler, 5)
    with pytest.raises(ValueError, match=request.request_id):
        scheduler.add(Request(request.request_id, [1], SamplingParams()))
