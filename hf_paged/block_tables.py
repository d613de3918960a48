"""The block tables of the rows of one batch: which blocks hold each row's tokens.

Rows share blocks by reference count. Reordering, repeating or selecting rows and taking tokens back never touch a key
or a value; a block that several rows hold is copied only when one of them writes into it (copy-on-write of the tail).
Everything is vectorised over tokens with numpy; loops run over rows at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_paged.block_pool import BlockPool

Ints = NDArray[np.int64]


class BlockTables:
    """Tables of `num_rows` rows whose blocks come from `pool`; entry 0 (the null block) means none yet."""

    def __init__(self, pool: BlockPool, block_size: int, num_rows: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.lengths: Ints = np.zeros(num_rows, dtype=np.int64)  # tokens stored per row
        self.table: Ints = np.zeros((num_rows, 1), dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def blocks_needed(self, counts: Ints) -> int:
        """Free blocks that `append(counts)` takes: of a shared tail each writer but the last holder gets a copy."""
        writers = Counter(int(self.table[row, column]) for row, column in self._shared_tails(counts))
        copies = sum(min(count, self._pool.ref_count(block) - 1) for block, count in writers.items())
        return int(self._missing(counts).sum()) + copies

    def append(self, counts: Ints) -> list[tuple[int, int]]:
        """Make room for `counts[r]` more tokens in each row and count them as stored.

        Returns:
            block copies (source, destination) to carry out before the tokens are written.
        """
        copies = []
        for row, column in self._shared_tails(counts):
            block = int(self.table[row, column])
            if self._pool.ref_count(block) > 1:  # the last holder keeps the original
                (copy,) = self._pool.allocate(1)
                self._pool.free([block])
                self.table[row, column] = copy
                copies.append((block, copy))
        missing = self._missing(counts)
        held = self._blocks(self.lengths)
        self._widen(int((held + missing).max(initial=0)))
        blocks = self._pool.allocate(int(missing.sum()))
        rows = np.repeat(np.arange(self.num_rows), missing)
        within = np.arange(len(blocks)) - np.repeat(missing.cumsum() - missing, missing)
        self.table[rows, held[rows] + within] = blocks
        self.lengths = self.lengths + counts
        return copies

    def slots(self, counts: Ints, q_len: int) -> Ints:
        """Where the last `counts[r]` of `q_len` new columns of each row are stored, `[num_rows, q_len]`; else -1."""
        offsets = np.arange(q_len) - q_len
        positions = self.lengths[:, None] + offsets
        live = offsets >= -counts[:, None]
        positions = np.where(live, positions, 0)
        blocks = np.take_along_axis(self.table, positions // self.block_size, axis=1)
        return np.where(live, blocks * self.block_size + positions % self.block_size, -1)

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of the present row `rows[i]`."""
        if len(rows) == self.num_rows and (np.asarray(rows) == np.arange(self.num_rows)).all():
            return
        table, lengths = self.table[rows], self.lengths[rows]
        if table.shape == self.table.shape:
            changed = table != self.table  # beams share most of their blocks: count only what differs
            taken, given = table[changed], self.table[changed]
        else:
            taken, given = table.ravel(), self.table.ravel()
        self._pool.touch(taken.tolist())
        self._pool.free(given.tolist())
        self.table, self.lengths = table, lengths

    def truncate(self, lengths: Ints) -> None:
        """Keep the first `lengths[r]` tokens of each row."""
        surplus = np.arange(self.table.shape[1]) >= self._blocks(lengths)[:, None]
        self._pool.free(self.table[surplus].tolist())
        self.table = np.where(surplus, 0, self.table)
        self.lengths = lengths

    def fork(self) -> BlockTables:
        """Tables of the same tokens, held once more."""
        other = BlockTables(self._pool, self.block_size, self.num_rows)
        other.table, other.lengths = self.table.copy(), self.lengths.copy()
        self._pool.touch(other.table.ravel().tolist())
        return other

    def free(self) -> None:
        """Give all blocks back; no rows are left."""
        self._pool.free(self.table.ravel().tolist())
        self.table = np.zeros((0, 1), dtype=np.int64)
        self.lengths = np.zeros(0, dtype=np.int64)

    def _blocks(self, lengths: Ints) -> Ints:
        return -(-lengths // self.block_size)

    def _missing(self, counts: Ints) -> Ints:
        return self._blocks(self.lengths + counts) - self._blocks(self.lengths)

    def _shared_tails(self, counts: Ints) -> list[tuple[int, int]]:
        """(row, column) of partly filled blocks that a row will write into while somebody else holds them too."""
        rows = np.flatnonzero((self.lengths % self.block_size != 0) & (counts > 0))
        columns = self.lengths[rows] // self.block_size
        tails = zip(rows.tolist(), columns.tolist(), self.table[rows, columns].tolist())
        return [(row, column) for row, column, block in tails if self._pool.ref_count(block) > 1]

    def _widen(self, width: int) -> None:
        missing = width - self.table.shape[1]
        if missing > 0:
            self.table = np.pad(self.table, ((0, 0), (0, missing)))
