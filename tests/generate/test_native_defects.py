"""What Transformers' own `cache_implementation="paged"` and quantized caches get wrong, and must not be wrong here.

N1..N24: failures of the native path observed in Transformers 5.17; P10, P11 and Q*: of quantized caches.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import torch
from model_zoo import PAD, VOCAB, assert_as_exact, cache_of, exact_copy, left_padded, prompts, tiny_model
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, TextStreamer

from hf_paged import PagedCache
from hf_paged.config import parse_kv_cache_dtype

PAGED = {"cache_implementation": "paged", "cache_config": {"block_size": 16}}
BATCH = torch.stack(prompts((6, 6)))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def call(model: PreTrainedModel, inputs: Any = BATCH, **options: Any) -> Any:
    options = {"do_sample": False, "max_new_tokens": 8, **options}
    return model.generate(inputs, **options)


def same(model: PreTrainedModel, inputs: Any = BATCH, **options: Any) -> Tensor:
    """The paged result, checked against the dense one."""
    torch.manual_seed(0)
    dense = call(model, inputs, **options)
    torch.manual_seed(0)
    paged = call(model, inputs, **options, **PAGED)
    assert torch.equal(paged, dense)
    return paged


def test_n1_the_result_has_two_dimensions(model: PreTrainedModel, driver: str) -> None:
    assert same(model).shape == (2, 14)


def test_n2_rows_may_end_at_different_lengths(model: PreTrainedModel, driver: str) -> None:
    eos = int(call(model)[0, 8])
    assert PAD in same(model, eos_token_id=eos)[0].tolist()


def test_n3_left_padding_is_no_prompt(model: PreTrainedModel, driver: str) -> None:
    batch = left_padded(prompts((4, 9)))
    padded = same(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    alone = call(model, prompts((4, 9))[0][None], **PAGED)
    assert torch.equal(padded[0, 9:], alone[0, 4:])


def test_n4_max_length_and_the_default_length_are_kept(model: PreTrainedModel, driver: str) -> None:
    assert same(model, max_new_tokens=None, max_length=12).shape[1] == 12
    dense = model.generate(BATCH, do_sample=False)
    assert torch.equal(model.generate(BATCH, do_sample=False, **PAGED), dense)


def test_n5_a_generation_config_asks_for_pages_too(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """The native path looks at the keyword only and silently runs a DynamicCache."""
    dense = call(model)
    config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=PAD, **PAGED)
    before = config.to_dict()
    default = model.generation_config
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert torch.equal(model.generate(BATCH, generation_config=config), dense)
        assert config.to_dict() == before
        model.generation_config = config
        try:
            assert torch.equal(model.generate(BATCH), dense)
            assert torch.equal(call(model, cache_implementation=None), dense)  # the keyword wins
        finally:
            model.generation_config = default
    assert [record.message[:14] for record in caplog.records] == ["paged generate"] * 2


def test_n6_every_returned_sequence_arrives(model: PreTrainedModel, driver: str) -> None:
    assert same(model, do_sample=True, num_return_sequences=3).shape[0] == 6


class StopAtLength(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 10)


def test_n7_criteria_allowed_tokens_and_assistants_are_honoured(model: PreTrainedModel) -> None:
    assert same(model, stopping_criteria=[StopAtLength()]).shape[1] == 10
    allowed = same(model, prefix_allowed_tokens_fn=lambda row, ids: list(range(3, 20)))
    assert int(allowed[:, 6:].max()) < 20
    same(model, BATCH[:1], assistant_model=tiny_model("llama", seed=1))


def test_n8_beams_search_beams(model: PreTrainedModel) -> None:
    longer = {"max_new_tokens": 16, "num_beams": 4}
    assert not torch.equal(same(model, **longer), call(model, max_new_tokens=16))


def test_n9_a_dictionary_is_returned_with_scores(model: PreTrainedModel) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    runs = (call(model, **wanted, **PAGED), call(model, **wanted), call(exact_copy(model), **wanted))
    assert_as_exact(*(torch.stack(run.scores) for run in runs))


def test_n10_stop_strings_and_max_time_stop(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer(VOCAB)
    text = tokenizer.decode(call(model)[0, 8:10])  # two tokens make the stop string
    stopped = same(model, BATCH[:1], stop_strings=[text], tokenizer=tokenizer)
    assert stopped.shape[1] == 10
    config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=PAD, stop_strings=[text])
    assert torch.equal(model.generate(BATCH[:1], generation_config=config, tokenizer=tokenizer, **PAGED), stopped)
    assert config.stop_strings is not None
    with pytest.raises(ValueError, match="tokenizer"):
        call(model, stop_strings=["x"], **PAGED)
    started = time.monotonic()
    assert call(model, max_new_tokens=200, max_time=0.05, **PAGED).shape[1] < 206
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 5.0},  # N11
        {"no_repeat_ngram_size": 1},  # N12
        {"min_new_tokens": 7},  # N13
        {"bad_words_ids": [[5], [7, 8]]},  # N14
        {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]},  # N15
        {"do_sample": True, "temperature": 0.8, "top_k": 7},  # N21
    ],
    ids=lambda option: next(iter(option)),
)
def test_n11_to_n15_and_n21_processors_act(model: PreTrainedModel, option: dict[str, Any], driver: str) -> None:
    eos = int(call(model)[0, 8])
    same(model, eos_token_id=eos, **option)
    same(model)  # and the model is as it was: native left it broken after bad_words_ids


@pytest.mark.parametrize("num_beams", [1, 2])
def test_n16_a_prompt_that_cannot_fit_is_refused_before_any_work(model: PreTrainedModel, num_beams: int) -> None:
    small = {"cache_implementation": "paged", "cache_config": {"block_size": 16, "num_blocks": 2}}
    with pytest.raises(ValueError, match="blocks"):
        call(model, torch.stack(prompts((40, 40))), num_beams=num_beams, **small)
    same(model)


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1000])
def test_n17_a_bad_token_id_is_named(model: PreTrainedModel, bad: int) -> None:
    ids = BATCH.clone()
    ids[1, 3] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] hold token ids"):
        call(model, ids, **PAGED)
    same(model)


def test_n18_an_empty_prompt_is_refused(model: PreTrainedModel) -> None:
    """Natively its first token was sampled from another request's logits."""
    mask = torch.ones_like(BATCH)
    mask[0] = 0
    with pytest.raises(ValueError, match=r"rows \[0\] hold no token"):
        call(model, attention_mask=mask, **PAGED)


