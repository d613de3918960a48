"""KV blocks: who holds each one, which are free, and which full ones can be found again by their content.

One `BlockPool` serves all KV groups. Ids run from 1 to num_blocks - 1; block 0 is the null block, never handed out and
ignored on return, so a block table whose old entries a window has passed can be freed as it is.

A block that nobody holds stays findable until its room is needed: the free list is in eviction order, first the blocks
without content worth keeping, then the least recently freed. A hit verifies the token ids, so no hash collision can
give a request somebody else's keys; the blocks before it are verified the same way where their group still has them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from hf_paged.request import BlockHash

NULL_BLOCK = 0


class _CacheKey(NamedTuple):
    group: int
    digest: bytes


class BlockPool:
    """`num_blocks` blocks with reference counts. `allocate` needs as many free blocks: ask `num_free` first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} is not allowed; allowed: at least 2, block 0 is the null block")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # in eviction order
        self._cached: dict[_CacheKey, tuple[int, bytes]] = {}  # -> block, its token ids
        self._key_of: dict[int, _CacheKey] = {}  # the inverse of _cached

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, those with cached content included."""
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`."""
        assert num_blocks >= self.num_blocks, f"a pool of {self.num_blocks} blocks cannot shrink to {num_blocks}"
        self._free.update(dict.fromkeys(range(self.num_blocks, num_blocks)))
        self._ref_counts += [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, n: int) -> list[int]:
        """`n` blocks held once; the content of reused ones is forgotten."""
        assert n <= len(self._free), f"{n} blocks wanted, {len(self._free)} free"
        blocks = []
        for _ in range(n):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder for each block. The null block is ignored."""
        for block in blocks:
            if block != NULL_BLOCK:
                if self._ref_counts[block] == 0:
                    del self._free[block]
                self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each block, the last first: the tail of a sequence is evicted before its head."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert self._ref_counts[block] > 0, f"block {block} is freed and nobody holds it"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def cache(self, group: int, block: int, name: BlockHash) -> None:
        """Let `block`, full and final, be found as `name`. The first block of a content stays the one that is found."""
        key = _CacheKey(group, name.digest)
        if key not in self._cached and block not in self._key_of:
            self._cached[key] = (block, name.tokens)
            self._key_of[block] = key

    def find(self, group: int, name: BlockHash) -> int | None:
        """The block of this content, or None; two contents of one digest are told apart by their token ids."""
        entry = self._cached.get(_CacheKey(group, name.digest))
        if entry is None or entry[1] != name.tokens:
            return None
        return entry[0]

    def reset_prefix_cache(self) -> None:
        """Forget all content, for example when the weights changed. Blocks in use stay with their holders."""
        self._cached.clear()
        self._key_of.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block is free, or held as often as the given block tables name it. Raises AssertionError."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += block != NULL_BLOCK
        assert self._ref_counts == expected, "reference counts differ from the block tables"
        held = {block for block in range(1, self.num_blocks) if expected[block]}
        assert held.isdisjoint(self._free), "a block is both free and held"
        assert len(held) + len(self._free) == self.num_blocks - 1, "blocks are lost"
        assert NULL_BLOCK not in self._free and NULL_BLOCK not in self._key_of, "the null block is handed out"
        inverse = {key: block for block, key in self._key_of.items()}
        assert inverse == {key: block for key, (block, _) in self._cached.items()}, "the content index is torn"

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._cached[key]


def extend_block_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Extend the hash chain of a token sequence, in place, to its first `num_blocks` full blocks."""
    for index in range(len(hashes), num_blocks):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        parent = hashes[-1].digest if hashes else b""
        hashes.append(BlockHash(blake2b(parent + tokens, digest_size=16).digest(), tokens))
