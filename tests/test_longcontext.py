"""Passkey retrieval: a key at the wrong place, or counted as found without being written, would flatter a format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_paged.eval.longcontext import INTRODUCTION, NEEDLE, QUESTION, Case, make_cases, measure_retrieval
from hf_paged.eval.texts import Window
from hf_paged.llm import LLM
from hf_paged.sampling_params import SamplingParams

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a BOS that the tokenizer itself adds nowhere."""
    vocab = {token: i for i, token in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def cases_of(**changes: Any) -> list[Case]:
    options: dict[str, Any] = {"lengths": [400, 700], "depths": DEPTHS, "trials": 2, "seed": 0, **changes}
    return make_cases(byte_tokenizer(), **options)


def test_the_key_stands_once_at_its_depth_in_a_text_of_exactly_the_length() -> None:
    tokenizer, cases = byte_tokenizer(), cases_of()
    assert [(case.length, case.depth) for case in cases] == [
        (length, depth) for length in (400, 700) for depth in DEPTHS for _ in range(2)
    ]
    keys = set()
    for case in cases:
        ids = case.window.token_ids
        assert len(ids) == case.length
        key = tokenizer.decode(ids[case.window.num_context :]).strip()
        keys.add(key)
        text = tokenizer.decode(ids)
        needle = NEEDLE.format(key=key)
        assert text.count(needle) == 1
        before, after = text.split(needle)
        above, below = len(before.removeprefix(INTRODUCTION)), len(after.partition(QUESTION)[0])
        assert before.startswith(INTRODUCTION)
        assert 0 <= case.depth * (above + below) - above <= len(" There and back again.")
    assert len(keys) == len(cases)
    assert cases == cases_of()
    assert cases != cases_of(seed=1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("chunk", [32, None])
def test_a_key_is_found_exactly_when_greedy_decoding_writes_it(kv_cache_dtype: str, chunk: int | None) -> None:
    model = _model()
    asked = cases_of(lengths=[300], depths=[0.0, 1.0], trials=3)
    prompts = [case.window.token_ids[: case.window.num_context] for case in asked]
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, num_blocks=200, max_model_len=512)
    greedy = SamplingParams(temperature=0.0, max_tokens=asked[0].window.num_scored, ignore_eos=True)
    written = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    rigged = list(asked)  # every second key is what the model writes
    for i in range(1, len(asked), 2):
        window = Window(token_ids=[*prompts[i], *written[i]], num_context=len(prompts[i]))
        rigged[i] = Case(length=asked[i].length, depth=asked[i].depth, window=window)
    result = measure_retrieval(model, rigged, kv_cache_dtype=kv_cache_dtype, chunk=chunk)
    assert [round(3 * cell.retrieved) for cell in result.cells] == [1, 2]
    assert result.trials == 3
    expected, through_pages = _mean_logprob(model, rigged[:3]), _prompt_logprob(llm, rigged[:3])
    assert through_pages == pytest.approx(expected, abs=1e-4) or kv_cache_dtype == "int8"
    # codes that fp32 rounds otherwise matter less than that there are codes
    assert abs(result.cells[0].logprob - through_pages) <= max(abs(expected - through_pages), 1e-4)


def _prompt_logprob(llm: LLM, cases: list[Case]) -> float:
    """Mean log-probability of the scored tokens, as the engine reports those of a prompt."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    outputs = llm.generate([case.window.token_ids for case in cases], params, use_tqdm=False)
    scored = [
        next(iter(entry.values())).logprob
        for case, output in zip(cases, outputs, strict=True)
        for entry in (output.prompt_logprobs or [])[case.window.num_context :]
    ]
    return sum(scored) / len(scored)


def _model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=257, max_position_embeddings=512)


@torch.no_grad()
def _mean_logprob(model: PreTrainedModel, cases: list[Case]) -> float:
    found = []
    for case in cases:
        ids = torch.tensor([case.window.token_ids])
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        first = case.window.num_context
        found.append(logprobs[first - 1 : -1].gather(-1, ids[0, first:, None]).mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [40]}, r"length=40 .*tokens or more"),
        ({"depths": [1.5]}, r"depth=1\.5"),
        ({"trials": 0}, "trials=0"),
        ({"filler": " "}, "filler text is empty"),
    ],
    ids=["length", "depth", "trials", "filler"],
)
def test_what_holds_no_key_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases_of(**changes)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length=700 .*512"):
        measure_retrieval(_model(), cases_of())
