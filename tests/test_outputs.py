"""Outputs are plain values that cannot be changed and that JSON can hold."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from hf_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokensSoFar


def make_output() -> RequestOutput:
    chosen = {5: Logprob(logprob=-0.5, rank=1, decoded_token=" a"), 7: Logprob(logprob=float("-inf"), rank=2)}
    completion = CompletionOutput(
        index=0,
        text=" a 😀",
        token_ids=[5],
        logprobs=[chosen],
        cumulative_logprob=-0.5,
        finish_reason="stop",
        stop_reason="\n",
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[completion],
        prompt_logprobs=[None, chosen],
        finished=True,
    )


def test_the_dict_form_is_strict_json_even_where_a_token_is_impossible() -> None:
    plain = make_output().to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    completion = plain["outputs"][0]
    assert completion["text"] == " a 😀" and completion["finish_reason"] == "stop" and plain["error"] is None
    assert completion["logprobs"][0]["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": " a"}
    assert completion["logprobs"][0]["7"]["logprob"] is None
    assert plain["prompt_logprobs"][0] is None


def test_an_output_handed_out_cannot_be_changed_or_built_by_position() -> None:
    output = make_output()
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False
    with pytest.raises(TypeError, match="positional"):
        Logprob(-0.5, 1)


def test_an_output_of_a_stream_stays_what_it_was_while_the_sequence_grows() -> None:
    tokens = [3, 1, 4]
    so_far = TokensSoFar(tokens)
    tokens.append(1)
    assert so_far == [3, 1, 4]
    assert (len(so_far), so_far[-1], so_far[1:], so_far[::-1]) == (3, 4, [1, 4], [4, 1, 3])
    assert so_far != [3, 1, 4, 1]
    with pytest.raises(IndexError):
        so_far[3]
    output = dataclasses.replace(make_output(), outputs=[CompletionOutput(index=0, text="", token_ids=so_far)])
    assert json.loads(json.dumps(output.to_dict()))["outputs"][0]["token_ids"] == [3, 1, 4]
    assert copy.deepcopy(so_far) == pickle.loads(pickle.dumps(so_far)) == [3, 1, 4]
