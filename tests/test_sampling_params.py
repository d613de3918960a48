"""Sampling that cannot be done is refused before a request exists."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hf_paged.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 10**9),  # each is a request of its own
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**63),  # the sampler holds it in 64 bits: it would fail everybody in the step
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -math.inf),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("max_tokens", 0),
        ("max_tokens", False),
        ("seed", -1),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}.*allowed"):
        SamplingParams(**{field: value})


def test_one_stop_string_and_a_list_of_them_mean_the_same() -> None:
    assert SamplingParams(stop="\n").stop == SamplingParams(stop=["\n"]).stop == ("\n",)  # type: ignore[arg-type]


def test_a_stop_string_without_text_would_never_be_seen() -> None:
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=("a",), detokenize=False)


def test_zero_logprobs_asks_for_the_chosen_token_and_none_for_nothing() -> None:
    assert SamplingParams(logprobs=0, prompt_logprobs=0).logprobs == 0
    assert SamplingParams().logprobs is None


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_changing_the_callers_logit_bias_later_changes_no_request() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = -100.0
    assert params.logit_bias == {1: 2.0}


def test_minus_one_keeps_all_tokens_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
