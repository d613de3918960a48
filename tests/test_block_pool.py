"""Blocks are counted right, evicted in order, and found only by exactly their content."""

from __future__ import annotations

import pytest

from hf_paged.block_pool import BlockPool, extend_block_hashes
from hf_paged.request import BlockHash


def names(tokens: list[int], block_size: int = 2) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, tokens, block_size, len(tokens) // block_size)
    return hashes


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.check_integrity([blocks])
    pool.free(blocks)
    assert pool.num_free == 3


def test_a_block_table_with_passed_entries_is_freed_as_it_is() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.touch([0, block])
    pool.free([0, 0, block])
    pool.check_integrity([[0, block]])


def test_freeing_a_block_that_nobody_holds_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.free(blocks)


def test_the_tail_of_a_sequence_is_evicted_before_its_head_and_old_sequences_before_new() -> None:
    pool = BlockPool(5)
    old, new = names([1, 2, 3, 4]), names([5, 6, 7, 8])
    for hashes in (old, new):
        blocks = pool.allocate(2)
        for block, name in zip(blocks, hashes, strict=True):
            pool.cache(0, block, name)
        pool.free(blocks)
    order = [old[1], old[0], new[1], new[0]]
    for gone in range(1, 5):
        pool.allocate(1)
        assert [pool.find(0, name) is None for name in order] == [True] * gone + [False] * (4 - gone)


def test_blocks_without_content_are_used_before_anything_is_evicted() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.cache(0, first[0], names([1, 2])[0])
    pool.free(first)
    pool.free(second)
    pool.allocate(2)
    assert pool.find(0, names([1, 2])[0]) == first[0]


def test_a_digest_collision_never_yields_somebody_elses_block() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    name, other = names([1, 2, 3, 4])
    pool.cache(0, block, name)
    assert pool.find(0, name) == block
    assert pool.find(0, BlockHash(name.digest, other.tokens)) is None


def test_equal_tokens_after_another_prefix_have_another_name() -> None:
    assert names([1, 2, 9, 9])[1].digest != names([3, 4, 9, 9])[1].digest


def test_the_same_content_in_two_groups_is_two_blocks() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.cache(0, block, names([1, 2])[0])
    assert pool.find(1, names([1, 2])[0]) is None


def test_of_two_blocks_with_one_content_the_first_is_found_and_both_come_home() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.cache(0, block, names([1, 2])[0])
    assert pool.find(0, names([1, 2])[0]) == blocks[0]
    pool.free(blocks)
    pool.allocate(2)
    pool.check_integrity([[1], [2]])
    assert pool.find(0, names([1, 2])[0]) is None


def test_forgetting_all_content_leaves_the_holders_alone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.cache(0, blocks[0], names([1, 2])[0])
    pool.reset_prefix_cache()
    assert pool.find(0, names([1, 2])[0]) is None
    pool.check_integrity([blocks])


def test_lost_and_doubly_counted_blocks_are_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([blocks[:1]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([blocks, blocks[:1]])
