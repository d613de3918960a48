"""From logits to token ids, on the device: nothing here waits for the device or has a shape that depends on its data.

Order of work, as in vLLM and Transformers: logit bias and min_tokens, repetition penalty (prompt and output), presence
and frequency penalty (output), temperature, top-k, top-p, min-p. Temperature 0 takes the argmax after the penalties,
the lowest id on a tie. `sample_reference.py` defines the filters and the draw; log-probabilities are of the untouched
logits.

A request's tokens depend on its logits, seed and positions only, not on the batch around it. A NaN logit counts as
-inf, greedily as well; whether there was one is not reported, which would take one more pass and, on a GPU, a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.kernels import sample_reference
from hf_paged.logprobs import CHUNK_ELEMENTS, LogprobsTensors, gather_logprobs
from hf_paged.request import Request
from hf_paged.sampling_state import SamplingNeeds, SamplingState


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """What was sampled, on the device."""

    token_ids: Tensor  # [n] int64
    logprobs: LogprobsTensors | None


class Sampler:
    """Samples one token for each row of logits.

    Args:
        max_num_seqs: number of rows a request can hold.
        vocab_size: width of the logits.
        eos_token_ids: held back by `min_tokens` unless the request ignores them.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, *, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.state = SamplingState(max_num_seqs, vocab_size, device, eos_token_ids)

    def admit(self, request: Request, seed: int) -> None:
        """A request takes its row, `request.row`. Every token it sampled before must be known to the host."""
        assert request.row is not None
        self.state.set_row(request.row, request.params, request.prompt_token_ids, request.output_token_ids, seed)

    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        requests: Sequence[Request],
        greedy: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample for these requests.

        Args:
            logits: `[n, vocab]`, any float dtype; not changed.
            rows: `[n]` int64 on the device, the requests' rows.
            positions: `[n]` int64 on the device, the index of the sampled token in its sequence.
            requests: the n requests, for the host to know what work they need.
            greedy: `[n]` int64, the argmax of `logits` where it is known already.
        """
        batch = [request.row for request in requests if request.row is not None]
        self.state.flush(batch)
        needs = self.state.needs(batch)
        return self.sample(logits, rows, positions, needs, greedy)

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds, greedy: Tensor | None = None
    ) -> SamplerOutput:
        """The device's part: only launches, so it may be captured in a graph that serves batches with equal `needs`."""
        processed = self._process(logits, rows, positions, needs) if needs.edits or needs.penalties else logits
        if needs.random:
            token_ids = _sample(processed, self.state.sampling, rows, positions)
        elif greedy is not None and processed is logits:
            token_ids = greedy
        else:
            token_ids = sample_reference.likeliest(processed)
        if needs.penalties:
            self.state.count(rows, token_ids)
        if needs.num_logprobs is None:
            return SamplerOutput(token_ids=token_ids, logprobs=None)
        return SamplerOutput(token_ids=token_ids, logprobs=gather_logprobs(logits, token_ids, needs.num_logprobs))

    def _process(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        """An fp32 copy of the logits with edits and penalties."""
        processed = logits.to(torch.float32, copy=True)
        if needs.edits:
            _apply_edits(processed, rows, positions, self.state)
        if needs.penalties:
            chunk = max(1, CHUNK_ELEMENTS // logits.shape[-1])  # bounds the scratch memory
            for part, part_rows in zip(processed.split(chunk), rows.split(chunk), strict=True):
                _apply_penalties(part, part_rows, self.state)
        return processed


def _sample(logits: Tensor, params: sample_reference.RowSampling, rows: Tensor, positions: Tensor) -> Tensor:
    if logits.is_cuda:
        from hf_paged.kernels.sample import sample  # Triton is not everywhere a CPU is

        return sample(logits, params, rows, positions)
    return sample_reference.sample(logits, params.select(rows), positions)


def _apply_edits(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> None:
    assert state.edits is not None
    active = positions.unsqueeze(-1) < state.edits.until[rows]
    logits.scatter_add_(1, state.edits.token_ids[rows], torch.where(active, state.edits.values[rows], 0.0))


def _apply_penalties(logits: Tensor, rows: Tensor, state: SamplingState) -> None:
    assert state.counts is not None
    count = state.counts.output[rows]
    repetition = state.repetition_penalty[rows].unsqueeze(-1)
    seen = state.counts.in_prompt[rows] | (count > 0)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, scaled, logits))
    logits -= state.frequency_penalty[rows].unsqueeze(-1) * count
    logits -= state.presence_penalty[rows].unsqueeze(-1) * (count > 0)
