"""What an engine refuses, and what a request that fails, ends early or is unreadable must not do to others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import GREEDY, llm, prompts, tiny_llama, tiny_mistral, tokens
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedModel

from hf_paged import LLM, PagedCache, SamplingParams
from hf_paged.config import EngineConfig
from hf_paged.engine import Engine
from hf_paged.layer_probe import LayerProbe
from hf_paged.packed_model import PackedModel
from hf_paged.sampling_state import SamplingState


@pytest.fixture(scope="module", params=[tiny_llama, tiny_mistral], ids=["llama", "window"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = request.param()
    return made


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> list[list[int]]:
    """The tokens of every prompt on its own through a fresh cache."""
    return [tokens(llm(model).generate([p], GREEDY, use_tqdm=False))[0] for p in prompts()]


class FailingTokenizer:
    """Cannot decode what holds the token `bad`, like a vocabulary that is smaller than the model's."""

    eos_token_id = None
    all_special_ids: tuple[int, ...] = ()
    is_fast = False

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def decode(self, ids: list[int], **_: object) -> str:
        if self.bad in ids:
            raise KeyError(self.bad)
        return "." * len(ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([3, -1], "-1"), ([3, 120], "120"), (list(range(1, 101)) * 6, "prompt of 600 tokens")],
    ids=["empty", "negative", "beyond-vocabulary", "too-long"],
)
def test_a_prompt_that_cannot_run_ends_in_an_error_and_harms_nobody(
    model: PreTrainedModel, alone: list[list[int]], prompt: list[int], message: str
) -> None:
    outputs = llm(model).generate([prompts()[0], prompt, prompts()[1]], GREEDY, use_tqdm=False)
    assert outputs[1].finished and outputs[1].outputs[0].finish_reason == "error"
    assert message in (outputs[1].error or "")
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == alone[:2]


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    (output,) = llm(tiny_llama(), num_blocks=4).generate([prompts()[2]], GREEDY, use_tqdm=False)
    assert "KV blocks" in (output.error or "")


def test_an_aborted_request_has_one_terminal_output(model: PreTrainedModel) -> None:
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=16))
    engine.add_request("a", prompts()[0], GREEDY)
    engine.add_request("b", prompts()[1], GREEDY)
    seen = [engine.step() for _ in range(3)]
    (aborted,) = engine.abort("a")
    assert aborted.outputs[0].finish_reason == "abort" and 0 < len(aborted.outputs[0].token_ids) < 24
    assert engine.abort("a") == []
    while engine.has_work:
        seen.append(engine.step())
    ends = [o.request_id for step in seen for o in step if o.finished]
    assert ends == ["b"]
    engine.scheduler.check_integrity()


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(model: PreTrainedModel) -> None:
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=16))
    engine.add_request("a", prompts()[0], GREEDY)
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("a", prompts()[1], GREEDY)
    outputs = [o for _ in range(30) for o in engine.step()]
    assert [o.request_id for o in outputs] == ["a"]


def test_an_unknown_option_names_the_allowed_ones(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"max_num_seq\b.*max_num_seqs"):
        LLM(model, max_num_seq=4)


def test_a_step_that_fails_ends_its_requests_and_harms_no_later_one(
    model: PreTrainedModel, alone: list[list[int]]
) -> None:
    """An error on the device (out of memory, a kernel) must cost the requests of its step, not the engine."""
    engine = llm(model)
    forward = engine.engine.runner.forward
    calls = iter([None, RuntimeError("no memory")])

    def failing(plan: object) -> object:
        error = next(calls, None)
        if error is not None:
            raise error
        return forward(plan)  # type: ignore[arg-type]  # handed through

    engine.engine.runner.forward = failing  # type: ignore[method-assign, assignment]  # the fault to be survived
    outputs = engine.generate(prompts()[:2], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
    assert all("no memory" in (o.error or "") for o in outputs)
    engine.engine.scheduler.check_integrity()
    assert tokens(engine.generate(prompts(), GREEDY, use_tqdm=False)) == alone


def test_an_interrupted_step_leaves_no_prefix_behind_that_was_never_computed(
    model: PreTrainedModel, alone: list[list[int]]
) -> None:
    """Ctrl-C mostly falls into a step: its blocks are in the prefix cache by then, and hold nothing."""
    engine = llm(model)
    forward = engine.engine.runner.forward

    def interrupted(plan: object) -> object:
        raise KeyboardInterrupt

    engine.engine.runner.forward = interrupted  # type: ignore[method-assign, assignment]  # the fault to be survived
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), GREEDY, use_tqdm=False)
    engine.engine.runner.forward = forward  # type: ignore[method-assign]  # healed
    engine.engine.scheduler.check_integrity()
    assert tokens(engine.generate(prompts(), GREEDY, use_tqdm=False)) == alone


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_prompt_that_is_not_decoded_to_the_end_leaves_no_request_without_an_owner(
    model: PreTrainedModel, error: type[BaseException]
) -> None:
    """Streams decode the end of their prompt first. The scheduler has the request by then, and would run it."""
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=16))

    def failing(*args: object, **kwargs: object) -> str:
        raise error

    engine.outputs.tokenizer = SimpleNamespace(decode=failing, all_special_ids=[])
    with pytest.raises(error):
        engine.add_request("a", prompts()[0], GREEDY, stream=True)
    assert not engine.has_work
    engine.scheduler.check_integrity()


