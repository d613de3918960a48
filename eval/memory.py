"""How much of a KV cache is allocated but unused: paged blocks beside a dense cache padded to its longest row.

Nothing is estimated: requests go through the engine's own scheduler and block pool, and the blocks that they hold are
counted at every step. No model and no torch: waste is a matter of tokens, not of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_paged.config import EngineConfig, KVGroup
from hf_paged.request import Request
from hf_paged.sampling_params import SamplingParams
from hf_paged.scheduler import Scheduler

BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Token slots of one cache, allocated and thereof unused: when it is fullest, and summed over every step."""

    cache: str
    peak_slots: int
    peak_unused: int
    run_slots: int
    run_unused: int

    @property
    def peak_share(self) -> float:
        return self.peak_unused / self.peak_slots

    @property
    def run_share(self) -> float:
        return self.run_unused / self.run_slots

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak_share": round(self.peak_share, 5), "run_share": round(self.run_share, 5)}


def paged_waste(prompt_lens: Sequence[int], new_tokens: int, block_size: int) -> Waste:
    """Run the batch through the scheduler; unused slots are those of held blocks that no computed token fills."""
    longest = max(prompt_lens) + new_tokens
    blocks = sum(-(-(length + new_tokens) // block_size) for length in prompt_lens) + 1
    config = EngineConfig(block_size=block_size, max_num_seqs=len(prompt_lens), max_model_len=longest)
    scheduler = Scheduler(config, [KVGroup(window=None)], blocks)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for i, length in enumerate(prompt_lens):
        scheduler.add(Request(f"{i}", [i] * length, params))
    counts: list[tuple[int, int]] = []
    while (plan := scheduler.schedule()) is not None:
        held = sum(len(table) for request in scheduler.running for table in request.block_tables)
        used = sum(request.num_computed_tokens for request in scheduler.running)
        counts.append((held * block_size, held * block_size - used))
        scheduler.update(plan, [0 if item.samples else None for item in plan.scheduled])
    return _waste(f"paged, block size {block_size}", counts)


def dense_waste(prompt_lens: Sequence[int], new_tokens: int) -> Waste:
    """A static batch: every row is as long as the longest prompt, and grows with it."""
    rows, longest, used = len(prompt_lens), max(prompt_lens), sum(prompt_lens)
    return _waste("dense, padded", [(rows * (longest + t), rows * longest - used) for t in range(new_tokens)])


def _waste(cache: str, counts: list[tuple[int, int]]) -> Waste:
    """From (slots, thereof unused) of every step."""
    peak_slots, peak_unused = max(counts)
    return Waste(
        cache=cache,
        peak_slots=peak_slots,
        peak_unused=peak_unused,
        run_slots=sum(slots for slots, _ in counts),
        run_unused=sum(unused for _, unused in counts),
    )
