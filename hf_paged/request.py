"""One request on its way through the engine, and what the scheduler says about one step.

A request has no phase: it runs while `num_computed_tokens < num_tokens`. The scheduler owns and changes it; everybody
else reads. These objects are touched for every token, so there are slots, plain lists and no copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hf_paged.sampling_params import SamplingParams


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(Enum):
    WAITING = "waiting"  # holds no blocks; new, or preempted and to be recomputed
    RUNNING = "running"  # holds a row and blocks
    SWAPPED = "swapped"  # preempted; its blocks are in CPU memory
    FINISHED = "finished"


class BlockHash(NamedTuple):
    """Name of a full block: `digest` covers it and all blocks before it, `tokens` are its own ids, to verify a hit."""

    digest: bytes
    tokens: bytes


class Request:
    """A prompt, its sampling and the state of its computation.

    `token_ids` (prompt, then output) holds what the host knows; up to `num_inflight` sampled tokens more exist on the
    device only. `parent` is the request whose prompt computation this one shares (n > 1): it forks the parent's blocks.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_tables",
        "cpu_block_tables",
        "error",
        "finish_reason",
        "first_live",
        "index",
        "is_held",
        "max_total_tokens",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_inflight",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "parent",
        "prompt_token_ids",
        "request_id",
        "row",
        "state",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        parent: Request | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index  # among the n sequences of one prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.parent = parent
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)  # prompt + output, known to the host
        self.output_token_ids: list[int] = []
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token id or stop string; None for eos
        self.error: str | None = None

        self.arrival = -1  # set by Scheduler.add, also the order of service
        self.max_total_tokens = 0  # set by Scheduler.add: prompt + output tokens at which the request ends
        self.num_computed_tokens = 0  # KV in the pages once every launched step ran
        self.num_inflight = 0  # sampled by launched steps, not known to the host yet
        self.is_held = False  # computed, but the sampler keeps its token back until Scheduler.append
        self.row: int | None = None  # of the runner's per-sequence tensors, while running

        self.block_tables: list[list[int]] = []  # [num_groups][num_blocks]; 0 where a window has passed
        self.cpu_block_tables: list[list[int]] = []  # the same while swapped out
        self.first_live: list[int] = []  # [num_groups] index of the first block that a window still needs
        self.block_hashes: list[BlockHash] = []  # of the first full blocks whose tokens are known
        self.num_cached_blocks = 0  # leading blocks already offered to the prefix cache

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return len(self.token_ids) + self.num_inflight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known to the host."""
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        """Take one sampled token, now known to the host."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}+{self.num_inflight}, computed={self.num_computed_tokens})"
        )


class ScheduledRequest(NamedTuple):
    """A request's share of one step: tokens `start .. start + num_scheduled_tokens - 1` are computed."""

    request: Request
    num_scheduled_tokens: int
    start: int  # num_computed_tokens before the step
    samples: bool  # the last known or in-flight token is computed, so one token is sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. The runner executes swap_out, swap_in, block_copies in this order, then the forward.

    Pairs are (source block, destination block); no list names a destination twice. `scheduled` may be empty while
    `swap_out` is not: then only the copies run.
    """

    scheduled: list[ScheduledRequest]  # those with exactly one token first
    admitted: list[Request] = field(default_factory=list)  # got their row in this step: the runner sets the row up
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block -> CPU block
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # CPU block -> device block
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # device block -> device block

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(entry.num_scheduled_tokens for entry in self.scheduled)
