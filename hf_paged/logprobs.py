"""Log-probabilities of chosen tokens and of the likeliest ones.

They are the model's own: log-softmax of the logits as the model gave them, before bias, penalties, temperature and
filters, so a number means the same whatever the sampling. (vLLM's `raw_logprobs`, its default.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.outputs import Logprob

CHUNK_ELEMENTS = 1 << 24  # logits held in fp32 at once: 64 MB


@dataclass(frozen=True, kw_only=True)
class LogprobsTensors:
    """For n tokens: the chosen one in column 0, then the k likeliest, likeliest first."""

    token_ids: Tensor  # [n, k + 1] int64
    logprobs: Tensor  # [n, k + 1] fp32
    ranks: Tensor  # [n] int64, of the chosen token; 1 = no token is likelier

    def map(self, function: Callable[[Tensor], Tensor]) -> LogprobsTensors:
        """The same with `function` applied to each tensor, for instance a copy to the host."""
        return LogprobsTensors(**{name: function(tensor) for name, tensor in vars(self).items()})

    def row(
        self, index: int, num_logprobs: int | None = None, decode: Callable[[int], str] | None = None
    ) -> dict[int, Logprob]:
        """Row `index` of host tensors as `{token id: Logprob}`, the chosen token first.

        Args:
            num_logprobs: alternatives wanted, where the batch computed more; None = all.
            decode: the text of one token.
        """
        end = None if num_logprobs is None else num_logprobs + 1
        token_ids = self.token_ids[index, :end].tolist()
        values = self.logprobs[index, :end].tolist()
        ranks = [int(self.ranks[index]), *range(1, len(token_ids))]
        entries: dict[int, Logprob] = {}
        for token, value, rank in zip(token_ids, values, ranks, strict=True):
            if token not in entries:  # the chosen token is often among the likeliest
                entries[token] = Logprob(logprob=value, rank=rank, decoded_token=decode(token) if decode else None)
        return entries


def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobsTensors:
    """Log-probabilities of token ids `[n]` int64 and of the k likeliest tokens under logits `[n, V]`, any float dtype.

    Works on a bounded number of rows at a time: beside the logits only that many are ever held in fp32.
    """
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    parts = [_gather(*chunk, k) for chunk in zip(logits.split(rows), token_ids.split(rows), strict=True)]
    if len(parts) == 1:
        return parts[0]
    return LogprobsTensors(
        token_ids=torch.cat([part.token_ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
    )


def _gather(logits: Tensor, token_ids: Tensor, k: int) -> LogprobsTensors:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    top = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    return LogprobsTensors(
        token_ids=torch.cat([token_ids.unsqueeze(-1), top.indices], dim=-1),
        logprobs=torch.cat([chosen, top.values], dim=-1),
        ranks=(logprobs > chosen).sum(-1) + 1,
    )