def test_n19_nothing_is_silently_ignored(model: PreTrainedModel) -> None:
    options = {"page_size": 3}
    with pytest.raises(ValueError, match=r"unknown cache_config keys \['page_size'\]; allowed: block_size"):
        call(model, cache_implementation="paged", cache_config=options)
    assert options == {"page_size": 3}
    with pytest.raises(ValueError, match="cache_config must be a dict"):
        call(model, cache_implementation="paged", cache_config=[1])
    with pytest.raises(ValueError, match="kv_cache_dtype='int7'"):
        call(model, cache_implementation="paged", cache_config={"kv_cache_dtype": "int7"})
    with pytest.raises(ValueError, match="foo"):
        call(model, foo=1, **PAGED)
    with pytest.raises(ValueError, match="the given cache is a DynamicCache"):
        call(model, past_key_values=DynamicCache(), **PAGED)
    with pytest.raises(ValueError, match="exclude each other"):
        call(model, custom_generate=lambda *args, **kwargs: None, **PAGED)
    with pytest.raises(ValueError, match="token_healing"):
        call(model, token_healing=True, **PAGED)
    with pytest.raises(ValueError, match="streamer"):
        call(model, BATCH[:1], num_beams=2, streamer=TextStreamer(tiny_tokenizer(VOCAB)), **PAGED)
    same(model, BATCH[:1], prompt_lookup_num_tokens=3)


def test_n19_use_cache_false_runs_without_a_cache_and_says_so(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    same(model, use_cache=False)
    assert "there is no cache" in caplog.text


def test_n20_inputs_are_taken_as_dense_generate_takes_them(model: PreTrainedModel) -> None:
    with pytest.raises(AttributeError):
        call(model, [[1, 2], [3, 4]])
    with pytest.raises(AttributeError):
        call(model, [[1, 2], [3, 4]], **PAGED)
    embeds = model.get_input_embeddings()(BATCH).detach()
    same(model, None, inputs_embeds=embeds)
    same(model, None, inputs_embeds=embeds, num_beams=2)
    same(model, None, input_ids=BATCH)


def test_n22_plain_calls_of_other_threads_are_not_disturbed(model: PreTrainedModel) -> None:
    """Natively 6 of 6 plain calls failed while a paged call ran: the config was switched for everybody."""
    dense = call(model)
    results: list[Any] = []
    stop = threading.Event()

    def plain() -> None:
        try:
            while not stop.is_set():
                results.append(torch.equal(call(model), dense))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=plain)
    thread.start()
    try:
        for num_beams in (1, 2, 1):
            call(model, max_new_tokens=24, num_beams=num_beams, **PAGED)
    finally:
        stop.set()
        thread.join()
    assert results
    assert all(result is True for result in results)


def test_n22_paged_calls_of_two_threads_do_not_mix(model: PreTrainedModel) -> None:
    inputs = [torch.stack(prompts((6, 6), seed)) for seed in (1, 2)]
    expected = [(call(model, ids), call(model, ids, num_beams=2)) for ids in inputs]
    results: dict[int, Any] = {}

    def paged(i: int) -> None:
        results[i] = (call(model, inputs[i], **PAGED), call(model, inputs[i], num_beams=2, **PAGED))

    threads = [threading.Thread(target=paged, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, pair in enumerate(expected):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[i], pair, strict=True))


