"""Weight files in this process's memory: their pages are given back while they are read.

Transformers maps all files of a checkpoint for the whole of its loading. Pages that were copied (to a GPU, or into
packed words) are clean and can be read again, but count as this process's memory until it ends: 35 GB of a 70B model
beside the 35 GB on the GPU. So a tensor is not read before its module is converted (`convert.py`), and given back then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")  # Linux; elsewhere nothing is given back
_KEPT_BYTES = 64 << 20  # that may be copied before all pages are given back
_AHEAD_BYTES = 128 << 20


class MappedFiles:
    """The mappings of `files` that are made from now on, of which tensors are copied elsewhere.

    Older ones are another model's: one loaded on the CPU may have written to them, and would lose that.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = {os.path.realpath(file) for file in files}
        self._older = set(self._ranges())
        self._num_bytes = 0
        self._fetched: dict[int, int] = {}  # first address of a mapping -> up to where it is surely fetched

    def will_be_read(self, tensors: Iterable[Tensor]) -> None:
        """Let the system fetch what these CPU tensors hold, and what follows them in their files."""
        for tensor in tensors:
            end = tensor.data_ptr() + tensor.nbytes
            first = next((first for first, last in self._mapped if first <= tensor.data_ptr() < last), None)
            if first is not None and end > self._fetched.get(first, 0):  # a system call looks at every page
                self._fetched[first] = end + _AHEAD_BYTES
                self._advise(tensor.data_ptr(), end + 2 * _AHEAD_BYTES, mmap.MADV_WILLNEED)

    def were_copied(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """What these CPU tensors hold was copied to `device` and is not needed in the files any more. Only while they
        are mapped, and only where nobody wrote to them: what views these pages is read from the files again.

        Their pages go at once; with tensors that leave the CPU all pages of the files go from time to time, for the
        sake of those that Transformers copies itself.
        """
        for tensor in tensors:
            self._advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, mmap.MADV_DONTNEED)
            self._num_bytes += tensor.nbytes
        if device.type != "cpu" and self._num_bytes >= _KEPT_BYTES:
            self._num_bytes = 0
            self.release()

    def release(self) -> None:
        for begin, end in self._mapped:
            self._advise(begin, end, mmap.MADV_DONTNEED)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        """For the whole pages between two addresses, where they are of the file that lies at the first."""
        for first, last in self._mapped:
            low = -(-max(begin, first) // mmap.PAGESIZE) * mmap.PAGESIZE
            high = min(end, last) // mmap.PAGESIZE * mmap.PAGESIZE
            if first <= begin < last and low < high:
                _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)

    @cached_property
    def _mapped(self) -> list[tuple[int, int]]:
        """All files are mapped before the first tensor is read, until after the last."""
        return [addresses for addresses in self._ranges() if addresses not in self._older]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """First and last address of what is mapped of the files now."""
        if not self._files or not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
            if len(fields) == 6 and fields[5] in self._files:
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                yield begin, end


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
