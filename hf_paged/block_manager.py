"""Block tables of requests: how they start, grow, share, lose old blocks, move to CPU memory and back.

A request has one table per KV group, all of one length; entry i holds positions i * block_size onwards. In a group
with a window the entries before `first_live` are 0: their blocks were given back. A block is written only by a request
that is its only holder: what is shared is full, and a partial tail is copied when a request forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hf_paged.block_pool import NULL_BLOCK, BlockPool, extend_block_hashes
from hf_paged.config import KVGroup
from hf_paged.request import BlockHash, Request, RequestState


class Start(NamedTuple):
    """Where a request may begin: tokens that are computed already, and the blocks that hold them."""

    num_computed_tokens: int
    first_live: list[int]  # [num_groups]
    block_tables: list[list[int]]  # [num_groups], full blocks to share; 0 before first_live
    tail: list[int]  # [num_groups] partial blocks to copy; empty when the tokens end with a full block


class BlockManager:
    """Assigns the blocks of one pool to requests. Asking changes nothing; whoever acts has asked before."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        num_blocks: int,
        *,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = True,
        whole_blocks: bool = False,
    ) -> None:
        self.whole_blocks = whole_blocks  # whoever starts or comes back begins at a block: a block computed in one row
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.windows = [group.window for group in groups]
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cpu_blocks = num_cpu_blocks
        self.prefix_hits = 0  # tokens of the requests that started, found in the prefix cache or the parent's blocks
        self._windowed = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        self._free_cpu = list(range(num_cpu_blocks))

    # ---- how much ----------------------------------------------------------------------------------------------------

    def most_blocks(self, num_positions: int, max_chunk: int) -> int:
        """Blocks that a request of `num_positions`, computed in chunks, may hold at once when it shares none."""
        total = 0
        for window in self.windows:
            blocks = self._num_slots(num_positions)
            if window is not None:
                span = window - 1 + min(max_chunk, num_positions)  # positions seen or written in one step
                span += self.block_size - 1 if self.whole_blocks else 0
                blocks = min(blocks, (span + self.block_size - 2) // self.block_size + 1)
            total += blocks
        return total

    def missing(self, request: Request, end: int) -> int:
        """Blocks that the request lacks to hold positions below `end`."""
        return max(0, self._num_slots(end) - len(request.block_tables[0])) * len(self.windows)

    def fits(self, start: Start, end: int) -> bool:
        """Whether a request may start there and compute positions below `end`."""
        new = (self._num_slots(end) - len(start.block_tables[0])) * len(self.windows)
        revived = sum(
            block != NULL_BLOCK and self.pool.ref_count(block) == 0 for table in start.block_tables for block in table
        )
        return new + revived <= self.pool.num_free

    def fits_swapped(self, request: Request, end: int) -> bool:
        """Whether a swapped request may come back and compute positions below `end`."""
        slots = self._num_slots(end)
        return sum(slots - first for first in request.first_live) <= self.pool.num_free

    # ---- start, grow, end --------------------------------------------------------------------------------------------

    def find_start(self, request: Request, *, may_fork: bool = True) -> Start:
        """The furthest start: a fork of its parent's prompt, if it may, else the longest hit in the prefix cache."""
        return (self._fork(request) if may_fork else None) or self._prefix_hit(request)

    def start(self, request: Request, start: Start) -> list[tuple[int, int]]:
        """Give the request its first blocks; returns the block copies (source, destination) that this takes."""
        if self.enable_prefix_caching:
            self.prefix_hits += start.num_computed_tokens
        for table in start.block_tables:
            self.pool.touch(table)
        request.num_computed_tokens = start.num_computed_tokens
        request.num_cached_blocks = start.num_computed_tokens // self.block_size
        request.first_live = start.first_live
        request.block_tables = start.block_tables
        copies = list(zip(start.tail, self.pool.allocate(len(start.tail)), strict=True))
        for table, (_, destination) in zip(request.block_tables, copies, strict=False):
            table.append(destination)
        return copies

    def grow(self, request: Request, end: int) -> None:
        """Let the request hold positions below `end`; it will write those from `num_computed_tokens` on."""
        written = request.num_computed_tokens // self.block_size
        new = self._num_slots(end) - len(request.block_tables[0])
        for table in request.block_tables:
            if written < len(table):
                assert self.pool.ref_count(table[written]) == 1, f"{request} would write a shared block"
            if new > 0:
                table += self.pool.allocate(new)

    def trim(self, request: Request) -> None:
        """Give back the blocks that no coming query sees: the next one, at position p, sees keys > p - window."""
        for group, window in self._windowed:
            passed, live = request.first_live[group], self._first_live(window, self._start_of(request))
            if live > passed:
                table = request.block_tables[group]
                self.pool.free(table[passed:live])
                table[passed:live] = [NULL_BLOCK] * (live - passed)
                request.first_live[group] = live

    def store(self, request: Request, end: int) -> None:
        """Let other requests find the full blocks below `end`, computed or about to be, whose tokens the host knows."""
        if not self.enable_prefix_caching or not request.block_tables:
            return
        full = min(end, len(request.token_ids)) // self.block_size
        if full <= request.num_cached_blocks:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, full)
        for group, table in enumerate(request.block_tables):
            for index in range(max(request.num_cached_blocks, request.first_live[group]), full):
                self.pool.cache(group, table[index], request.block_hashes[index])
        request.num_cached_blocks = full

    def release(self, request: Request) -> None:
        """Take everything back, on the device and in CPU memory; the request is as if it had computed nothing."""
        for table in request.block_tables:
            self.pool.free(table)
        for table in request.cpu_block_tables:
            self._free_cpu += table
        request.block_tables, request.cpu_block_tables, request.first_live = [], [], []
        request.num_computed_tokens = request.num_cached_blocks = 0

    # ---- CPU memory --------------------------------------------------------------------------------------------------

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Move the live blocks to CPU memory: pairs (device block, CPU block), or None when that is too small."""
        self.trim(request)
        request.num_computed_tokens = self._start_of(request)
        live = [table[first:] for table, first in zip(request.block_tables, request.first_live, strict=True)]
        if sum(map(len, live)) > len(self._free_cpu):
            return None
        request.cpu_block_tables = [[self._free_cpu.pop() for _ in table] for table in live]
        for table in live:
            self.pool.free(table)
        request.block_tables = []
        return _pairs(live, request.cpu_block_tables)

    def swap_in(self, request: Request) -> list[tuple[int, int]]:
        """Bring a swapped request's blocks back: pairs (CPU block, device block)."""
        live = [self.pool.allocate(len(table)) for table in request.cpu_block_tables]
        pairs = _pairs(request.cpu_block_tables, live)
        for table in request.cpu_block_tables:
            self._free_cpu += table
        request.cpu_block_tables = []
        request.block_tables = [
            [NULL_BLOCK] * first + table for first, table in zip(request.first_live, live, strict=True)
        ]
        return pairs

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Every block, on the device and in CPU memory, is free or where a table says. Raises AssertionError."""
        requests = list(requests)
        self.pool.check_integrity(table for request in requests for table in request.block_tables)
        for request in requests:
            tables = request.block_tables
            assert len({len(table) for table in tables}) <= 1, f"{request}: the tables of its groups differ in length"
            assert bool(tables) == (request.state is RequestState.RUNNING), (
                f"{request}: blocks are held while not running"
            )
            assert bool(request.cpu_block_tables) == (request.state is RequestState.SWAPPED), f"{request}: CPU blocks"
            for table, first in zip(tables, request.first_live, strict=bool(tables)):
                assert not any(table[:first]) and all(table[first:]), f"{request}: null blocks before {first} only"
                for block in table[request.num_computed_tokens // self.block_size :]:
                    assert self.pool.ref_count(block) == 1, f"{request} would write a shared block"
        in_use = [block for request in requests for table in request.cpu_block_tables for block in table]
        assert sorted(in_use + self._free_cpu) == list(range(self.num_cpu_blocks)), "CPU blocks are lost or held twice"

    # ---- the two ways to start with something ------------------------------------------------------------------------

    def _fork(self, request: Request) -> Start | None:
        """Share the parent's prompt but its last token, which the request recomputes to sample its own first token."""
        parent, position = request.parent, request.num_prompt_tokens - 1
        if self.whole_blocks:
            position -= position % self.block_size
        if parent is None or not parent.block_tables or parent.num_computed_tokens < position:
            return None
        if request.output_token_ids:
            return None  # it was preempted; its own blocks, if still cached, reach further
        full = position // self.block_size
        first_live = [self._first_live(window, position) for window in self.windows]
        if any(passed > first for passed, first in zip(parent.first_live, first_live, strict=True)):
            return None  # the parent's window has moved on
        tables = [
            [NULL_BLOCK] * first + table[first:full]
            for table, first in zip(parent.block_tables, first_live, strict=True)
        ]
        tail = [table[full] for table in parent.block_tables] if position % self.block_size else []
        return Start(position, first_live, tables, tail)

    def _prefix_hit(self, request: Request) -> Start:
        """The longest cached prefix that leaves one token to compute; none for a request that wants prompt_logprobs."""
        hashes: list[BlockHash] = []
        if self.enable_prefix_caching and request.params.prompt_logprobs is None:
            limit = (len(request.token_ids) - 1) // self.block_size
            extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, limit)
            hashes = request.block_hashes[:limit]
        n = self._longest_hit(hashes)
        first_live = [self._first_live(window, n * self.block_size) for window in self.windows]
        tables = [
            [NULL_BLOCK] * first + [self._find(group, name) for name in hashes[first:n]]
            for group, first in enumerate(first_live)
        ]
        return Start(n * self.block_size, first_live, tables, [])

    def _longest_hit(self, hashes: list[BlockHash]) -> int:
        """The most leading blocks that every group still has, as far as its window needs them."""
        n = len(hashes)
        for group, window in enumerate(self.windows):
            if window is None:
                n = next((index for index in range(n) if not self._find(group, hashes[index])), n)
        while n and (gap := self._window_gap(hashes, n)) is not None:
            n = gap  # a hit that needs the block at the gap is impossible, whatever its length
        return n

    def _window_gap(self, hashes: list[BlockHash], n: int) -> int | None:
        """The last block that a hit of `n` blocks needs and a windowed group lacks."""
        for group, window in self._windowed:
            for index in range(n - 1, self._first_live(window, n * self.block_size) - 1, -1):
                if not self._find(group, hashes[index]):
                    return index
        return None

    def _find(self, group: int, name: BlockHash) -> int:
        return self.pool.find(group, name) or NULL_BLOCK

    def _first_live(self, window: int | None, position: int) -> int:
        """Index of the first block that a query at `position` sees, or any after it."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _start_of(self, request: Request) -> int:
        """Where the request would go on after it was preempted."""
        computed = request.num_computed_tokens
        return computed - computed % self.block_size if self.whole_blocks else computed

    def _num_slots(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)


def _pairs(sources: list[list[int]], destinations: list[list[int]]) -> list[tuple[int, int]]:
    return [
        pair
        for source, destination in zip(sources, destinations, strict=True)
        for pair in zip(source, destination, strict=True)
    ]
