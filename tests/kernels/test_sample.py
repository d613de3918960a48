"""The draw without a sort gives the token that the definition gives, on the CPU and in the kernel."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel needs Triton, which exists for Linux only")

from hf_paged.kernels import sample as kernel
from hf_paged.kernels import sample_reference as reference
from hf_paged.kernels.rng import stream_of
from hf_paged.kernels.sample_reference import RowSampling

INF = float("inf")


def make_params(n: int, **values: list[float]) -> RowSampling:
    """Settings of n rows; each list is repeated down the rows."""
    defaults: dict[str, list[float]] = {"temperature": [1.0], "top_p": [1.0], "min_p": [0.0], "top_k": [0]}
    columns = {name: [column[i % len(column)] for i in range(n)] for name, column in (defaults | values).items()}
    return RowSampling(
        temperature=torch.tensor(columns["temperature"], dtype=torch.float32),
        top_p=torch.tensor(columns["top_p"], dtype=torch.float32),
        max_distance=torch.tensor([-math.log(p) if p else INF for p in columns["min_p"]]),
        top_k=torch.tensor(columns["top_k"], dtype=torch.int64),
        stream=torch.tensor([stream_of(i) for i in range(n)]),
    )


def mixed_params(n: int) -> RowSampling:
    """Every combination turns up: the list lengths have no common factor."""
    return make_params(
        n,
        temperature=[0.0, 0.3, 0.8, 1.0, 2.0, 1e6, 1e-4],
        top_p=[1.0, 0.95, 0.5, 0.1, 1e-6],
        min_p=[0.0, 0.05, 0.0],
        top_k=[0, 1, 5, 50, 10**6, 40, 0, 3, 0, 2, 0],
    )


def make_logits(n: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def run_kernel(logits: Tensor, params: RowSampling, positions: Tensor, device: torch.device) -> Tensor:
    """The kernel on permuted rows, so that it must look each row's settings up."""
    n = len(logits)
    row_of = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    place = torch.empty_like(row_of)
    place[row_of] = torch.arange(n)
    on_device = RowSampling(**{name: column[place].to(device) for name, column in vars(params).items()})
    return kernel.sample(logits.to(device), on_device, row_of.to(device), positions.to(device)).cpu()