def test_a_request_whose_swap_failed_is_computed_again_and_not_resumed_from_what_was_never_copied() -> None:
    """A swap needs memory for its copies: without it, the CPU blocks hold what others left there."""
    model: PreTrainedModel = tiny_llama()
    options = {"num_blocks": 9, "swap_space": 0.01, "enable_prefix_caching": False}
    params, asked = replace(GREEDY, max_tokens=40), [list(range(1, 21)), list(range(2, 22)), list(range(3, 23))]
    undisturbed = tokens(llm(model, **options).generate(asked, params, use_tqdm=False))
    engine = llm(model, **options)
    swap_out, failures = engine.engine.kv_cache.swap_out, 0

    def failing(pairs: list[tuple[int, int]]) -> None:
        nonlocal failures
        if pairs and not failures:
            failures += 1
            raise torch.OutOfMemoryError("no memory to copy")
        swap_out(pairs)

    engine.engine.kv_cache.swap_out = failing  # type: ignore[method-assign, assignment]  # the fault to be survived
    outputs = engine.generate(asked, params, use_tqdm=False)
    engine.engine.scheduler.check_integrity()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert failures == 1 and sorted(set(reasons)) == ["error", "length"]
    for output, expected in zip(outputs, undisturbed, strict=True):
        assert output.outputs[0].finish_reason == "error" or output.outputs[0].token_ids == expected


def test_settings_that_find_no_memory_cost_only_the_rows_of_their_step() -> None:
    """Rows set for a later step keep what was set; a row that failed holds up nobody."""
    state = SamplingState(2, 50, torch.device("cpu"))
    for row, temperature in ((0, 0.7), (1, 0.9)):
        state.set_row(row, SamplingParams(temperature=temperature), [1, 2], [], 3)
    make_room = state._make_room

    def failing(entries: object) -> None:
        raise torch.OutOfMemoryError("no memory for a long logit_bias")

    state._make_room = failing  # type: ignore[method-assign, assignment]  # the fault to be survived
    with pytest.raises(torch.OutOfMemoryError):
        state.flush([1])
    state._make_room = make_room  # type: ignore[method-assign]  # healed
    state.flush([0, 1])
    assert state.sampling.temperature.tolist() == pytest.approx([0.7, 0.0])


