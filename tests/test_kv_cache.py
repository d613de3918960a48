"""The storage of keys and values: rows of bytes, typed pages, groups of layers."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.kernels.layout import GroupPages, LayerKV, PlainPages, ScaledPages
from hf_paged.kv_cache import KVCache, group_layers, layer_formats
from hf_paged.layer_probe import LayerSpec


def spec(layer_idx: int, window: int | None = None, **changes: object) -> LayerSpec:
    values = {
        "layer_idx": layer_idx,
        "name": f"layer {layer_idx}",
        "num_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "window": window,
        "softcap": None,
        "has_sinks": False,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return LayerSpec(**{**values, **changes})  # type: ignore[arg-type]  # a mapping of mixed values


def cache_of(specs: list[LayerSpec], kv_cache_dtype: str = "int8", num_blocks: int = 5) -> KVCache:
    return KVCache(specs, layer_formats(specs, kv_cache_dtype), num_blocks=num_blocks, block_size=16)


def test_a_uniform_model_has_one_group() -> None:
    (group,) = group_layers([spec(i) for i in range(7)])
    assert [s.layer_idx for s in group.layers] == list(range(7))


def test_mixed_windows_are_cut_into_groups_of_the_rarest_kind() -> None:
    groups = group_layers([spec(i, None if i % 6 == 5 else 128) for i in range(26)])
    assert [(g.window, len(g.layers)) for g in groups] == [(None, 4), *[(128, 4)] * 5, (128, 2)]


def test_kinds_of_nearly_equal_size_make_one_group_each() -> None:
    groups = group_layers([spec(i, 64 if i % 2 else None) for i in range(9)])
    assert [len(g.layers) for g in groups] == [5, 4]


def test_parts_of_a_row_do_not_overlap() -> None:
    """Writing one part of a block must leave every other part of it, and every other block, alone."""
    cache = cache_of([spec(0, v_head_dim=8)])
    layer = cache.layers[0]
    assert isinstance(layer.k, ScaledPages) and isinstance(layer.v, ScaledPages)
    parts = [layer.k.codes, layer.k.scale, layer.v.codes, layer.v.scale]
    for i, part in enumerate(parts):
        part[...] = i + 1
    for i, part in enumerate(parts):
        assert (part == i + 1).all()
    layer.v.codes[2] = 77
    assert (layer.v.codes[1] == 3).all() and (layer.v.codes[3] == 3).all() and (layer.k.codes == 1).all()


def test_parts_of_an_int4_row_do_not_overlap_and_cost_what_they_say() -> None:
    cache = KVCache(
        [spec(0, head_dim=128, v_head_dim=80)], layer_formats([spec(0)], "int4"), num_blocks=3, block_size=16
    )
    layer = cache.layers[0]
    assert isinstance(layer.k, GroupPages) and isinstance(layer.v, GroupPages)
    assert (layer.k.head_dim, layer.v.head_dim) == (128, 80)
    parts = [layer.k.codes, layer.k.scale, layer.v.codes, layer.v.scale]
    for i, part in enumerate(parts):
        part[...] = i + 1
    assert [int(part.unique()) for part in parts] == [1, 2, 3, 4]
    assert cache.bytes_per_token == 2 * (64 + 2 * 4 + 40 + 2 * 4) == sum(p.nbytes for p in parts) / (3 * 16)
    assert all(part.stride(0) * part.element_size() == cache.block_bytes for part in parts)


def test_int4_beside_another_format_costs_half_a_byte_per_channel_and_four_per_group() -> None:
    specs = [spec(0, head_dim=256, v_head_dim=64)]
    for name, size in (("k=int8,v=int4", 256 + 2 + 32 + 4), ("k=int4,v=auto", 128 + 16 + 128)):
        cache = KVCache(specs, layer_formats(specs, name), num_blocks=2, block_size=16)
        assert cache.bytes_per_token == 2 * size


def test_a_head_dim_that_int4_cannot_pack_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ValueError, match="head_dim 33"):
        layer_formats([spec(0, v_head_dim=33)], "k=int8,v=int4")


def test_layers_of_different_groups_share_their_slot() -> None:
    """A block id belongs to one group at a time, so the memory of a slot is counted once, not once per group."""
    specs = [spec(i, 32 if i % 2 else None) for i in range(4)]
    cache = cache_of(specs)
    cache.layers[0].k.tensor[3] = 5
    assert (cache.layers[1].k.tensor[3] == 5).all()
    assert cache.num_bytes == cache_of(specs[::2]).num_bytes


def test_k_and_v_formats_and_skipped_layers_are_independent() -> None:
    specs = [spec(0), spec(1)]
    formats = layer_formats(specs, "k=int8,v=auto", skip_layers=(1,))
    cache = KVCache(specs, formats, num_blocks=2, block_size=16)
    assert isinstance(cache.layers[0].k, ScaledPages) and isinstance(cache.layers[0].v, PlainPages)
    assert isinstance(cache.layers[1].k, PlainPages) and cache.layers[1].k.data.dtype == torch.bfloat16
    assert cache.bytes_per_token == 2 * (16 + 2) + 2 * 32 + 2 * 64


def test_a_skipped_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\].*0\.\.1"):
        layer_formats([spec(0), spec(1)], "int8", skip_layers=(7,))


def test_block_copies_read_every_source_before_they_write() -> None:
    cache = cache_of([spec(0), spec(1)])
    for block in range(5):
        cache.layers[1].k.tensor[block] = block
    cache.copy_blocks([(1, 2), (2, 3)])
    assert [int(cache.layers[1].k.tensor[b].unique()) for b in range(5)] == [0, 1, 1, 2, 4]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "int4", "k=int4,v=fp8"])
def test_swapped_blocks_come_back_as_they_were(kv_cache_dtype: str) -> None:
    cache = cache_of([spec(0), spec(1)], kv_cache_dtype)
    assert cache.allocate_host(3 * cache.block_bytes + 1) == 3
    rows = [slot.clone().random_() for slot in cache._slots]
    for slot, row in zip(cache._slots, rows, strict=True):
        slot.copy_(row)
    cache.swap_out([(2, 0), (4, 1)])
    for slot in cache._slots:
        slot.zero_()
    cache.swap_in([(1, 1), (0, 3)])
    for slot, row in zip(cache._slots, rows, strict=True):
        assert (slot[1] == row[4]).all() and (slot[3] == row[2]).all()


def test_swapping_neighbours_is_one_copy_per_slot() -> None:
    """A long request has thousands of blocks and a model dozens of slots: a copy of each pair would stall the step."""
    cache = cache_of([spec(0), spec(1)])
    cache.allocate_host(4 * cache.block_bytes)
    rows = [slot.random_().clone() for slot in cache._slots]
    with Copies() as copies:
        cache.swap_out([(4, 2), (1, 0), (3, 1)])
        cache.swap_in([(2, 4), (0, 1), (1, 3)])
        cache.swap_out([])
    assert copies.count == 2 * len(cache._slots)
    assert all(torch.equal(slot, row) for slot, row in zip(cache._slots, rows, strict=True))


class Copies(TorchDispatchMode):
    """Counts copies from tensor to tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "v_head_dim"), [("auto", 16), ("auto", 8), ("int8", 16), ("k=int8,v=auto", 16)]
)
def test_k_and_v_are_read_together_only_where_they_are_neighbours_of_one_kind(
    kv_cache_dtype: str, v_head_dim: int
) -> None:
    """A pair that is none would read other layers' bytes as values."""
    layer = cache_of([spec(0, v_head_dim=v_head_dim), spec(1, v_head_dim=v_head_dim)], kv_cache_dtype).layers[1]
    pair = layer.plain_pair
    assert (pair is not None) == (kv_cache_dtype == "auto" and v_head_dim == 16)
    if pair is not None:
        layer.k.tensor.random_(9)
        layer.v.tensor.random_(9)
        assert torch.equal(pair.data, torch.cat((layer.k.tensor, layer.v.tensor), 1))
    halves = torch.zeros(2, 5, 2, 16, 16)
    apart = LayerKV(k=PlainPages(data=halves[0]), v=PlainPages(data=halves[1]))
    one_block = LayerKV(k=PlainPages(data=halves[0, :1]), v=PlainPages(data=halves[0, 1:2]))
    assert apart.plain_pair is None and one_block.plain_pair is None
