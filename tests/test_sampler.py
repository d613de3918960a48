"""A request's tokens are its own: whatever the batch, the row, the step at which it came, or a preemption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged import logprobs as logprobs_module
from hf_paged import sampling_state as state_module
from hf_paged.logprobs import gather_logprobs
from hf_paged.request import Request
from hf_paged.sampler import Sampler
from hf_paged.sampling_params import SamplingParams
from hf_paged.sampling_state import SamplingNeeds

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)


def make_logits(n: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed))


def make_request(params: SamplingParams, row: int, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    request = Request(f"r{row}", list(prompt), params)
    request.row = row
    return request


def step(sampler: Sampler, logits: Tensor, requests: list[Request]) -> list[int]:
    """Sample for the requests and let them take their tokens."""
    device = sampler.state.sampling.stream.device
    rows = torch.tensor([request.row for request in requests], device=device)
    positions = torch.tensor([request.num_tokens for request in requests], device=device)
    tokens: list[int] = sampler(logits.to(device), rows, positions, requests).token_ids.tolist()
    for request, token in zip(requests, tokens, strict=True):
        request.append(token)
    return tokens


def sample_once(params: SamplingParams, logits: Tensor, device: torch.device, **options: Any) -> int:
    sampler = Sampler(2, VOCAB, device, **options)
    request = make_request(params, row=1)
    sampler.admit(request, seed=0)
    return step(sampler, logits, [request])[0]


def test_a_greedy_batch_asks_for_an_argmax_and_allocates_no_table(device: torch.device) -> None:
    sampler = Sampler(4, VOCAB, device)
    requests = [make_request(GREEDY, row) for row in range(4)]
    for request in requests:
        sampler.admit(request, seed=0)
    logits = make_logits(4)
    assert sampler.state.needs(range(4)) == SamplingNeeds()
    assert step(sampler, logits, requests) == logits.argmax(-1).tolist()
    assert sampler.state.edits is None and sampler.state.counts is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_ties_go_to_the_lowest_id_alone_and_beside_sampled_rows(
    device: torch.device, dtype: torch.dtype
) -> None:
    logits = torch.zeros(2, VOCAB, dtype=dtype)
    logits[:, [7, 21, 30]] = 5.0
    assert sample_once(GREEDY, logits[:1], device) == 7
    sampler = Sampler(2, VOCAB, device)
    requests = [make_request(GREEDY, 0), make_request(SamplingParams(temperature=1.0), 1)]
    for request in requests:
        sampler.admit(request, seed=0)
    assert step(sampler, logits, requests)[0] == 7


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-320])
def test_a_tiny_temperature_is_greedy_and_no_division_overflows(temperature: float, device: torch.device) -> None:
    logits = make_logits(1) * 100
    assert sample_once(SamplingParams(temperature=temperature, top_p=0.9), logits, device) == int(logits.argmax())


def test_the_batch_around_a_request_its_row_and_its_place_never_change_its_tokens(device: torch.device) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, max_tokens=None)
    other = SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias={3: 2.0}, logprobs=2)
    logits = [make_logits(1, seed) for seed in range(12)]

    def alone() -> list[int]:
        sampler, request = Sampler(8, VOCAB, device), make_request(params, row=0)
        sampler.admit(request, seed=5)
        return [step(sampler, x, [request])[0] for x in logits]

    def in_company() -> list[int]:
        sampler = Sampler(8, VOCAB, device)
        requests = [make_request(other if row % 2 else GREEDY, row) for row in range(5)] + [make_request(params, 6)]
        for request in requests:
            sampler.admit(request, seed=5 if request.row == 6 else 77)
        for i, x in enumerate(logits):
            batch = requests[i % 4 :]
            noise = [make_logits(1, 100 * i + j) for j in range(len(batch) - 1)]
            step(sampler, torch.cat([*noise, x]), batch)
        return requests[-1].output_token_ids

    assert alone() == in_company()
    assert len(set(alone())) > 4


def test_a_request_that_was_preempted_goes_on_as_if_nothing_had_happened(device: torch.device) -> None:
    params = SamplingParams(
        temperature=1.2, frequency_penalty=0.5, repetition_penalty=1.3, min_tokens=6, stop_token_ids=(4,)
    )
    logits = [make_logits(1, seed) for seed in range(10)]

    def run(preempt_at: int | None) -> list[int]:
        sampler, request = Sampler(4, VOCAB, device), make_request(params, row=0)
        sampler.admit(request, seed=9)
        for i, x in enumerate(logits):
            if i == preempt_at:
                intruder = make_request(SamplingParams(presence_penalty=2.0, logit_bias={5: 9.0}), row=0)
                sampler.admit(intruder, seed=1)
                step(sampler, make_logits(1, 99), [intruder])
                request.row = 3
                sampler.admit(request, seed=9)
            step(sampler, x, [request])
        return request.output_token_ids

    assert run(preempt_at=None) == run(preempt_at=5)


def test_seeds_and_positions_change_the_draw(device: torch.device) -> None:
    sampler = Sampler(50, VOCAB, device)
    requests = [make_request(SamplingParams(temperature=5.0), row) for row in range(50)]
    for seed, request in enumerate(requests):
        sampler.admit(request, seed=seed)
    logits = make_logits(1).expand(50, -1)
    first, second = step(sampler, logits, requests), step(sampler, logits, requests)
    assert len(set(first)) > 10
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 25


def test_a_row_inherits_nothing_from_the_request_before(device: torch.device) -> None:
    sampler = Sampler(1, VOCAB, device)
    heavy = make_request(
        SamplingParams(temperature=1.0, presence_penalty=2.0, logit_bias=dict.fromkeys(range(30), -50.0), logprobs=3),
        row=0,
    )
    sampler.admit(heavy, seed=0)
    step(sampler, make_logits(1), [heavy])
    penalized = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    for params, expected in ((GREEDY, SamplingNeeds()), (penalized, SamplingNeeds(penalties=True))):
        request = make_request(params, row=0, prompt=[39])
        sampler.admit(request, seed=0)
        assert sampler.state.needs([0]) == expected
        logits = make_logits(1, seed=4).abs()
        logits[:, 39] = 0
        assert step(sampler, logits, [request])[0] == int(logits.argmax())


def test_penalties_are_those_of_their_formulas_and_see_tokens_the_host_does_not_know(device: torch.device) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    sampler, request = Sampler(2, VOCAB, device), make_request(params, row=1, prompt=[5, 5, 6])
    sampler.admit(request, seed=0)
    ids = list(request.prompt_token_ids)
    for i in range(15):
        logits = make_logits(1, seed=i % 3)  # the same few winners, so that counts pass 1
        want = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([ids]), logits.clone())[0]
        for token in set(ids[3:]):
            want[token] -= 0.3 + 0.2 * ids[3:].count(token)
        [token] = step(sampler, logits, [request])  # set once: later counts come from the device alone
        assert token == int(want.argmax())
        ids.append(token)
    assert len(set(ids[3:])) < 15


def test_a_logit_bias_decides_and_a_longer_one_finds_room(device: torch.device) -> None:
    sampler = Sampler(3, VOCAB, device)
    short = make_request(SamplingParams(temperature=0.0, logit_bias={11: 100.0}), row=0)
    sampler.admit(short, seed=0)
    assert step(sampler, make_logits(1), [short]) == [11]
    long = make_request(SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(VOCAB - 1), -100.0)), row=2)
    sampler.admit(long, seed=0)
    assert step(sampler, make_logits(2), [short, long]) == [11, VOCAB - 1]


def test_a_logit_bias_outside_the_vocabulary_is_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"logit_bias names token {VOCAB}; the vocabulary is 0..{VOCAB - 1}"):
        Sampler(1, VOCAB, device).state.check(SamplingParams(logit_bias={VOCAB: 1.0}))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_stop_tokens_back_until_then_and_no_longer(ignore_eos: bool, device: torch.device) -> None:
    eos, stop, plain = 9, 10, 11
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(stop, VOCAB + 7), ignore_eos=ignore_eos)
    sampler, request = Sampler(1, VOCAB, device, eos_token_ids=[eos]), make_request(params, row=0)
    sampler.admit(request, seed=0)
    logits = torch.zeros(1, VOCAB)
    logits[0, eos], logits[0, stop], logits[0, plain] = 9.0, 8.0, 7.0
    held = eos if ignore_eos else plain  # an eos that ends nothing needs no holding back
    assert [step(sampler, logits, [request])[0] for _ in range(4)] == [held, held, eos, eos]


def test_top_k_top_p_and_min_p_reach_the_draw(device: torch.device) -> None:
    logits = torch.linspace(5, 0, VOCAB).unsqueeze(0)
    for params, kept in (
        (SamplingParams(temperature=50.0, top_k=3), 3),
        (SamplingParams(temperature=50.0, min_p=math.exp(-0.01)), 4),  # 0.01 of distance / (5 / 39 / 50) a token
        (SamplingParams(temperature=1e3, top_p=0.1), 4),  # nearly uniform: 3 tokens hold less than a tenth, 4 do not
    ):
        sampler, request = Sampler(1, VOCAB, device), make_request(params, row=0)
        sampler.admit(request, seed=0)
        drawn = {step(sampler, logits, [request])[0] for _ in range(100)}
        assert drawn == set(range(kept))


def test_logprobs_are_of_the_models_own_logits_with_ranks(device: torch.device) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={20: 100.0}, logprobs=2)
    sampler, request = Sampler(1, VOCAB, device), make_request(params, row=0)
    sampler.admit(request, seed=0)
    logits = make_logits(1).to(device)
    at = torch.zeros(1, dtype=torch.int64, device=device)
    output = sampler(logits, at, at + 3, [request])
    assert output.logprobs is not None
    row = output.logprobs.map(Tensor.cpu).row(0, decode=str)
    expected = torch.log_softmax(logits[0], -1).cpu()
    order = expected.argsort(descending=True).tolist()
    assert list(row) == [20, *order[:2]]
    assert row[20].rank == order.index(20) + 1 > 2 and row[order[1]].rank == 2
    for token, entry in row.items():
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)  # fp32 log-softmax of 40 values
        assert entry.decoded_token == str(token)


def test_a_batch_computes_the_most_alternatives_and_a_row_takes_its_own(device: torch.device) -> None:
    sampler = Sampler(3, VOCAB, device)
    for row, k in enumerate((None, 1, 5)):
        sampler.admit(make_request(SamplingParams(temperature=0.0, logprobs=k), row), seed=0)
    assert [sampler.state.needs(rows).num_logprobs for rows in ([0], [0, 1], [1, 2])] == [None, 1, 5]
    tensors = gather_logprobs(make_logits(2), torch.tensor([3, 4]), k=5)
    assert len(tensors.row(0, num_logprobs=0)) == 1
    assert tensors.row(0, num_logprobs=0)[3] == tensors.row(0)[3]


def test_logprobs_of_a_long_prompt_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = make_logits(50).bfloat16(), torch.arange(50) % VOCAB
    whole = gather_logprobs(logits, token_ids, k=3)
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 7 * VOCAB)
    parts = gather_logprobs(logits, token_ids, k=3)
    for name, tensor in vars(whole).items():
        assert torch.equal(tensor, getattr(parts, name))


def test_rows_set_since_the_last_step_travel_in_one_copy_and_the_last_setting_wins(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    copies: list[int] = []
    original = state_module._to_device

    def counted(*args: Any) -> Any:
        copies.append(1)
        return original(*args)

    monkeypatch.setattr(state_module, "_to_device", counted)
    sampler = Sampler(4, VOCAB, device)
    requests = [make_request(SamplingParams(temperature=0.0, logit_bias={row: 50.0}), row) for row in range(4)]
    sampler.admit(make_request(SamplingParams(repetition_penalty=2.0), row=2), seed=0)
    for request in requests:
        sampler.admit(request, seed=0)
    assert step(sampler, make_logits(4), requests) == [0, 1, 2, 3]
    step(sampler, make_logits(4), requests)
    assert len(copies) == 1


class OpRecorder(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_step_reads_a_value_back_or_has_a_shape_that_depends_on_data() -> None:
    """On CPU the random draw may read values (no device waits there); everything else is the same code as on CUDA."""
    sampler = Sampler(2, VOCAB, torch.device("cpu"), eos_token_ids=[1])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=3, logprobs=4)
    requests = [make_request(params, row) for row in range(2)]
    rows, positions = torch.arange(2), torch.tensor([3, 3])
    with OpRecorder() as ops:
        for request in requests:
            sampler.admit(request, seed=0)
        sampler(make_logits(2), rows, positions, requests)
    assert {"scatter_add_", "topk", "max"} <= ops.names
    assert not ops.names & {"_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "item", "equal"}


@pytest.mark.gpu
def test_no_step_synchronizes_with_the_gpu() -> None:
    device = torch.device("cuda")
    sampler = Sampler(2, VOCAB, device, eos_token_ids=[1])
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=5, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=3, logprobs=4
    )
    requests = [make_request(params, row) for row in range(2)]
    logits, rows = make_logits(2).to(device), torch.arange(2, device=device)
    for _ in range(2):  # the second time nothing compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            for request in requests:
                sampler.admit(request, seed=0)
            sampler(logits, rows, rows + 3, requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")
