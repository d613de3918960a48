"""What the scheduler promises about blocks: prefixes, windows, several sequences of a prompt, preemption."""

from __future__ import annotations

import pytest
from scheduling import add, make, shares, step

from hf_paged.request import Request, SchedulerOutput
from hf_paged.sampling_params import SamplingParams
from hf_paged.scheduler import Scheduler

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
    assert request.num_cached_blocks == 0


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
    assert sum(pool.find(0, name) is not None for name in first.block_hashes) == 6
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


def test_a_child_copies_no_tail_that_is_written_in_the_same_step() -> None:
    """Its leader may have found it with a request that started just before, and copies run before anything is written:
    the child would have gone on from another request's keys."""
    scheduler = make()
    leader, twin = add(scheduler, 41), add(scheduler, 41)
    for _ in range(8):
        step(scheduler)
    for request in (leader, twin):
        scheduler._leave_running(request)
        scheduler._recompute(request)
    scheduler.reset_prefix_cache()
    child = add(scheduler, 41, parent=leader)
    output = step(scheduler)
    assert shares(output) == [(leader, 1, 48, True), (twin, 49, 0, True), (child, 9, 32, True)]
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
