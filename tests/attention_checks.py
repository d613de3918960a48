"""Run one attention kernel on a case, where kernels run here, and judge its result by the plain-torch definition.

Outputs start as NaN and unused slots hold NaN, so a row not written or a slot wrongly read shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, Shape, definition, to_device, tolerance, with_null_block
from torch import Tensor

from hf_paged.kernels import prefill_workspace
from hf_paged.kernels.decode_attention import decode_attention
from hf_paged.kernels.decode_config import DecodeConfig
from hf_paged.kernels.decode_recent import decode_recent
from hf_paged.kernels.layout import LayerKV, PlainPages
from hf_paged.kernels.prefill_attention import prefill_attention
from hf_paged.kernels.prefill_config import PrefillConfig
from hf_paged.kernels.reference import gather_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_decode(case: Case, config: DecodeConfig | None = None) -> Tensor:
    case = to_device(case, DEVICE)
    out = case.query.new_full((*case.query.shape[:2], case.layer.v.head_dim), float("nan"))
    decode_attention(case.query, case.layer, case.meta, out, **case.options, config=config)
    return out.cpu()


def run_recent(case: Case) -> Tensor:
    """Single queries whose current blocks are kept as they came."""
    case = to_device(case, DEVICE)
    options = {name: value for name, value in case.options.items() if name != "window"}
    out = case.query.new_full((*case.query.shape[:2], case.layer.v.head_dim), float("nan"))
    decode_recent(case.query, case.layer, case.meta, out, **options)
    return out.cpu()


def run_prefill(case: Case, config: PrefillConfig | None = None) -> Tensor:
    case = to_device(case, DEVICE)
    out = case.query.new_full((*case.query.shape[:2], case.layer.v.head_dim), float("nan"))
    prefill_attention(case.query, case.layer, case.meta, out, **case.options, recent=case.recent, config=config)
    return out.cpu()[case.meta.num_decodes :]


def check(result: Tensor, want: Tensor, shape: Shape) -> None:
    """Error against the format's step, and scale: a lost factor passes no tolerance by luck."""
    result, want = result.cpu(), want.cpu()
    torch.testing.assert_close(result.float(), want.float(), rtol=0, atol=tolerance(shape))
    assert result.float().norm() == pytest.approx(want.float().norm(), rel=2**-6)


def definition_of_mixed(case: Case) -> Tensor:
    """The definition, with keys and values rounded to the query's dtype where a workspace holds them: for prompts."""
    want = definition(case)
    if prefill_workspace.wanted(case.query, case.layer, case.meta):
        on_cpu = with_null_block(to_device(case, "cpu"))
        blocks = torch.arange(on_cpu.layer.k.tensor.shape[0])[:, None]
        values = [
            PlainPages(data=gather_pages(pages, blocks, torch.float32).to(case.query.dtype))
            for pages in (on_cpu.layer.k, on_cpu.layer.v)
        ]
        layer = LayerKV(k=values[0], v=values[1], recent=on_cpu.layer.recent)
        rounded = definition(replace(on_cpu, layer=layer))
        want[case.meta.num_decodes :] = rounded[case.meta.num_decodes :]
    return want