def kept_by_hand(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters in words, one token at a time, with exact sums of the fp32 weights."""
    distance = torch.tensor([max(logits) - x for x in logits])
    weight = [Fraction(int(w)) for w in reference.weights(distance)]
    kth = sorted(distance.tolist())[min(top_k or len(logits), len(logits)) - 1]
    survivors = [i for i, d in enumerate(distance.tolist()) if d <= kth]
    total = sum(weight[i] for i in survivors)
    p = Fraction(float(torch.tensor(top_p)))
    kept = set()
    for i in survivors:
        nearer = sum(weight[j] for j in survivors if distance[j] < distance[i])
        likely_enough = min_p == 0 or distance[i] <= torch.tensor(-math.log(min_p))
        if likely_enough and (top_p >= 1 or nearer == 0 or nearer < p * total):
            kept.add(i)
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-5])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_the_kept_set_is_what_the_words_say_with_ties_at_every_border(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randint(-4, 5, (20, 12), generator=torch.Generator().manual_seed(top_k)).float() / 2
    params = make_params(20, top_p=[top_p], top_k=[top_k], min_p=[min_p])
    kept = reference.kept_by_sort(reference.distances(logits, params.temperature), params)
    for row, mask in zip(logits.tolist(), kept, strict=True):
        assert set(mask.nonzero().flatten().tolist()) == kept_by_hand(row, top_k, top_p, min_p)


def test_filters_keep_what_the_warpers_of_transformers_keep() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = make_logits(32, 500)
    params = make_params(32, temperature=[0.8], top_k=[60], top_p=[0.9], min_p=[0.02])
    kept = reference.kept_by_sort(reference.distances(logits, params.temperature), params)
    ids = torch.zeros(32, 1, dtype=torch.long)
    warped = logits
    for warper in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(60), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)):
        warped = warper(ids, warped)
    assert torch.equal(kept, warped > -INF)


@pytest.mark.parametrize("vocab_size", [7, 1000, 5000], ids=lambda v: f"vocabulary {v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guess_and_verify_draws_the_token_of_the_definition(vocab_size: int, dtype: torch.dtype) -> None:
    n = 200
    logits = make_logits(n, vocab_size, dtype)  # bf16 brings ties
    params, positions = mixed_params(n), torch.arange(n) % 91
    want = reference.sample_by_sort(logits, params, positions)
    assert torch.equal(reference.sample(logits, params, positions), want)
    assert (want != logits.float().argmax(-1)).float().mean() > 0.1  # the draws are not all the likeliest token


@pytest.mark.parametrize("vocab_size", [7, 5000], ids=lambda v: f"vocabulary {v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_the_token_of_the_definition(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    n = 12 if device.type == "cpu" else 385  # the interpreter is slow
    logits = make_logits(n, vocab_size, dtype)
    params, positions = mixed_params(n), torch.arange(n) * 1000 % 131072
    want = reference.sample_by_sort(logits, params, positions)
    assert torch.equal(run_kernel(logits, params, positions, device), want)


def test_the_kernel_draws_the_noise_of_the_definition_when_nothing_else_decides(device: torch.device) -> None:
    logits = torch.zeros(8, 3000)
    params, positions = make_params(8, temperature=[1e6]), torch.arange(8) * 10**9
    want = reference.scores(torch.zeros(8, 3000), params, positions).argmax(-1)
    assert len(set(want.tolist())) == 8
    assert torch.equal(run_kernel(logits, params, positions, device), want)


@pytest.mark.gpu
def test_the_kernel_draws_the_token_of_the_definition_at_full_size() -> None:
    logits = make_logits(64, 128256, torch.bfloat16)
    params = make_params(64, temperature=[0.8], top_p=[0.95, 0.9, 1.0], top_k=[0, 0, 0, 50])
    positions = torch.arange(64)
    drawn = run_kernel(logits, params, positions, torch.device("cuda"))
    # exp and log of GPU and CPU differ in the last bits: two scores, or a sum and top_p, must agree to 1e-6 for that
    # to show, about one draw in 10^5.
    assert int((drawn != reference.sample_by_sort(logits, params, positions)).sum()) <= 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy on inf - inf, which is then masked
@pytest.mark.parametrize("draw", ["sort", "guess", "kernel"])
def test_rows_with_infinities_and_nan_still_give_a_token_that_may_be_sampled(draw: str, device: torch.device) -> None:
    logits = torch.zeros(5, 50)
    logits[0, :] = -INF
    logits[0, 17] = -5.0  # only one token left
    logits[1, 20] = INF  # certain
    logits[2, 30] = float("nan")  # counts as -inf
    logits[3] = -INF  # nothing left: any token of the row
    logits[4] = float("nan")
    params = make_params(5, temperature=[1.0], top_p=[0.9], top_k=[0])
    positions = torch.arange(5)
    draws = {
        "sort": lambda: reference.sample_by_sort(logits, params, positions),
        "guess": lambda: reference.sample(logits, params, positions),
        "kernel": lambda: run_kernel(logits, params, positions, device),
    }
    token_ids = draws[draw]()
    assert token_ids[0] == 17 and token_ids[1] == 20 and token_ids[2] != 30
    assert ((token_ids >= 0) & (token_ids < 50)).all()


def test_logits_cut_out_of_a_wider_tensor_are_read_at_their_own_stride(device: torch.device) -> None:
    wide = make_logits(4, 90)
    logits, params, positions = wide[:, :70], make_params(4, top_p=[0.8]), torch.arange(4)
    want = reference.sample_by_sort(logits, params, positions)
    assert torch.equal(run_kernel(logits, params, positions, device), want)
    strided = wide.t().contiguous().t()[:, :70]
    assert torch.equal(run_kernel(strided, params, positions, device), want)


def test_draws_follow_the_probabilities_of_the_kept_tokens() -> None:
    n = 20000
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    logits = probs.log().expand(n, -1)
    params = make_params(n, top_p=[0.85])  # keeps 4: the first three hold 0.8
    params = RowSampling(**(vars(params) | {"stream": torch.full((n,), stream_of(0))}))  # one request, n positions
    drawn = torch.bincount(reference.sample(logits, params, torch.arange(n)), minlength=7).double()
    assert drawn[4:].sum() == 0
    expected = n * probs[:4].double() / 0.9
    chi2 = float(((drawn[:4] - expected) ** 2 / expected).sum())
    assert chi2 < 21.1  # 3 degrees of freedom, exceeded once in 10^4
