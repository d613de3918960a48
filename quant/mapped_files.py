"""Weight files in this process's memory: their pages are given back while they are read.

Transformers maps all files of a checkpoint for the whole of its loading. Pages that were copied to a GPU are clean and
can be read again, but count as this process's memory until it ends: 35 GB of a 70B model beside the 35 GB on the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # Linux; elsewhere nothing is given back
_KEPT_BYTES = 256 << 20  # that may be read before their pages are given back


class MappedFiles:
    """The mappings of `files` that are made from now on, of which tensors are copied elsewhere.

    Older ones are another model's: one loaded on the CPU may have written to them, and would lose that.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = {os.path.realpath(file) for file in files}
        self._older = set(self._ranges())
        self._num_bytes = 0

    def was_copied(self, num_bytes: int) -> None:
        """So many bytes more were read and are needed no more. Only for copies: what views these pages would be read
        from the files again, and what was written to them lost."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _KEPT_BYTES:
            self._num_bytes = 0
            self.release()

    def release(self) -> None:
        ranges = [addresses for addresses in self._ranges() if addresses not in self._older]
        if not ranges:
            return
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin, end in ranges:
            madvise(begin, end - begin, mmap.MADV_DONTNEED)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """First and last address of what is mapped of the files now."""
        if not self._files or not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
            if len(fields) == 6 and fields[5] in self._files:
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                yield begin, end
