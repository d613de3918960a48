"""The engine end to end on tiny models, token for token: what must not change a result, and what must end a request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_engine import GREEDY, LENGTHS, llm, prompts, run, tiny_llama, tiny_mistral, tokens
from transformers import PreTrainedModel

from hf_paged import SamplingParams


@pytest.fixture(scope="module", params=[tiny_llama, tiny_mistral], ids=["llama", "window"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = request.param()
    return made


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> dict[str, list[list[int]]]:
    """Every prompt on its own through a fresh cache, whole, by KV format."""
    return {
        kv: [tokens(llm(model, kv_cache_dtype=kv).generate([p], GREEDY, use_tqdm=False))[0] for p in prompts()]
        for kv in ("auto", "int8", "fp8", "int4", "k=int8,v=int4")
    }


def test_the_engine_gives_the_tokens_of_dense_generate(
    model: PreTrainedModel, alone: dict[str, list[list[int]]]
) -> None:
    for prompt, got in zip(prompts(), alone["auto"], strict=True):
        ids = torch.tensor([prompt])
        dense = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert got == dense[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "int4", "k=int8,v=int4"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 48, "async_scheduling": True},
        {"max_num_seqs": 2},
        {"block_size": 64},
    ],
    ids=["batched", "chunked", "asynchronous", "two-rows", "large-blocks"],
)
def test_a_request_does_not_see_how_it_was_served(
    model: PreTrainedModel, alone: dict[str, list[list[int]]], kv_cache_dtype: str, options: dict[str, object]
) -> None:
    """Batched == alone and chunked == whole: tokens attend to what the pages hold, in every KV format."""
    assert run(model, kv_cache_dtype=kv_cache_dtype, **options) == alone[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recomputed", "swapped"])
def test_a_preempted_request_ends_as_if_undisturbed(
    model: PreTrainedModel, alone: dict[str, list[list[int]]], swap_space: float, kv_cache_dtype: str
) -> None:
    engine = llm(model, num_blocks=10, swap_space=swap_space, kv_cache_dtype=kv_cache_dtype, max_model_len=100)
    got = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    scheduler = engine.engine.scheduler
    counts = (scheduler.num_recompute_preemptions, scheduler.num_swap_preemptions)
    assert counts[1 if swap_space else 0] > 0, "the pool was meant to be too small"
    assert got == alone[kv_cache_dtype]
    scheduler.check_integrity()


def test_a_prefix_hit_gives_what_a_cold_start_gives(model: PreTrainedModel, alone: dict[str, list[list[int]]]) -> None:
    engine = llm(model, kv_cache_dtype="int8")
    for _ in range(2):
        assert tokens(engine.generate(prompts(), GREEDY, use_tqdm=False)) == alone["int8"]
    assert engine.engine.scheduler.blocks.prefix_hits > 0


def test_sequences_of_one_request_share_its_prompt_and_differ(model: PreTrainedModel) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=5, max_tokens=12, ignore_eos=True)
    engine = llm(model)
    (output,) = engine.generate([prompts()[2]], params, use_tqdm=False)
    sequences = [tuple(c.token_ids) for c in output.outputs]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3] and len(set(sequences)) == 4
    (again,) = llm(model, max_num_batched_tokens=9).generate([prompts()[2]], params, use_tqdm=False)
    assert [tuple(c.token_ids) for c in again.outputs] == sequences


def test_a_seeded_request_does_not_depend_on_its_batch(model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=16, ignore_eos=True)
    alone = tokens(llm(model).generate([prompts()[1]], params, use_tqdm=False))[0]
    others = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True)
    mixed = llm(model, max_num_batched_tokens=33).generate(
        prompts(), [others, params, others, GREEDY, others, others], use_tqdm=False
    )
    assert mixed[1].outputs[0].token_ids == alone


def test_logprobs_are_those_of_a_dense_forward(model: PreTrainedModel) -> None:
    prompt = prompts()[1]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for options in ({}, {"max_num_batched_tokens": 9}):
        (output,) = llm(model, **options).generate([prompt], params, use_tqdm=False)
        completion = output.outputs[0]
        sequence = prompt + completion.token_ids
        with torch.no_grad():
            dense = torch.log_softmax(model(torch.tensor([sequence])).logits[0].float(), -1)
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        # fp32 sums of ~100 terms in another order: 1e-4 is 800 roundings of a value near 1
        for position, entry in enumerate(entries):
            assert entry is not None and sequence[position + 1] in entry
            for token, value in entry.items():
                assert value.logprob == pytest.approx(float(dense[position, token]), abs=1e-4)
        top = dense[len(prompt) - 1].topk(3).indices.tolist()
        assert set(top) <= set(completion.logprobs[0])


def test_a_stop_token_ends_a_request_and_frees_its_blocks_with_a_step_in_flight(model: PreTrainedModel) -> None:
    reference = tokens(llm(model).generate([prompts()[0]], GREEDY, use_tqdm=False))[0]
    stop = reference[7]
    first = reference.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,), ignore_eos=True)
    for asynchronous in (False, True):
        engine = llm(model, async_scheduling=asynchronous)
        (output,) = engine.generate([prompts()[0]], params, use_tqdm=False)
        completion = output.outputs[0]
        assert completion.token_ids == reference[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        engine.engine.scheduler.check_integrity()


def test_streamed_tokens_grow_to_the_final_output(model: PreTrainedModel) -> None:
    engine = llm(model)
    steps = list(engine.stream(prompts()[1], GREEDY))
    lengths = [len(o.outputs[0].token_ids) for o in steps]
    assert lengths == sorted(lengths) and lengths[-1] == 24 and steps[-1].finished
    assert tokens(engine.generate([prompts()[1]], GREEDY, use_tqdm=False))[0] == steps[-1].outputs[0].token_ids


def test_an_abandoned_stream_leaves_no_request_behind(model: PreTrainedModel) -> None:
    engine = llm(model)
    stream = engine.stream(prompts()[1], GREEDY)
    next(stream)
    stream.close()
    assert not engine.engine.scheduler.has_work
    engine.engine.scheduler.check_integrity()


def test_a_stream_whose_request_is_aborted_ends(model: PreTrainedModel) -> None:
    """Its last output went to whoever aborted it: waiting for one would step an idle engine for ever."""
    engine = llm(model)
    stream = engine.stream(prompts()[1], GREEDY)
    assert engine.engine.abort(next(stream).request_id)[-1].finished
    assert not list(stream)


def test_an_unfinished_stream_loses_no_output_to_another_call(model: PreTrainedModel) -> None:
    """Every output of the engine goes to whoever steps it: a second caller would swallow the end of the stream."""
    engine = llm(model)
    stream = engine.stream(prompts()[1], GREEDY)
    first = next(stream)
    with pytest.raises(RuntimeError, match="not finished"):
        engine.generate(prompts(), GREEDY, use_tqdm=False)
    steps = [first, *stream]
    assert steps[-1].finished
    assert tokens(engine.generate(prompts()[1:2], GREEDY, use_tqdm=False)) == tokens(steps[-1:])


def test_calls_of_several_threads_each_get_their_own_outputs(model: PreTrainedModel) -> None:
    """Every output of the engine goes to whoever steps it, so two threads must not step it in turn."""
    engine = llm(model)
    alone = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(engine.generate, prompts(), GREEDY, use_tqdm=False) for _ in range(4)]
        assert all(tokens(call.result(timeout=60)) == alone for call in calls)
    engine.engine.scheduler.check_integrity()


def test_weights_written_in_place_are_seen_and_old_prefixes_are_not(model: PreTrainedModel) -> None:
    engine = llm(model)
    before = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    weight = model.model.layers[0].self_attn.k_proj.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-1)
        changed = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
        assert changed != before
        assert changed == run(model)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert tokens(engine.generate(prompts(), GREEDY, use_tqdm=False)) == before


def test_a_preempted_prompt_reports_each_logprob_once(model: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=0, ignore_eos=True)
    engine = llm(model, num_blocks=10, max_model_len=100, max_num_batched_tokens=24)
    outputs = engine.generate(prompts(), params, use_tqdm=False)
    assert engine.engine.scheduler.num_recompute_preemptions > 0
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output.prompt_logprobs is not None
        named = [None, *prompt[1:]]
        assert [e if e is None else next(iter(e)) for e in output.prompt_logprobs] == named


def test_an_eos_of_minus_one_means_none(model: PreTrainedModel) -> None:
    """Configs say "no eos" that way; `min_tokens` must not hold back token -1."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = -1
    try:
        params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2)
        assert [len(t) for t in tokens(llm(model).generate(prompts(), params, use_tqdm=False))] == [4] * len(LENGTHS)
    finally:
        model.generation_config.eos_token_id = before
