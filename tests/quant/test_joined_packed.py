"""Packed linears of one input as one: the same product, from the same storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_paged.joined_linear import join_parameters
from hf_paged.quant.joined_packed import JoinedPackedLinear, obstacle
from hf_paged.quant.layout import Layout
from hf_paged.quant.linear import CPUWeights, PackedLinear
from hf_paged.quant.weight import QuantizedWeight

IN, GROUP = 128, 32


def linear(
    out: int, seed: int, *, bits: int = 4, zeros: bool = True, order: Tensor | None = None, bias: bool = False
) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(
        kind="gptq", in_features=IN, out_features=out, bits=bits, group_size=GROUP, zero_offset=1, tensors={}
    )
    module = PackedLinear(layout, bias=bias, dtype=torch.float32, scales_dtype=torch.float32)
    groups = IN // GROUP
    weight = QuantizedWeight(
        codes=torch.randint(2**bits, (out, IN), generator=generator, dtype=torch.uint8),
        scales=torch.rand(groups, out, generator=generator) + 0.1,
        zeros=torch.randint(2**bits, (groups, out), generator=generator, dtype=torch.uint8) if zeros else None,
        g_idx=order,
        bits=bits,
        group_size=GROUP,
    )
    module.load(weight)
    if bias:
        module.bias.data = torch.randn(out, generator=generator)
    return module


def act_order(seed: int) -> Tensor:
    return (torch.arange(IN) // GROUP)[torch.randperm(IN, generator=torch.Generator().manual_seed(seed))].int()


@pytest.mark.parametrize(
    "options",
    [({}, {}), ({"zeros": False}, {"zeros": False}), ({}, {"zeros": False}), ({"bits": 8}, {"bits": 8}),
     ({"bias": True}, {"bias": True}), ({"order": act_order(0)}, {"order": act_order(0)})],
    ids=["zeros", "symmetric", "mixed", "8 bits", "bias", "act-order"],
)  # fmt: skip
def test_the_joined_product_is_the_products_side_by_side(options: tuple[dict[str, object], dict[str, object]]) -> None:
    linears = [linear(128, 1, **options[0]), linear(64, 2, **options[1]), linear(40, 3, **options[1])]  # type: ignore[arg-type]  # mixed values
    x = torch.randn(1, 3, IN, generator=torch.Generator().manual_seed(9))
    expected = [module(x) for module in linears]
    assert obstacle(linears) is None
    joined = JoinedPackedLinear(linears, join_parameters)
    for part, whole in zip(joined(x), expected, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-4)
    for module, whole in zip(linears, expected, strict=True):  # the originals go on, from rows of the joined codes
        module.on_cpu = CPUWeights()
        assert torch.equal(module(x), whole)
    addresses = [module.packed.data_ptr() for module in linears]
    assert addresses[1] - addresses[0] == linears[0].packed.numel() * 4
    JoinedPackedLinear(linears, join_parameters)
    assert [module.packed.data_ptr() for module in linears] == addresses


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"bits": 8}, "bits or group size"),
        ({"order": act_order(1)}, "act-order"),
        ({"bias": True}, "presence of a bias"),
    ],
)
def test_weights_of_different_form_are_not_joined(second: dict[str, object], reason: str) -> None:
    why = obstacle([linear(64, 1), linear(64, 2, **second)])  # type: ignore[arg-type]  # mixed values
    assert why is not None and reason in why


def test_rows_that_end_inside_a_tile_are_not_joined() -> None:
    why = obstacle([linear(40, 1), linear(64, 2)])
    assert why is not None and "multiple of 64" in why
