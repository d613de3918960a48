"""The order in which act-order weights store their input channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.quant.pack import channel_order, pack, unpack
from hf_paged.quant.weight import QuantizedWeight, dequantize

GROUP = 128


def shuffled_groups(channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.arange(channels) // GROUP)[torch.randperm(channels, generator=generator)].int()


def turns_of_reads(order: Tensor, warps: int) -> float:
    """What a read of a warp of `load_rows` in `layer_chain.cu` takes, on average: lanes have eight channels of a group
    each, half of them those of the group `warps` further; words of one bank are read one after the other."""
    turns = []
    for warp in range(warps):
        groups = order.view(-1, 16, 8)[warp::warps]
        for pair in groups.split(2):
            turns += [torch.bincount((lanes // 2).unique() % 32).max() for lanes in pair.flatten(0, 1).unbind(1)]
    return float(torch.stack(turns).float().mean())


@pytest.mark.parametrize(("channels", "warps"), [(4096, 16), (11008, 16), (14336, 16), (5120, 20), (13824, 20)])
def test_channels_that_a_chain_reads_at_once_seldom_lie_in_one_bank(channels: int, warps: int) -> None:
    """Such reads, by number of channel, are half of what act-order costs a step of one token. Of twelve orders they
    take 3.2 to 3.6 turns so, and 1.8 to 2.2 by bank."""
    g_idx = shuffled_groups(channels, 0)
    assert turns_of_reads(torch.argsort(g_idx, stable=True), warps) > 3
    assert turns_of_reads(channel_order(g_idx), warps) < 2.4


@pytest.mark.parametrize("channels", [1024, 1100])
def test_channels_lie_by_group_and_come_back_where_they_were(channels: int) -> None:
    g_idx = shuffled_groups(channels, 0)
    order = channel_order(g_idx)
    assert torch.equal(order.sort().values, torch.arange(channels))
    assert torch.equal(g_idx[order], torch.arange(channels).int() // GROUP)
    assert torch.equal(channel_order(g_idx.clone()), order), "joined weights of equal groups need equal orders"
    generator = torch.Generator().manual_seed(1)
    weight = QuantizedWeight(
        codes=torch.randint(16, (64, channels), dtype=torch.uint8, generator=generator),
        scales=torch.rand(-(-channels // GROUP), 64, generator=generator),
        zeros=None,
        g_idx=g_idx,
        bits=4,
        group_size=GROUP,
    )
    back = unpack(pack(weight))
    assert back.g_idx is not None and torch.equal(back.g_idx, g_idx)
    assert torch.equal(back.codes, weight.codes) and torch.equal(dequantize(back), dequantize(weight))