def test_n23_softcap_is_applied() -> None:
    """Native paged attention (and sdpa) drop Gemma 2's softcap without a word."""
    model = tiny_model("gemma2")
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    runs = (call(model, **options, **PAGED), call(model, **options), call(exact_copy(model), **options))
    paged, eager, exact = (torch.stack(run.logits) for run in runs)
    without = torch.stack(call(tiny_model("gemma2", attn_logit_softcapping=None), **options).logits)
    assert (eager - without).abs().max() > 0.1  # the test can see it
    assert_as_exact(paged, eager, exact)


def test_n24_a_call_takes_the_memory_it_needs_and_no_more(model: PreTrainedModel) -> None:
    """Natively a default call on a CPU takes 90% of the memory."""
    output = call(model, return_dict_in_generate=True, **PAGED)
    text = model.config.get_text_config()
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    blocks = 2 + 1  # one block for each row, and the null block
    assert cache_of(output).num_bytes == blocks * 16 * token


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4", "k=int8,v=fp8"])
def test_p10_and_p11_a_quantized_cache_is_measured_and_chunking_does_not_change_it(
    model: PreTrainedModel, kv_cache_dtype: str
) -> None:
    """One pass through Transformers' QuantizedCache measures full precision; token by token it fell apart."""
    assert parse_kv_cache_dtype(kv_cache_dtype)
    ids = torch.stack(prompts((24, 24)))
    logits = []
    with torch.no_grad():
        exact = model(ids).logits
        for sizes in ([24], [1] * 24, [7, 17]):
            cache = PagedCache(model, kv_cache_dtype=kv_cache_dtype, block_size=16)
            steps = [model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)]
            logits.append(torch.cat(steps, dim=1))
    error = (logits[0] - exact).abs().mean()
    # above what fp32 rounds, so quantized, and the first prompt token of every row already; less than what is said
    assert 1e-4 < error / exact.std() < 1
    for chunked in logits[1:]:
        # a code flips only where fp32 rounding moves a value over a step's edge: rarer than quantization itself, of
        # which two that have nothing to do with each other lie further apart than one from the truth
        assert (chunked - logits[0]).abs().mean() < error
        assert torch.equal(chunked.argmax(-1), logits[0].argmax(-1))


def test_q2_history_is_never_quantized_again(model: PreTrainedModel) -> None:
    """quanto re-quantized and dequantized the whole cache at every step."""
    cache = PagedCache(model, kv_cache_dtype="int8", block_size=16)
    with torch.no_grad():
        model(BATCH, past_key_values=cache)
        before = _codes(cache)[:, :, :6].clone()
        for token in torch.stack(prompts((2, 2), seed=5)).split(1, dim=1):
            model(token, past_key_values=cache)
    assert torch.equal(_codes(cache)[:, :, :6], before)


def _codes(cache: PagedCache) -> Tensor:
    pages = cache._pages
    return pages.store.layer(0).k.tensor[torch.from_numpy(pages.tables.table[:, 0])]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_q5_and_q7_beams_over_quantized_pages_of_window_models_keep_rows_apart(family: str) -> None:
    """QuantizedCache left its quantized part in the old order when beams moved, and refuses window models."""
    model = tiny_model(family)
    options = {"cache_implementation": "paged", "num_beams": 3, "max_new_tokens": 16}
    together = call(model, cache_config={"kv_cache_dtype": "int8", "block_size": 16}, **options)
    for row in range(2):
        alone = call(model, BATCH[row : row + 1], cache_config={"kv_cache_dtype": "int8"}, **options)
        assert torch.equal(together[row : row + 1], alone)


def test_q6_one_cache_config_serves_many_calls_and_models() -> None:
    """Transformers writes the first model's config into the user's dictionary."""
    options = {"kv_cache_dtype": "int8", "skip_layers": [0]}
    for layers in (2, 4, 3):
        call(tiny_model("llama", num_hidden_layers=layers), cache_implementation="paged", cache_config=options)
    assert options == {"kv_cache_dtype": "int8", "skip_layers": [0]}
    with pytest.raises(ValueError, match="skip_layers"):
        call(tiny_model("llama"), cache_implementation="paged", cache_config={"skip_layers": [9]})


def test_q10_and_q14_a_paged_call_leaves_a_model_that_trains(model: PreTrainedModel) -> None:
    """Native paged calls left the attention switched; the next training forward crashed, or attended to the future."""
    loss = model(BATCH, labels=BATCH).loss
    for _ in range(2):
        same(model)
        again = model(BATCH, labels=BATCH).loss
        assert torch.equal(again, loss)
        again.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    model.zero_grad()
    assert model.config._attn_implementation == "sdpa"


def test_q11_what_a_tokenizer_returns_is_accepted(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer(VOCAB)
    batch = tokenizer(["abcd", "e"], return_tensors="pt", padding=True)
    dense, paged = (model.generate(**batch, do_sample=False, max_new_tokens=5, **o) for o in ({}, PAGED))
    assert torch.equal(paged, dense)
