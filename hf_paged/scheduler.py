"""Who runs in the next step, with how many tokens and on which blocks.

There are no phases: a running request gets the tokens it has not computed yet, as far as the step's budget goes, the
earliest arrival first; then swapped requests come back, then waiting ones start. When blocks run out, the latest
arrival gives way, to CPU memory if there is room, otherwise to be recomputed. The earliest running request can take
every other one's blocks, and none is accepted that the pool cannot hold alone, so somebody always gets on.

Stepping may be asynchronous: `schedule()` may be called for step N+1 before `update()` brought the tokens of step N, as
long as every output is launched, in order, on one device stream before the next call. So blocks and rows can be reused
at once, also when a request turns out to have ended with one more step in flight: that step's token is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence

from hf_paged.block_manager import BlockManager
from hf_paged.config import EngineConfig, KVGroup
from hf_paged.request import FinishReason, Request, RequestState, ScheduledRequest, SchedulerOutput


class _Step:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be scheduled
        self.is_full = False  # rows or blocks ran out: nobody new starts
        self.scheduled: list[ScheduledRequest] = []
        self.admitted: list[Request] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.block_copies: list[tuple[int, int]] = []

    def output(self) -> SchedulerOutput:
        singles = [entry for entry in self.scheduled if entry.num_scheduled_tokens == 1]
        if len(singles) < len(self.scheduled):
            singles += [entry for entry in self.scheduled if entry.num_scheduled_tokens > 1]
        return SchedulerOutput(
            scheduled=singles,
            admitted=self.admitted,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            block_copies=self.block_copies,
        )


class Scheduler:
    """Owns the requests and their blocks. `config.max_model_len` is resolved; `num_blocks` counts the null block."""

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[KVGroup],
        num_blocks: int,
        num_cpu_blocks: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        if config.max_model_len is None:
            raise ValueError("max_model_len=None is not allowed; allowed: the resolved length of the model")
        if not groups:
            raise ValueError("groups=[] is not allowed; allowed: at least one KV group")
        self.max_model_len = config.max_model_len
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.blocks = BlockManager(
            groups,
            config.block_size,
            num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            whole_blocks=config.kv_recent_block,
        )
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # by arrival
        self.waiting: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.num_recompute_preemptions = 0
        self.num_swap_preemptions = 0
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))  # free ones; the lowest row is handed out first
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # ---- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never finish; nothing is changed then."""
        prompt, parent = request.num_prompt_tokens, request.parent
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r} is in use; allowed: an id of no unfinished request")
        if not 1 <= prompt < self.max_model_len:
            raise ValueError(f"prompt of {prompt} tokens; allowed: 1..{self.max_model_len - 1} (max_model_len - 1)")
        if parent is not None and parent.prompt_token_ids != request.prompt_token_ids:
            raise ValueError(f"request {request.request_id!r} has another prompt than its parent {parent.request_id!r}")
        if parent is not None and not parent.is_finished and self.requests.get(parent.request_id) is not parent:
            raise ValueError(f"parent {parent.request_id!r} of request {request.request_id!r} was not added before it")
        max_tokens = request.params.max_tokens
        total = self.max_model_len if max_tokens is None else min(prompt + max_tokens, self.max_model_len)
        needed = self.blocks.most_blocks(total - 1, self.max_num_batched_tokens)  # the last token is never computed
        if needed > self.blocks.pool.num_blocks - 1:
            raise ValueError(
                f"prompt of {prompt} tokens with max_tokens={max_tokens} needs up to {needed} KV blocks; allowed: "
                f"{self.blocks.pool.num_blocks - 1}, the size of the pool"
            )
        request.max_total_tokens = total
        request.arrival = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at its user's wish; returns it, or None when it has ended already."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request now, whatever it is doing; tokens in flight are dropped. The first reason stays."""
        if request.is_finished:
            return
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        else:
            (self.swapped if request.state is RequestState.SWAPPED else self.waiting).remove(request)
        self.blocks.release(request)
        request.state = RequestState.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self.requests[request.request_id]

    # ---- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can be done before an `update`, an `append` or an `add`."""
        step = _Step(self.max_num_batched_tokens)
        self._fill(step)
        while not step.scheduled and step.is_full and self._preempt_held(step):
            self._fill(step)
        return self._launch(step)

    def update(self, output: SchedulerOutput, token_ids: Sequence[int | None]) -> list[Request]:
        """Take the tokens of a step, one per entry of `output.scheduled`; returns the requests that got one.

        None stands for an entry that does not sample, or that the sampler holds back until `append`.
        """
        touched = []
        for entry, token_id in zip(output.scheduled, token_ids, strict=True):
            request = entry.request
            if not entry.samples or request.is_finished:
                continue
            request.num_inflight -= 1
            if token_id is None:
                assert request.num_inflight == 0, "a row can be held back only when steps are taken one by one"
                request.is_held = True
            else:
                self._take_token(request, token_id)
                touched.append(request)
        return touched

    def append(self, request: Request, token_id: int) -> None:
        """Take the token of a request whose row was held back. Raises ValueError for any other request."""
        if not request.is_held:
            raise ValueError(f"request {request.request_id!r} is not held back; allowed: one whose token was None")
        request.is_held = False
        if not request.is_finished:
            self._take_token(request, token_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, because weights changed or a step failed after it was scheduled."""
        self.blocks.pool.reset_prefix_cache()

    def distrust(self, output: SchedulerOutput) -> None:
        """A step failed: nobody may go on from what it should have stored, in the prefix cache or in CPU memory."""
        self.reset_prefix_cache()
        copies = {block for _, block in output.swap_out}
        for request in reversed(tuple(self.swapped)):
            if any(not copies.isdisjoint(table) for table in request.cpu_block_tables):
                self.swapped.remove(request)
                self._recompute(request)

    def check_integrity(self) -> None:
        """Rows, queues and blocks fit together. Raises AssertionError."""
        queues = {
            RequestState.RUNNING: list(self.running),
            RequestState.WAITING: list(self.waiting),
            RequestState.SWAPPED: list(self.swapped),
        }
        for state, queue in queues.items():
            assert all(request.state is state for request in queue), f"a request in the {state.value} queue is not"
        assert sorted(id(request) for queue in queues.values() for request in queue) == sorted(
            map(id, self.requests.values())
        ), "a request is in no queue, or in two"
        rows = [request.row for request in self.requests.values() if request.row is not None]
        assert len(rows) == len(self.running), "a row is held while not running"
        assert sorted(rows + self._rows) == list(range(self.max_num_seqs)), "rows are lost"
        assert self.running == sorted(self.running, key=_arrival), "running requests are not in the order of arrival"
        for request in self.requests.values():
            assert request.num_computed_tokens <= request.num_tokens <= request.max_total_tokens, f"{request}: too far"
        self.blocks.check_integrity(self.requests.values())

    # ---- how a step fills --------------------------------------------------------------------------------------------

    def _fill(self, step: _Step) -> None:
        step.is_full = False
        self._continue_running(step)
        self._admit(self.swapped, self._resume, step)
        self._admit(self.waiting, self._begin, step)

    def _continue_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.budget:  # preemption shortens the list from its end
            request = self.running[index]
            index += 1
            num_new = self._chunk(request.num_computed_tokens, self._num_new_tokens(request), step)
            if num_new and self._make_room(request, request.num_computed_tokens + num_new, step):
                self._schedule_tokens(request, num_new, step)

    def _make_room(self, request: Request, end: int, step: _Step) -> bool:
        """Preempt later arrivals until `request` can hold positions below `end`; if that is not enough it waits."""
        self.blocks.trim(request)
        while self.blocks.missing(request, end) > self.blocks.pool.num_free:
            step.is_full = True
            if self.running[-1] is request:
                return False
            self._preempt(self.running[-1], step)
        return True

    def _admit(self, queue: deque[Request], start: Callable[[Request, _Step], bool], step: _Step) -> None:
        """Start the ready requests of a queue, in order, until one finds no row or no blocks."""
        skipped = []
        while queue and step.budget and not step.is_full:
            request = queue.popleft()
            if not self._is_ready(request):
                skipped.append(request)
            elif not self._rows or not start(request, step):
                queue.appendleft(request)
                step.is_full = True
        queue.extendleft(reversed(skipped))

    def _begin(self, request: Request, step: _Step) -> bool:
        # A parent that starts in this step may share blocks that are written in it: copies run before.
        start = self.blocks.find_start(request, may_fork=request.parent not in step.admitted)
        num_new = self._chunk(start.num_computed_tokens, request.num_tokens - start.num_computed_tokens, step)
        if not num_new or not self.blocks.fits(start, start.num_computed_tokens + num_new):
            return False
        step.block_copies += self.blocks.start(request, start)
        self._enter_running(request, step)
        self._schedule_tokens(request, num_new, step)
        return True

    def _resume(self, request: Request, step: _Step) -> bool:
        num_new = self._chunk(request.num_computed_tokens, self._num_new_tokens(request), step)
        if not num_new or not self.blocks.fits_swapped(request, request.num_computed_tokens + num_new):
            return False
        step.swap_in += self.blocks.swap_in(request)
        self._enter_running(request, step)
        self._schedule_tokens(request, num_new, step)
        return True

    def _chunk(self, start: int, wanted: int, step: _Step) -> int:
        """How many of `wanted` tokens from `start` on the step computes: all, or what its budget allows."""
        if wanted <= step.budget or not self.blocks.whole_blocks:
            return min(wanted, step.budget)
        end = start + step.budget
        return max(end - end % self.blocks.block_size - start, 0)

    def _schedule_tokens(self, request: Request, num_new: int, step: _Step) -> None:
        start = request.num_computed_tokens
        self.blocks.grow(request, start + num_new)
        # Found by others at once, in this very step too: a layer writes the keys of all tokens before any attends, what
        # others found is not copied, and nobody who is scheduled is preempted in the same step.
        self.blocks.store(request, start + num_new)
        step.budget -= num_new
        step.scheduled.append(ScheduledRequest(request, num_new, start, start + num_new == request.num_tokens))

    def _launch(self, step: _Step) -> SchedulerOutput | None:
        """Only now do requests advance: until here, all that is computed was launched in an earlier step."""
        if not step.scheduled and not step.swap_out:
            return None
        for request, num_scheduled_tokens, _, samples in step.scheduled:
            request.num_computed_tokens += num_scheduled_tokens
            request.num_inflight += samples
        return step.output()

    def _num_new_tokens(self, request: Request) -> int:
        """Tokens that wait to be computed; none once the request's last token is in flight."""
        num_tokens = request.num_tokens
        return num_tokens - request.num_computed_tokens if num_tokens < request.max_total_tokens else 0

    def _is_ready(self, request: Request) -> bool:
        """Whether all its tokens are known, and its parent, if it has one to fork, has computed the prompt."""
        if request.num_inflight or request.is_held:
            return False
        parent = request.parent
        if parent is None or parent.is_finished or request.output_token_ids or request.state is RequestState.SWAPPED:
            return True
        return parent.num_tokens > parent.num_prompt_tokens or parent.is_held  # its first token was sampled

    # ---- preemption and rows -----------------------------------------------------------------------------------------

    def _preempt(self, request: Request, step: _Step) -> None:
        self._leave_running(request)
        pairs = self.blocks.swap_out(request)
        if pairs is None:
            self._recompute(request)
        else:
            request.state = RequestState.SWAPPED
            self.swapped.appendleft(request)
            step.swap_out += pairs
            self.num_swap_preemptions += 1

    def _recompute(self, request: Request) -> None:
        """Let a request that has left its queue wait, without any blocks, to be computed again."""
        self.blocks.release(request)
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)
        self.num_recompute_preemptions += 1

    def _preempt_held(self, step: _Step) -> bool:
        """Held rows wait for the others: when no other fits beside them, the latest of them makes room."""
        held = next((request for request in reversed(self.running) if request.is_held), None)
        if held is not None:
            self._preempt(held, step)
        return held is not None

    def _enter_running(self, request: Request, step: _Step) -> None:
        request.state = RequestState.RUNNING
        request.row = self._rows.pop()
        insort(self.running, request, key=_arrival)
        step.admitted.append(request)

    def _leave_running(self, request: Request) -> None:
        assert request.row is not None, f"{request} runs without a row"
        self.running.remove(request)
        self._rows.append(request.row)
        request.row = None

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _take_token(self, request: Request, token_id: int) -> None:
        request.append(token_id)
        self.blocks.store(request, request.num_computed_tokens)
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                self.finish(request, FinishReason.STOP)
            elif token_id in params.stop_token_ids:
                self.finish(request, FinishReason.STOP, token_id)
        if len(request.token_ids) >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)


def _arrival(request: Request) -> int:
    return request.arrival
