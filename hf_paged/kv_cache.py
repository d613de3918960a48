"""The storage of all keys and values: blocks of bytes, and the pages that kernels see in them.

Layers that attend through the same window form a kind; kinds are cut into *groups* of equal layer count, and the i-th
layers of all groups share slot i. A slot is one tensor `[num_blocks, row_bytes]`, one byte row per block:

    | K codes | V codes | K scales | V scales |        each part aligned to 128 bytes; int4: scales and zeros

so copying, swapping and sharing a block are row operations, and there is no second table for scales. A block id is one
row in every slot of the group that owns it: one pool serves full and window layers alike. A model of one kind has one
group. Blocks are never cleared, what was not written is never used; only the null block 0 is zeros.

Beside the pages, layers whose keys or values are coded may keep the block that each running sequence is filling as it
came (`LayerKV.recent`): one slot per sequence that may run, slot 0 for none. Layers with a window have codes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.config import parse_kv_cache_dtype
from hf_paged.kernels.kv_transform import KVTransform
from hf_paged.kernels.layout import UINT4, GroupPages, LayerKV, Pages, PlainPages, ScaledPages, num_groups
from hf_paged.kernels.on_device import cuda_capability
from hf_paged.layer_probe import LayerSpec

_ALIGN = 128  # bytes; one cache line, and what bulk copies need
_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": UINT4}


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """How one layer stores K and V: a code dtype with scales, or None for plain values of the layer's dtype."""

    k_codes: torch.dtype | None
    v_codes: torch.dtype | None
    transform: KVTransform | None = None  # on the layer's device


def layer_formats(
    specs: Sequence[LayerSpec], kv_cache_dtype: str, skip_layers: Sequence[int] = ()
) -> dict[int, LayerFormat]:
    """The format of each layer by its index; layers in `skip_layers` keep the model's dtype.

    Raises:
        ValueError: `skip_layers` names a layer that does not exist; fp8 on a GPU without fp8 instructions; a
            head_dim that int4 cannot pack.
    """
    k_name, v_name = parse_kv_cache_dtype(kv_cache_dtype)
    known = {spec.layer_idx for spec in specs}
    if unknown := sorted(set(skip_layers) - known):
        raise ValueError(f"skip_layers names layers {unknown}; this model has layers {min(known)}..{max(known)}")
    formats = {}
    for spec in specs:
        skipped = spec.layer_idx in skip_layers
        chosen = LayerFormat(
            k_codes=None if skipped else _CODES.get(k_name), v_codes=None if skipped else _CODES.get(v_name)
        )
        for head_dim, codes in ((spec.head_dim, chosen.k_codes), (spec.v_head_dim, chosen.v_codes)):
            if codes == UINT4:
                num_groups(head_dim)  # raises for one that cannot be packed
        _check_device(spec, chosen)
        formats[spec.layer_idx] = chosen
    return formats


def _check_device(spec: LayerSpec, chosen: LayerFormat) -> None:
    if torch.float8_e4m3fn not in (chosen.k_codes, chosen.v_codes) or spec.device.type != "cuda":
        return
    if cuda_capability(spec.device) < (8, 9):
        name = torch.cuda.get_device_name(spec.device)
        raise ValueError(f'kv_cache_dtype "fp8" needs a GPU with fp8 (sm89 or newer); {name} has none: use "int8"')


def keeps_recent(spec: LayerSpec, fmt: LayerFormat) -> bool:
    """Whether a layer can keep current blocks as they came: it has codes, and no window that begins inside a block."""
    return spec.window is None and (fmt.k_codes is not None or fmt.v_codes is not None)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that share one block table per sequence."""

    window: int | None
    layers: tuple[LayerSpec, ...]


def group_layers(specs: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Cut layers into groups of equal size, full-attention groups first.

    The size is that of the rarest kind, so that no slot is left mostly empty; kinds within 25% of each other make one
    group each, since a little padding costs less than another block table.
    """
    kinds: dict[int | None, list[LayerSpec]] = {}
    for spec in specs:
        kinds.setdefault(spec.window, []).append(spec)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= 1.25 * min(counts) else min(counts)
    return tuple(
        LayerGroup(window=window, layers=tuple(kinds[window][i : i + size]))
        for window in sorted(kinds, key=lambda w: -1 if w is None else w)
        for i in range(0, len(kinds[window]), size)
    )