def test_a_model_on_two_devices_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tensors lie on one device: kernels of layers elsewhere would follow foreign addresses."""
    original = PackedModel._probe

    def spread(packed: PackedModel) -> LayerProbe:
        probe = original(packed)
        probe.specs[0] = replace(probe.specs[0], device=torch.device("meta"))
        return probe

    monkeypatch.setattr(PackedModel, "_probe", spread)
    with pytest.raises(ValueError, match=r"cpu, meta.*one device"):
        llm(model)


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["decoded at the end", "decoded while it grows"])
def test_a_text_that_cannot_be_decoded_costs_its_own_request_only(
    model: PreTrainedModel, stop: tuple[str, ...]
) -> None:
    """Others of the same step go on, and one that ended in that very step is not lost."""
    ids = prompts()[:3]
    expected = tokens(llm(model).generate(ids, GREEDY, use_tqdm=False))
    bad = next(t for t in expected[0][3:] if t not in expected[1] + expected[2] + ids[1] + ids[2] + ids[0])
    fails_at = expected[0].index(bad) + 1
    engine = LLM(model, FailingTokenizer(bad), num_blocks=120, block_size=16)
    lengths = (24, fails_at, 24)  # the second ends in the step in which the first fails
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, stop=stop) for n in lengths]
    params[1] = SamplingParams(temperature=0.0, max_tokens=fails_at, ignore_eos=True)
    outputs = engine.generate(ids, params, use_tqdm=False)
    assert outputs[0].error is not None
    assert outputs[0].outputs[0].finish_reason == "error"
    assert tokens(outputs[1:]) == [expected[1][:fails_at], expected[2]]
    engine.engine.scheduler.check_integrity()
    assert not engine.engine.has_work


def test_a_prompt_that_cannot_be_decoded_leaves_nothing_behind(model: PreTrainedModel) -> None:
    """A streamed text continues its prompt, so the prompt is decoded when the request is added."""
    engine = Engine(model, EngineConfig(num_blocks=20), tokenizer=FailingTokenizer(7))
    with pytest.raises(KeyError):
        engine.add_request("a", [5, 7], GREEDY, stream=True)
    assert not engine.has_work
    engine.add_request("a", [5, 6], GREEDY)
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()


def test_prompts_may_be_arrays_and_nothing_else_is_taken_for_ids(model: PreTrainedModel) -> None:
    engine = llm(model)
    expected = tokens(engine.generate([[5, 6, 7], [8, 9, 10]], GREEDY, use_tqdm=False))
    for array in (torch.tensor([[5, 6, 7], [8, 9, 10]]), np.array([[5, 6, 7], [8, 9, 10]])):
        assert tokens(engine.generate(array, GREEDY, use_tqdm=False)) == expected  # type: ignore[arg-type]  # arrays are taken too
        assert tokens(engine.generate(array[0], GREEDY, use_tqdm=False)) == expected[:1]  # type: ignore[arg-type]  # arrays are taken too
    assert tokens(engine.generate([np.int64(5), np.int64(6), np.int64(7)], GREEDY, use_tqdm=False)) == expected[:1]  # type: ignore[arg-type]  # NumPy's integers are taken too
    wrong: list[object] = [
        None,
        5,
        {3, 4},
        b"abc",
        bytearray(b"abc"),
        [b"abc"],
        [[True]],
        [[1.5, 2.0]],
        {"prompt_token_ids": None},
        {"prompt_token_ids": [2.5]},
        {},
    ]
    for prompt in wrong:
        with pytest.raises(ValueError, match="prompt"):
            engine.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]  # wrong on purpose
    for params in (5, {"n": 1}, [5]):
        with pytest.raises(ValueError, match=r"sampling_params=.*allowed"):
            engine.generate([[5]], params, use_tqdm=False)  # type: ignore[arg-type]  # wrong on purpose
    assert not engine.engine.has_work


def test_a_conversation_that_the_chat_template_cannot_take_is_named(model: PreTrainedModel) -> None:
    """A template is a program: what it stumbles over came out as a traceback of Jinja's."""
    tokenizer = tiny_tokenizer(120)
    llm = LLM(model, tokenizer=tokenizer, num_blocks=20)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.role + ':' + turn.content }}{% endfor %}"
    assert llm.render_chat([{"role": "user", "content": "hi"}]) == [{"prompt": "user:hi", "chat": True}]
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    (plain,) = llm.generate(["user:hi"], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(ValueError, match=r"template refuses conversation 1: .*7"):
        llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": 7}]], GREEDY, use_tqdm=False)


def test_a_text_that_is_no_unicode_costs_its_own_request_only(model: PreTrainedModel) -> None:
    """JSON's escapes can make half a surrogate pair, which no tokenizer takes."""
    engine = LLM(model, tokenizer=tiny_tokenizer(120), num_blocks=120, block_size=16)
    good, bad = engine.generate(["abc", json.loads('"a\\ud800"')], GREEDY, use_tqdm=False)
    assert good.error is None and good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error" and "no Unicode text" in (bad.error or "")


def test_what_is_no_model_and_what_are_no_params_are_refused_by_name(model: PreTrainedModel) -> None:
    """Not by an AttributeError from the depth."""
    wrong: Any = 5
    for make in (LLM, PagedCache):
        with pytest.raises(ValueError, match="model=5 is not allowed"):
            make(wrong)
    engine = llm(model).engine
    with pytest.raises(ValueError, match="params=None is not allowed"):
        engine.add_request("a", [5], None)  # type: ignore[arg-type]
    for request_id in (None, 5, b"x", ""):
        with pytest.raises(ValueError, match=r"request_id=.* is not allowed"):
            engine.add_request(request_id, [5], GREEDY)  # type: ignore[arg-type]
    assert not engine.has_work


def test_what_is_no_folder_is_named_with_the_argument_that_says_so(model: PreTrainedModel, tmp_path: Path) -> None:
    """Transformers would complain of the letters in a hub name."""
    file = tmp_path / "config.json"
    file.touch()
    for missing in ("", "/nowhere", "./nowhere", file):
        with pytest.raises(OSError, match=r"model=.* there is no such folder"):
            LLM(missing)
        with pytest.raises(OSError, match=r"tokenizer=.* there is no such folder"):
            LLM(model, tokenizer=missing)
    with pytest.raises(ValueError, match="dtype='float99' is not allowed"):
        LLM(tmp_path, dtype="float99")
