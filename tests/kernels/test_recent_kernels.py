"""Attention that reads a query's own block as it came: the definition against fp64, the kernels against the definition.

Slots hold NaN where no token is, so a kernel that reads past a half-filled block, or codes of it, shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import Case, Shape, definition, dense_attention, make_case, tolerance, with_null_block

from hf_paged.kernels import prefill_workspace, reference, reference_fused
from hf_paged.kernels.layout import UINT4, LayerKV, PlainPages, RecentRows
from hf_paged.kernels.reference_fused import Rope

DECODES = {"q_lens": (1, 1, 1, 1, 1, 1), "seq_lens": (1, 0, 16, 17, 32, 75)}  # at, after and inside blocks of 16
PROMPTS = {"q_lens": (1, 1, 37, 3, 2, 32, 16), "seq_lens": (5, 33, 37, 51, 50, 64, 16)}
INT4 = {"dtype": torch.float16, "k_format": UINT4}
FEATURES = {
    "fp32 queries on int4": Shape(k_format=UINT4, group=2),
    "fp32 queries on int8": Shape(k_format=torch.int8, group=4, block_size=32),
    "int4": Shape(**INT4, group=4),
    "head_dim below a tensor core's": Shape(dtype=torch.float16, k_format=torch.int8, head_dim=8, group=2),
    "int4 of one head each": Shape(**INT4, head_dim=128, block_size=32),
    "int8 keys, int4 values": Shape(dtype=torch.float16, k_format=torch.int8, v_format=UINT4, group=3),
    "fp8 keys, plain values": Shape(dtype=torch.float16, k_format=torch.float8_e4m3fn, v_format=torch.float16),
    "odd head_dims, softcap and sinks": Shape(**INT4, head_dim=80, v_head_dim=96, group=2, softcap=20.0, sinks=True),
    "sinks of each row": Shape(**INT4, row_sinks=True, group=7, block_size=64),
}


def aligned(shape: Shape, lengths: dict[str, Any]) -> Shape:
    """The shape with `lengths`, chunks moved to where its blocks begin."""
    seq_lens = tuple(
        s if q == 1 else (s - q) // shape.block_size * shape.block_size + q
        for s, q in zip(lengths["seq_lens"], lengths["q_lens"], strict=True)
    )
    return replace(shape, recent=True, q_lens=lengths["q_lens"], seq_lens=seq_lens)


@pytest.mark.parametrize("lengths", [DECODES, PROMPTS], ids=["decodes", "prompts"])
@pytest.mark.parametrize("name", FEATURES)
def test_the_definition_reads_own_blocks_as_they_came_and_all_before_as_codes(
    name: str, lengths: dict[str, Any]
) -> None:
    shape = aligned(replace(FEATURES[name], dtype=torch.float32), lengths)
    case = with_null_block(make_case(shape))
    torch.testing.assert_close(definition(case).double(), dense_attention(case), rtol=0, atol=tolerance(shape))


def test_the_definition_groups_rows_by_length_and_gives_each_its_own_block() -> None:
    """Rows are sorted by length before they are computed: a slot taken in the old order is another sequence's."""
    shape = Shape(k_format=UINT4, recent=True, q_lens=(1,) * 9, seq_lens=(3, 90, 5, 200, 17, 0, 160, 33, 150))
    case = with_null_block(make_case(shape))
    torch.testing.assert_close(definition(case).double(), dense_attention(case), rtol=0, atol=tolerance(shape))


@pytest.mark.parametrize("name", FEATURES)
def test_decode_joins_codes_and_the_own_block(name: str) -> None:
    checks = pytest.importorskip("attention_checks", reason="Triton exists on Linux only")
    shape = aligned(FEATURES[name], DECODES)
    case = make_case(shape)
    checks.check(checks.run_recent(case), definition(case), shape)


