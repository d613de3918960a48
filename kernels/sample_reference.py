"""Which tokens may be sampled, and which one is: the definition, and the same without a sort for CPUs.

Everything is said with distances: `d = (max logit - logit) / temperature`, so the likeliest token has distance 0 and a
token's weight is exp(-d). Every filter then keeps the tokens up to some distance:

- top-k: up to the k-th smallest distance;
- top-p: of the tokens that top-k kept, those whose *strictly nearer* tokens hold less than top_p of the weight;
- min-p: up to -log(min_p), that is exp(-d) >= min_p.

So equal logits are kept or dropped together, and the nearest token is always kept. Weights are summed as integers
(multiples of 2^-40): a sum has one value whatever its order, so the kept set is the same for a sort, a scan or a tile.
The sample is the kept token with the largest `gumbel noise - d`, the lowest id on a tie; that has the probabilities of
the kept, renormalized weights. Temperature 0 means no noise.

A NaN logit counts as -inf. In a row with nothing above -inf all tokens are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.kernels.rng import gumbel, keys, random_bits

CACHED_ELEMENTS = 1 << 16  # 256 KB in fp32
WEIGHT_ONE = 2.0**40  # weight of distance 0; 2^18 tokens of it sum to 2^58


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """How each row samples. A row is a place in these tensors that a request holds while it runs."""

    temperature: Tensor  # [rows] fp32, 0 = greedy
    top_p: Tensor  # [rows] fp32, in (0, 1]; 1 = off
    max_distance: Tensor  # [rows] fp32, -log(min_p); inf = off
    top_k: Tensor  # [rows] int64, 0 = off
    stream: Tensor  # [rows] int64, `rng.stream_of` the seed

    def select(self, rows: Tensor) -> RowSampling:
        """The settings of rows `[n]` int64, in that order."""
        return RowSampling(**{name: column[rows] for name, column in vars(self).items()})


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest tokens `[n]` int64 of logits `[n, V]`, the lowest id on a tie. NaN counts as -inf."""
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # on a CPU `max` is 4 times as fast as `argmax` on 16-bit rows
    return logits.argmax(-1) if logits.is_cuda else logits.max(-1).indices


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """Distances `[n, V]` fp32, at least 0, of logits `[n, V]`; temperature `[n]`, where 0 counts as 1."""
    logits = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    nearest = logits.amax(-1, keepdim=True)
    distance = (nearest - logits) * torch.where(temperature > 0, temperature, 1.0).reciprocal().unsqueeze(-1)
    return torch.where(logits == nearest, 0.0, distance)


def weights(distance: Tensor) -> Tensor:
    """Weights exp(-d) as int64 multiples of 2^-40."""
    return (torch.exp(-distance) * WEIGHT_ONE).to(torch.int64)


def kept_by_sort(distance: Tensor, params: RowSampling) -> Tensor:
    """The definition: which tokens `[n, V]` bool may be sampled, for distances `[n, V]` and params of n rows."""
    vocab_size = distance.shape[-1]
    ordered = distance.sort(dim=-1).values
    k = torch.where(params.top_k > 0, params.top_k, vocab_size).clamp(max=vocab_size)
    kth = ordered.gather(-1, k.unsqueeze(-1) - 1)
    weight = weights(ordered).where(ordered <= kth, 0)
    nearer = weight.cumsum(-1) - weight  # within a tie only its first token decides, and it comes first
    inside = nearer < _target(weight.sum(-1), params.top_p)
    inside[:, 0] = True
    nucleus = ordered.where(inside, 0.0).amax(-1, keepdim=True)
    reach = torch.minimum(kth, params.max_distance.unsqueeze(-1))
    return (distance <= reach) & ((distance <= nucleus) | (params.top_p >= 1).unsqueeze(-1))


def _target(total: Tensor, top_p: Tensor) -> Tensor:
    return (total.double() * top_p.double()).unsqueeze(-1)


def scores(distance: Tensor, params: RowSampling, positions: Tensor) -> Tensor:
    """What the sample maximizes, `[n, V]` fp32: noise of rows at positions `[n]` int64, minus distance."""
    noise = gumbel(random_bits(keys(params.stream, positions), distance.shape[-1]))
    return torch.where((params.temperature > 0).unsqueeze(-1), noise, 0.0) - distance


def sample_by_sort(logits: Tensor, params: RowSampling, positions: Tensor) -> Tensor:
    """The definition of a sample: token ids `[n]` int64 of logits `[n, V]`, params of n rows, positions `[n]` int64."""
    distance = distances(logits, params.temperature)
    kept = kept_by_sort(distance, params)
    return scores(distance, params, positions).where(kept, -torch.inf).argmax(-1)


def sample(logits: Tensor, params: RowSampling, positions: Tensor) -> Tensor:
    """`sample_by_sort` without the sort: guess, then verify. Synchronizes, so for CPU tensors.

    The best of *all* tokens is the best of the kept ones if it is kept, and whether it is takes one sum over the
    nearer tokens. If it is not, no token as far away is kept either: drop them and guess again. With top_p = 0.95 the
    first guess stands 19 times in 20. Large vocabularies go row by row, so that a row stays in the CPU's cache.
    """
    chunk = max(1, CACHED_ELEMENTS // logits.shape[-1])
    if len(logits) > chunk:
        parts = torch.arange(len(logits), device=logits.device).split(chunk)
        return torch.cat([sample(logits[part], params.select(part), positions[part]) for part in parts])
    distance = distances(logits, params.temperature)
    reach = torch.minimum(params.max_distance, _kth_distance(distance, params.top_k)).unsqueeze(-1)
    score = scores(distance, params, positions).where(distance <= reach, -torch.inf)
    guess = score.argmax(-1, keepdim=True)
    if bool((params.top_p >= 1).all()):
        return guess.squeeze(-1)
    weight = weights(distance).where(distance <= _kth_distance(distance, params.top_k).unsqueeze(-1), 0)
    target = _target(weight.sum(-1), params.top_p)
    while True:
        guessed = distance.gather(-1, guess)
        nearer = weight.where(distance < guessed, 0).sum(-1, keepdim=True)
        dropped = (nearer >= target) & (nearer > 0) & (params.top_p < 1).unsqueeze(-1)
        if not bool(dropped.any()):
            return guess.squeeze(-1)
        score = score.masked_fill(dropped & (distance >= guessed), -torch.inf)
        guess = score.argmax(-1, keepdim=True)


def _kth_distance(distance: Tensor, top_k: Tensor) -> Tensor:
    """The k-th smallest distance `[n]` of each row; inf where top_k is 0."""
    k = int(top_k.clamp(max=distance.shape[-1]).max())
    if k == 0:
        return torch.full_like(distance[:, 0], torch.inf)
    nearest = distance.topk(k, dim=-1, largest=False).values
    kth = nearest.gather(-1, (top_k.clamp(1, k) - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(top_k > 0, kth, torch.inf)
