"""What a step sends to the device: where its parts lie, and that nothing in them is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_paged.config import EngineConfig
from hf_paged.model_inputs import InputBuilder, StepPacking, StepShape, StepSizes
from hf_paged.request import Request, ScheduledRequest
from hf_paged.sampling_params import SamplingParams


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("keeps_recent", [False, True])
def test_every_vector_starts_where_kernels_expect_it(num_tokens: int, keeps_recent: bool) -> None:
    """Triton compiles a kernel once more for a pointer that 16 does not divide, while a request waits."""
    packing = StepPacking(
        StepShape(
            num_tokens=num_tokens, num_decodes=0, num_seqs=1, num_logits=1, num_groups=2, table_width=4,
            keeps_recent=keeps_recent,
        )
    )  # fmt: skip
    parts = packing.on_device(torch.zeros(packing.num_bytes, dtype=torch.uint8))
    assert ("recent_mapping" in parts) is keeps_recent
    vectors = [x for part in parts.values() for x in (part if part.dim() > 1 else [part])]
    start = min(x.data_ptr() for x in vectors)
    assert all((x.data_ptr() - start) % 16 == 0 and x.is_contiguous() for x in vectors)


def test_slots_of_large_caches_are_not_cut_to_32_bits() -> None:
    """They would be another request's."""
    config = EngineConfig(max_num_seqs=2, block_size=256)
    builder = InputBuilder(config, num_groups=1, max_model_len=512, device=torch.device("cpu"))
    request = Request("a", list(range(300)), SamplingParams())
    request.row, request.block_tables = 1, [[7, 1 << 24]]
    scheduled = [ScheduledRequest(request, 2, 255, False)]
    sizes = StepSizes.of(scheduled)
    packing = StepPacking(builder.shape_of(sizes, 1))
    parts = packing.on_device(builder.build(scheduled, sizes, np.array([1]), packing))
    assert parts["slot_mapping"].tolist() == [[7 * 256 + 255, 1 << 32]]
    assert parts["block_tables"].tolist() == [[[7, 1 << 24]]]
    assert (parts["positions"].tolist(), parts["input_ids"].tolist()) == ([255, 256], [255, 256])
    assert (parts["token_rows"].tolist(), parts["logits_rows"].tolist()) == ([1, 1], [1])