class KVCache:
    """Every layer's pages for `num_blocks` blocks of `block_size` tokens; block 0 is the null block.

    Args:
        specs: the model's attention layers.
        formats: storage format by layer index.
        num_blocks: blocks to allocate, the null block included; 0 allocates nothing (to ask for sizes).
        block_size: tokens per block.
        num_recent: sequences whose current block is kept in the layer's dtype too.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        formats: Mapping[int, LayerFormat],
        *,
        num_blocks: int,
        block_size: int,
        num_recent: int = 0,
    ) -> None:
        self.specs = tuple(specs)
        self.formats = formats
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_recent = num_recent
        self.groups = group_layers(specs)
        self.group_of = {spec.layer_idx: g for g, group in enumerate(self.groups) for spec in group.layers}
        layouts = {spec.layer_idx: _RowLayout(spec, formats[spec.layer_idx], block_size) for spec in specs}
        self._layouts = layouts
        num_slots = max(len(group.layers) for group in self.groups)
        self._row_bytes = [
            max(layouts[g.layers[slot].layer_idx].num_bytes for g in self.groups if slot < len(g.layers))
            for slot in range(num_slots)
        ]
        devices = [self.groups[0].layers[slot].device for slot in range(num_slots)]
        self._slots = [
            torch.empty((num_blocks, n), dtype=torch.uint8, device=d)
            for n, d in zip(self._row_bytes, devices, strict=True)
        ]
        for slot in self._slots:
            slot[:1].zero_()
        self._recent = self._allocate_recent() if num_recent and num_blocks else {}
        self.layers = self._view_pages()
        self._host: list[Tensor] = []

    def _view_pages(self) -> dict[int, LayerKV]:
        return {
            spec.layer_idx: self._layouts[spec.layer_idx].pages(self._slots[slot], self._recent.get(spec.layer_idx))
            for group in self.groups
            for slot, spec in enumerate(group.layers)
        }

    def _allocate_recent(self) -> dict[int, LayerKV]:
        """By layer index, the slots of the layers that keep current blocks; not cleared but for slot 0."""
        found = {}
        for spec in self.specs:
            if keeps_recent(spec, self.formats[spec.layer_idx]):
                shape = (1 + self.num_recent, spec.kv_heads, self.block_size)
                sides = [
                    torch.empty((*shape, dim), dtype=spec.dtype, device=spec.device)
                    for dim in (spec.head_dim, spec.v_head_dim)
                ]
                for side in sides:
                    side[0].zero_()
                found[spec.layer_idx] = LayerKV(k=PlainPages(data=sides[0]), v=PlainPages(data=sides[1]))
        return found

    @property
    def recent_bytes(self) -> int:
        """Bytes of one sequence's current block in the layers that can keep it."""
        return self.block_size * sum(
            spec.kv_heads * (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize
            for spec in self.specs
            if keeps_recent(spec, self.formats[spec.layer_idx])
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are allocated however many blocks there are: the slots of current blocks."""
        return (1 + self.num_recent) * self.recent_bytes if self.num_recent else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all slots."""
        return sum(self._row_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token costs in all layers (codes and scales), before any window frees them."""
        return sum(_token_bytes(spec, self.formats[spec.layer_idx]) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.num_blocks * self.block_bytes + (self.fixed_bytes if self._recent else 0)

    def allocate_host(self, num_bytes: int) -> int:
        """Allocate swap space in (pinned) CPU memory; returns the number of blocks that fit in `num_bytes`."""
        count = num_bytes // self.block_bytes
        pin = self._slots[0].is_cuda
        self._host = [torch.empty((count, n), dtype=torch.uint8, pin_memory=pin) for n in self._row_bytes]
        return count

    def grow(self, num_blocks: int) -> None:
        """Reallocate for `num_blocks` blocks and keep the contents; at most one slot exists twice at any time.

        Where a slot finds no memory the cache stays as it was, though slots before that one keep their new size.
        """
        try:
            for i, old in enumerate(self._slots):
                new = old.new_empty((num_blocks, old.shape[1]))
                new[: self.num_blocks] = old[: self.num_blocks]
                if self.num_blocks == 0:
                    new[:1].zero_()
                self._slots[i] = new
            self.num_blocks = num_blocks
        finally:
            self.layers = self._view_pages()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]] | Tensor) -> None:
        """Copy whole blocks, (source, destination) each; sources are read before any destination is written."""
        if len(pairs) == 0:
            return
        table = torch.as_tensor(pairs, dtype=torch.long)
        for slot in self._slots:
            table = table.to(slot.device, non_blocking=True)  # once per device, and nobody waits
            source, destination = table.unbind(1)
            slot[destination] = slot[source]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to CPU memory, (block, host block) each. Ordered by the current stream, does not wait."""
        if not pairs:
            return
        blocks, runs = _runs([(host_block, block) for block, host_block in pairs])
        for slot, host in zip(self._slots, self._host, strict=True):
            blocks = blocks.to(slot.device, non_blocking=True)
            rows = slot.index_select(0, blocks)
            for mine, theirs in runs:
                host[theirs].copy_(rows[mine], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back from CPU memory, (host block, block) each. Ordered by the current stream, does not wait."""
        if not pairs:
            return
        blocks, runs = _runs(pairs)
        for slot, host in zip(self._slots, self._host, strict=True):
            blocks = blocks.to(slot.device, non_blocking=True)
            rows = slot.new_empty((len(blocks), slot.shape[1]))
            for mine, theirs in runs:
                rows[mine].copy_(host[theirs], non_blocking=True)
            slot.index_copy_(0, blocks, rows)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor's place in a byte row."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, slot: Tensor) -> Tensor:
        """`[num_blocks, *shape]` in all rows of `slot`."""
        return slot[:, self.offset : self.offset + self.num_bytes].view(self.dtype).unflatten(1, self.shape)


class _RowLayout:
    """Where one layer's parts lie in a block's byte row."""

    def __init__(self, spec: LayerSpec, fmt: LayerFormat, block_size: int) -> None:
        self.num_bytes = 0
        self._k_codes, self._v_codes, self._transform = fmt.k_codes, fmt.v_codes, fmt.transform
        rows = (spec.kv_heads, block_size)
        self._k = self._take(rows, _code_part(spec.head_dim, fmt.k_codes, spec.dtype))
        self._v = self._take(rows, _code_part(spec.v_head_dim, fmt.v_codes, spec.dtype))
        self._k_scale = self._take(rows, _scale_part(spec.head_dim, fmt.k_codes))
        self._v_scale = self._take(rows, _scale_part(spec.v_head_dim, fmt.v_codes))

    def _take(self, rows: tuple[int, int], part: tuple[tuple[int, ...], torch.dtype]) -> _Part:
        taken = _Part(offset=self.num_bytes, shape=(*rows, *part[0]), dtype=part[1])
        self.num_bytes += math.ceil(taken.num_bytes / _ALIGN) * _ALIGN
        return taken

    def pages(self, slot: Tensor, recent: LayerKV | None) -> LayerKV:
        return LayerKV(
            k=_pages(self._k_codes, self._k.view(slot), self._k_scale.view(slot)),
            v=_pages(self._v_codes, self._v.view(slot), self._v_scale.view(slot)),
            transform=self._transform,
            recent=recent,
        )


def _code_part(head_dim: int, codes: torch.dtype | None, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one row of values or codes."""
    return ((head_dim // 2,), torch.uint8) if codes == UINT4 else ((head_dim,), codes or dtype)


def _scale_part(head_dim: int, codes: torch.dtype | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of what scales one row; plain values have nothing."""
    if codes is None:
        return (0,), torch.float16
    return (num_groups(head_dim), 2) if codes == UINT4 else (), torch.float16


def _pages(codes: torch.dtype | None, data: Tensor, scale: Tensor) -> Pages:
    if codes is None:
        return PlainPages(data=data)
    return GroupPages(codes=data, scale=scale) if codes == UINT4 else ScaledPages(codes=data, scale=scale)


def _token_bytes(spec: LayerSpec, fmt: LayerFormat) -> int:
    sides = ((spec.head_dim, fmt.k_codes), (spec.v_head_dim, fmt.v_codes))
    parts = [part for dim, codes in sides for part in (_code_part(dim, codes, spec.dtype), _scale_part(dim, codes))]
    return spec.kv_heads * sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


def _runs(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, list[tuple[slice, slice]]]:
    """What (host block, block) pairs need in few copies: blocks in the order of their host blocks, and the stretches of
    neighbouring host blocks, as (slice of the blocks, slice of the host blocks).
    """
    ordered = sorted(pairs)
    runs: list[tuple[slice, slice]] = []
    for i, (host_block, _) in enumerate(ordered):
        if runs and runs[-1][1].stop == host_block:
            mine, theirs = runs.pop()
            runs.append((slice(mine.start, i + 1), slice(theirs.start, host_block + 1)))
        else:
            runs.append((slice(i, i + 1), slice(host_block, host_block + 1)))
    return torch.tensor([block for _, block in ordered], dtype=torch.long), runs