@pytest.mark.parametrize("name", FEATURES)
def test_prompts_meet_codes_before_their_blocks_and_their_own_keys_in_them(name: str) -> None:
    checks = pytest.importorskip("attention_checks", reason="Triton exists on Linux only")
    from hf_paged.kernels.prefill_config import PrefillConfig

    shape = aligned(FEATURES[name], PROMPTS)
    case = make_case(shape)
    config = PrefillConfig(rows=32, tile=32, num_warps=4, num_stages=2)
    checks.check(checks.run_prefill(case, config), definition(case)[case.meta.num_decodes :], shape)


def test_prompts_through_a_workspace_meet_their_own_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV heads go by turns: each turn must find its own heads of the step's keys."""
    checks = pytest.importorskip("attention_checks", reason="Triton exists on Linux only")
    lengths = {"q_lens": (1, 1, 130, 3), "seq_lens": (5, 9, 162, 51)}
    shape = aligned(Shape(**INT4, kv_heads=4, group=2, device=checks.DEVICE), lengths)
    case = make_case(shape)
    monkeypatch.setattr(prefill_workspace, "WORKSPACE_BYTES", 3 * 2 * 176 * 2 * (64 + 64))
    assert prefill_workspace.wanted(case.query, case.layer, case.meta)
    want = checks.definition_of_mixed(case)[case.meta.num_decodes :]
    checks.check(checks.run_prefill(case), want, shape)


def written(case: Case, launch: Any, rope: Rope) -> tuple[RecentRows, LayerKV]:
    """What a fused write of random rows leaves as the step's own and in the slots."""
    recent = case.layer.recent
    assert recent is not None and case.recent is not None
    generator = torch.Generator().manual_seed(3)
    device, dtype = recent.k.tensor.device, recent.k.tensor.dtype
    tokens, kv_heads, head_dim = case.recent.key.shape
    shapes = ((tokens, 2 * kv_heads, head_dim), (tokens, kv_heads, head_dim), case.recent.value.shape)
    rows = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    angles = [torch.randn(tokens, head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    own = RecentRows(
        key=torch.full_like(case.recent.key, float("nan")), value=torch.full_like(case.recent.value, float("nan")),
        slot_mapping=case.recent.slot_mapping,
    )  # fmt: skip
    blank = [PlainPages(data=torch.full_like(pages.tensor, 7.0)) for pages in (recent.k, recent.v)]
    layer = replace(case.layer, recent=LayerKV(k=blank[0], v=blank[1]))
    launch(*rows, *angles, layer, case.meta.slot_mapping, rope=rope, recent=own)
    return own, LayerKV(k=blank[0], v=blank[1])


@pytest.mark.parametrize("shape", [Shape(**INT4), Shape(**INT4, head_dim=80, v_head_dim=96, kv_heads=3)], ids=str)
def test_the_fused_write_keeps_the_rows_that_it_quantizes(shape: Shape) -> None:
    """Of current blocks in their slots, of all tokens for the prompts of the step; padding is kept nowhere."""
    checks = pytest.importorskip("attention_checks", reason="Triton exists on Linux only")
    from hf_paged.kernels.rope_write import rope_write

    case = make_case(aligned(replace(shape, device=checks.DEVICE), PROMPTS))
    results = [written(case, launch, Rope(rotary_dim=16)) for launch in (rope_write, reference_fused.rope_write)]
    for mine, other in zip(
        (results[0][0].key, results[0][0].value, results[0][1].k.tensor, results[0][1].v.tensor),
        (results[1][0].key, results[1][0].value, results[1][1].k.tensor, results[1][1].v.tensor),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=2**-10, atol=2**-12)  # rounded once from fp32, either way
    assert (results[0][1].k.tensor[0] == 7.0).all(), "slot 0 is nobody's"


def test_the_plain_write_goes_through_the_same_slots() -> None:
    case = with_null_block(make_case(aligned(Shape(k_format=UINT4), PROMPTS)))
    recent = case.layer.recent
    assert recent is not None and case.recent is not None
    before = recent.k.tensor.clone()
    reference.write_kv(recent, case.recent.key, case.recent.value, case.recent.slot_mapping)
    assert torch.equal(recent.k.tensor.nan_to_num(), before.nan_to_num())
