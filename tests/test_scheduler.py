"""What the scheduler promises, one promise per test. `test_scheduler_machine` tries them all at once."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.config import EngineConfig, KVGroup
from hf_paged.request import FinishReason, Request, SchedulerOutput
from hf_paged.sampling_params import SamplingParams
from hf_paged.scheduler import Scheduler

EOS = 0


def make(
    num_blocks: int = 100,
    *,
    windows: tuple[int | None, ...] = (None,),
    num_cpu_blocks: int = 0,
    max_model_len: int = 512,
    **options: Any,
) -> Scheduler:
    config = EngineConfig(block_size=16, max_model_len=max_model_len, **options)
    return Scheduler(config, [KVGroup(window=window) for window in windows], num_blocks, num_cpu_blocks, [EOS])


def add(scheduler: Scheduler, prompt: int | list[int], parent: Request | None = None, **params: Any) -> Request:
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    request = Request(f"r{scheduler._num_added}", tokens, SamplingParams(**params), parent=parent)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    scheduler.update(output, [token if entry.samples else None for entry in output.scheduled])
    scheduler.check_integrity()
    return output


def shares(output: SchedulerOutput) -> list[tuple[Request, int, int, bool]]:
    return [tuple(entry) for entry in output.scheduled]  # type: ignore[misc]


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


# ---- prefix cache ----------------------------------------------------------------------------------------------------


def test_requests_that_start_in_one_step_compute_their_common_prefix_once() -> None:
    scheduler = make()
    common = list(range(1, 65))
    requests = [add(scheduler, [*common, 100 + i, 200 + i]) for i in range(3)]
    assert [entry[1:3] for entry in shares(step(scheduler))] == [(66, 0), (2, 64), (2, 64)]
    assert len({tuple(request.block_tables[0][:4]) for request in requests}) == 1


def test_a_cached_prefix_is_shared_and_at_least_one_token_is_computed() -> None:
    scheduler = make()
    first = add(scheduler, 48)
    step(scheduler)
    second = add(scheduler, 48)
    assert shares(step(scheduler))[1] == (second, 16, 32, True)
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert second.block_tables[0][2] != first.block_tables[0][2]
    assert scheduler.blocks.prefix_hits == 32


def test_a_prompt_in_flight_can_be_shared_by_the_next_step() -> None:
    scheduler = make()
    add(scheduler, 48)
    scheduler.schedule()
    second = add(scheduler, 48)
    output = scheduler.schedule()
    assert output is not None
    assert shares(output)[1] == (second, 16, 32, True)


def test_blocks_of_generated_text_are_found_by_the_next_turn_of_a_conversation() -> None:
    scheduler = make()
    first = add(scheduler, 20, max_tokens=13)
    while scheduler.has_work:
        step(scheduler)
    second = add(scheduler, [*first.token_ids, 1, 2, 3])
    assert shares(step(scheduler)) == [(second, 4, 32, True)]


def test_a_block_with_a_token_in_flight_is_not_offered_to_others() -> None:
    scheduler = make()
    request = add(scheduler, 15)
    scheduler.schedule()
    output = scheduler.schedule()
    assert output is not None
    assert request.num_computed_tokens == 16
    assert scheduler.blocks.pool.num_cached == 0


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    scheduler = make()
    add(scheduler, 48)
    step(scheduler)
    request = add(scheduler, 48, prompt_logprobs=0)
    assert shares(step(scheduler))[1] == (request, 48, 0, True)


def test_switched_off_or_reset_the_cache_finds_nothing() -> None:
    off, reset = make(enable_prefix_caching=False), make()
    for scheduler in (off, reset):
        add(scheduler, 48)
        step(scheduler)
        scheduler.reset_prefix_cache()
        request = add(scheduler, 48)
        assert shares(step(scheduler))[1] == (request, 48, 0, True)


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_holds_no_more_blocks_than_it_can_see() -> None:
    scheduler = make(windows=(None, 20))
    request = add(scheduler, 40, max_tokens=100)
    for _ in range(80):
        step(scheduler)
    full, window = request.block_tables
    assert len(full) == len(window) == 8  # 119 positions
    assert all(full)
    assert window[:6] == [0] * 6  # the last query, at 118, saw keys > 98
    assert all(window[6:])


def test_a_windowed_request_is_accepted_exactly_when_its_window_fits_the_pool() -> None:
    scheduler = make(num_blocks=4, windows=(18,), max_num_batched_tokens=1)
    request = add(scheduler, 100, max_tokens=20)  # a query sees 18 positions, at worst in 3 blocks
    while scheduler.has_work:
        step(scheduler)
    assert len(request.output_token_ids) == 20
    with pytest.raises(ValueError, match="needs up to 3 KV blocks; allowed: 2"):
        add(make(num_blocks=3, windows=(18,), max_num_batched_tokens=1), 100, max_tokens=20)


def test_a_hit_in_a_window_needs_only_the_blocks_that_the_next_query_sees() -> None:
    scheduler = make(num_blocks=20, windows=(20,))
    first = add(scheduler, 100, max_tokens=1)
    step(scheduler)
    pool = scheduler.blocks.pool
    assert pool.num_cached == 6
    for name in first.block_hashes[:4]:  # as if evicted: positions 0..63
        block = pool.find(0, name)
        assert block is not None
        pool._forget(block)
    second = add(scheduler, 100)
    assert shares(step(scheduler)) == [(second, 4, 96, True)]  # sees keys > 76
    assert second.block_tables[0][:4] == [0] * 4


def test_a_hit_goes_only_as_far_as_every_group_has_the_blocks() -> None:
    scheduler = make(num_blocks=40, windows=(None, 20))
    first = add(scheduler, 100, max_tokens=1)
    step(scheduler)
    pool = scheduler.blocks.pool
    block = pool.find(1, first.block_hashes[4])
    assert block is not None
    pool._forget(block)
    second = add(scheduler, 100)
    assert shares(step(scheduler)) == [(second, 36, 64, True)]


# ---- n > 1 -----------------------------------------------------------------------------------------------------------


def test_a_child_waits_for_the_prompt_then_shares_full_blocks_and_copies_the_tail() -> None:
    scheduler = make(enable_prefix_caching=False)
    leader = add(scheduler, 41)
    child = add(scheduler, 41, parent=leader)
    assert [entry.request for entry in step(scheduler).scheduled] == [leader]
    output = step(scheduler)
    assert shares(output)[1] == (child, 1, 40, True)
    assert child.block_tables[0][:2] == leader.block_tables[0][:2]
    assert output.block_copies == [(leader.block_tables[0][2], child.block_tables[0][2])]


def test_a_prompt_that_ends_one_token_into_a_block_is_forked_without_a_copy() -> None:
    scheduler = make(enable_prefix_caching=False)
    leader = add(scheduler, 33)
    child = add(scheduler, 33, parent=leader)
    step(scheduler)
    output = step(scheduler)
    assert shares(output)[1] == (child, 1, 32, True)
    assert output.block_copies == []


def test_a_child_whose_leader_is_gone_computes_by_itself() -> None:
    scheduler = make(enable_prefix_caching=False)
    leader = add(scheduler, 41)
    child = add(scheduler, 41, parent=leader)
    scheduler.abort(leader.request_id)
    assert shares(step(scheduler)) == [(child, 41, 0, True)]


def test_a_waiting_child_does_not_hold_up_those_behind_it() -> None:
    scheduler = make()
    leader = add(scheduler, 41)
    add(scheduler, 41, parent=leader)
    other = add(scheduler, [9] * 5)
    assert [entry.request for entry in step(scheduler).scheduled] == [leader, other]


def test_a_child_with_another_prompt_or_an_unknown_leader_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="another prompt"):
        add(scheduler, 41, parent=add(scheduler, 40))
    with pytest.raises(ValueError, match="was not added"):
        add(scheduler, 41, parent=Request("stranger", list(range(1, 42)), SamplingParams()))


# ---- preemption ------------------------------------------------------------------------------------------------------


def run_out_of_blocks(num_cpu_blocks: int) -> tuple[Scheduler, Request, Request, SchedulerOutput]:
    scheduler = make(num_blocks=5, num_cpu_blocks=num_cpu_blocks, enable_prefix_caching=False)
    first, second = add(scheduler, 32, max_tokens=20), add(scheduler, [9] * 30, max_tokens=20)
    step(scheduler)
    return scheduler, first, second, step(scheduler)


def test_the_latest_arrival_gives_way_and_is_recomputed_with_its_tokens() -> None:
    scheduler, first, second, output = run_out_of_blocks(num_cpu_blocks=0)
    assert [entry.request for entry in output.scheduled] == [first]
    assert (second.num_computed_tokens, second.output_token_ids, second.row) == (0, [7], None)
    assert scheduler.num_recompute_preemptions == 1
    while scheduler.has_work:
        step(scheduler)
    assert len(first.output_token_ids) == len(second.output_token_ids) == 20


def test_with_room_in_cpu_memory_it_is_moved_there_and_back_and_recomputes_nothing() -> None:
    scheduler, first, second, output = run_out_of_blocks(num_cpu_blocks=3)
    assert len(output.swap_out) == 2
    assert second.num_computed_tokens == 30
    assert scheduler.num_swap_preemptions == 1
    while not first.is_finished:
        step(scheduler)
    output = step(scheduler)
    assert len(output.swap_in) == 2
    assert shares(output) == [(second, 1, 30, True)]
    assert output.admitted == [second]


def test_a_preempted_request_is_not_resumed_before_its_token_in_flight_is_known() -> None:
    scheduler = make(num_blocks=5, enable_prefix_caching=False)
    first, second = add(scheduler, 32, max_tokens=2), add(scheduler, [9] * 30, max_tokens=20)
    launched = scheduler.schedule()
    preempting = scheduler.schedule()
    assert launched is not None
    assert preempting is not None
    assert second.num_inflight == 1
    assert scheduler.abort(first.request_id) is first
    assert scheduler.schedule() is None  # there is room, but the device no longer has the token
    assert scheduler.update(launched, [5, 6]) == [second]
    assert shares(step(scheduler)) == [(second, 31, 0, True)]


def test_nobody_new_starts_in_a_step_that_preempts() -> None:
    scheduler = make(num_blocks=5, enable_prefix_caching=False)
    first = add(scheduler, 32, max_tokens=20)
    add(scheduler, [9] * 30, max_tokens=20)
    step(scheduler)
    small = add(scheduler, 1, max_tokens=1)
    assert [entry.request for entry in step(scheduler).scheduled] == [first]
    assert small.row is None
