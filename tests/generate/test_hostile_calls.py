"""Calls as careless or hostile users make them: the result of dense generate, or an error and nothing left broken."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from model_zoo import VOCAB, left_padded, prompts, tiny_model
from tiny_engine import engine_of
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_paged
from hf_paged import PagedCache

BATCH = left_padded(prompts((5, 9)))
IDS = BATCH["input_ids"]
ONE = IDS[1:]
PAGED = {"cache_implementation": "paged"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def call(model: Any, *args: Tensor, **options: Any) -> Any:
    return model.generate(*args, **{"do_sample": False, "max_new_tokens": 5, **options})


def left_padding(*shape: int) -> Tensor:
    """A mask with one padded column; Transformers 5.24 drops a mask of ones before anybody sees its shape."""
    return torch.ones(shape).index_fill(-1, torch.tensor(0), 0)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["engine", "loop"])
def test_positions_of_the_users_reach_the_model(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """The engine counts tokens itself, so it must leave calls with other positions to the loop."""
    for positions in (torch.arange(9) * 2, torch.arange(9)):
        given = {"position_ids": positions[None], **options}
        assert torch.equal(call(model, ONE, **given, **PAGED), call(model, ONE, **given))


@pytest.mark.parametrize("eos", [None, list(range(3, 60))])
def test_a_streamer_of_several_rows_gets_one_token_of_each_per_step(model: PreTrainedModel, eos: Any) -> None:
    dense, paged = Recorder(), Recorder()
    call(model, **BATCH, streamer=dense, eos_token_id=eos)
    call(model, **BATCH, streamer=paged, eos_token_id=eos, **PAGED)
    assert paged.seen == dense.seen


@pytest.mark.parametrize(
    "options",
    [{"eos_token_id": -1}, {"eos_token_id": [-1, 10**6]}, {"max_new_tokens": 4.0}, {"eos_token_id": []}],
)
def test_odd_values_that_dense_generate_takes_mean_the_same(model: PreTrainedModel, options: dict[str, Any]) -> None:
    assert torch.equal(call(model, **BATCH, **options, **PAGED), call(model, **BATCH, **options))


def test_ids_of_a_narrow_dtype_come_back_as_wide_as_from_dense_generate(model: PreTrainedModel) -> None:
    paged, dense = call(model, ONE.int(), **PAGED), call(model, ONE.int())
    assert paged.dtype == dense.dtype
    assert torch.equal(paged, dense)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"input_ids": ONE.float()}, r"input_ids are torch.float32; allowed"),
        ({"input_ids": ONE.bool()}, r"input_ids are torch.bool; allowed"),
        ({"input_ids": ONE[:0]}, r"\(0, 9\) hold no row"),
        ({"input_ids": ONE[:, :0]}, r"\(1, 0\) hold no token"),
        ({"input_ids": IDS, "attention_mask": left_padding(2, 8)}, r"\(2, 8\); allowed: \(2, 9\)"),
        ({"input_ids": IDS, "attention_mask": left_padding(1, 9)}, r"\(1, 9\); allowed: \(2, 9\)"),
        ({"input_ids": IDS, "attention_mask": left_padding(9)}, r"\(9,\); allowed: \(2, 9\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 9).index_fill(1, torch.tensor(4), 0)}, r"rows \[0, 1\]"),
        ({"input_ids": ONE, "cache_config": {1: 2, "a": 3}}, r"unknown cache_config keys \[1, 'a'\]; allowed"),
        ({"input_ids": ONE, "cache_config": {"cuda_graphs": True}}, r"cuda_graphs=True needs.*CUDA"),
        ({"input_ids": ONE, "cache_config": {"num_blocks": 10**12}}, r"10{12} KV blocks: .* GiB are more than"),
        ({"input_ids": ONE, "num_beams": 2, "cache_config": {"num_blocks": 10**12}}, r"10{12} KV blocks: .* more than"),
        ({"input_ids": ONE, "num_beams": 2, "cache_config": {"kv_scales": "/nowhere"}}, "there is no file /nowhere"),
        ({"input_ids": ONE, "cache_config": {"kv_scales": ""}}, "kv_scales='' is not allowed"),
        (
            {"input_ids": ONE, "cache_config": {"kv_cache_dtype": "INT8"}},
            "allowed: auto, fp8, int8, int4, auto-quality",
        ),
        ({"input_ids": ONE, "cache_config": {"swap_space": 1e9}}, r"swap_space=1000000000.0: .* GiB are more than"),
        ({"input_ids": ONE, "max_new_tokens": 10**12}, r"max_model_len=10{11}9 is not allowed"),
    ],
)
def test_what_cannot_be_done_is_named_and_the_next_call_works(
    model: PreTrainedModel, inputs: dict[str, Any], reason: str
) -> None:
    """A refused size must not be the one that the next engine is made for."""
    if inputs.get("cache_config", {}).get("cuda_graphs") and torch.cuda.is_available():
        pytest.skip("says that there is no GPU")
    before = model.config.to_dict(), model.generation_config.to_dict()
    with pytest.raises((ValueError, OSError), match=reason):
        call(model, **inputs, **PAGED)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before
    assert torch.equal(call(model, ONE, **PAGED), call(model, ONE))
    engine = engine_of(model)
    assert engine is not None
    engine.scheduler.check_integrity()
    assert not engine.has_work


def test_a_cache_and_another_implementation_are_not_silently_one_of_the_two(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="'static' and a PagedCache exclude each other"):
        call(model, ONE, past_key_values=PagedCache(model), cache_implementation="static")


def test_the_cache_of_another_model_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="the given PagedCache has 2 layers, LlamaForCausalLM has 3"):
        call(model, ONE, past_key_values=PagedCache(tiny_model("llama", num_hidden_layers=2)))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["engine", "loop"])
def test_an_offloaded_model_is_refused_by_name(options: dict[str, Any]) -> None:
    """Its hooks fetch weights for the modules that they were put on, not for those of a view."""
    model = cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is offloaded"):
        call(model, ONE, **options, **PAGED)
    assert call(model, ONE).shape == (1, 14)


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def hook(self, *_: Any) -> None:
        self.calls += 1


def count(counter: Counter, *_: Any) -> None:
    counter.calls += 1


@pytest.mark.parametrize("partial", [False, True], ids=["method", "partial"])
def test_what_a_hook_records_reaches_the_users_object(partial: bool) -> None:
    """Generation runs on a copy of the module tree; a hook's own object must not be copied with it."""
    model = tiny_model("llama")
    counter = Counter()
    layer: nn.Module = model.get_decoder().layers[0]
    layer.register_forward_hook(functools.partial(count, counter) if partial else counter.hook)
    call(model, ONE, **PAGED)
    assert counter.calls >= 5


def test_a_replaced_forward_is_refused_by_name() -> None:
    """It runs the user's model and not the view, so that no page would ever be written."""
    model: Any = tiny_model("llama")
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM\.forward was replaced"):
        call(model, ONE, **PAGED)
    assert call(model, ONE).shape == (1, 14)


def test_ids_at_the_edge_of_the_vocabulary_are_served(model: PreTrainedModel) -> None:
    ids = torch.tensor([[VOCAB - 1, 0, VOCAB - 1]])
    mask = torch.ones_like(ids)
    assert torch.equal(call(model, ids, attention_mask=mask, **PAGED), call(model, ids, attention_mask=mask))


def test_an_allocator_that_refuses_is_the_callers_exception_as_in_dense_generate(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that tries again with fewer rows catches OutOfMemoryError, by its type."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    call(model, ONE, **PAGED)
    with monkeypatch.context() as patch:
        patch.setattr("hf_paged.model_runner.write_kv", refuse)
        patch.setattr("hf_paged.model_runner.rope_write", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            call(model, ONE, **PAGED)
    engine = engine_of(model)
    assert engine is not None
    assert engine.failure is None, "its frames would keep the call's tensors, and the next error would be taken for it"
    assert torch.equal(call(model, ONE, **PAGED), call(model, ONE))


@pytest.mark.parametrize("sample", [False, True], ids=["free running", "lockstep"])
def test_rows_that_could_fill_the_memory_wait_instead(monkeypatch: pytest.MonkeyPatch, sample: bool) -> None:
    """max_new_tokens is a limit that few rows reach: a pool for all of it at once may be more than there is."""
    model = tiny_model("llama")
    batch = left_padded(prompts((5, 9, 17, 3, 30, 22)))
    monkeypatch.setattr("hf_paged.memory.psutil.virtual_memory", lambda: SimpleNamespace(available=0, total=1 << 36))
    options = {**batch, "max_new_tokens": 90, "do_sample": False}
    if sample:
        options |= {"repetition_penalty": 1.3}
    paged = model.generate(**options, **PAGED, cache_config={"block_size": 16})
    engine = engine_of(model)
    assert engine is not None and engine.kv_cache.num_blocks * 16 < 6 * 120
    assert torch.equal(paged, model.generate(**options))


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
@pytest.mark.parametrize("masked", [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]], ids=str)
def test_rows_are_named_as_the_caller_counts_them(
    model: PreTrainedModel, options: dict[str, Any], masked: list[int]
) -> None:
    """Transformers repeats a prompt for each beam; rows [2, 3] of a call with two prompts are nobody's."""
    mask = torch.tensor([[1] * 5, masked])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        call(model, IDS[:, :5], attention_mask=mask, **options, **PAGED)


@pytest.mark.parametrize(("num_beams", "length", "new_tokens"), [(2, 5, 10), (3, 9, 60), (4, 9, 40)])
def test_the_number_of_blocks_that_a_refusal_names_is_enough(
    model: PreTrainedModel, num_beams: int, length: int, new_tokens: int
) -> None:
    """Beams copy a shared tail before they write into it, all but the last of its holders."""
    needed = num_beams * -(-(length + new_tokens) // 16) + 1
    options = {"num_beams": num_beams, "max_new_tokens": new_tokens, "eos_token_id": None}
    size = {"block_size": 16, "num_blocks": needed}
    with pytest.raises(ValueError, match=f"need {needed} blocks of 16 tokens, the null block included"):
        call(model, ONE[:, :length], **options, **PAGED, cache_config={**size, "num_blocks": needed - 1})
    dense = call(model, ONE[:, :length], **options)
    assert torch.equal(call(model, ONE[:, :length], **options, **PAGED, cache_config=size), dense)


def test_prompts_in_chunks_of_the_callers_are_run_in_them(model: PreTrainedModel) -> None:
    """The engine has chunks of its own and would drop `prefill_chunk_size` without a word."""
    columns: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: columns.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        call(model, ONE, prefill_chunk_size=4, **PAGED)
    finally:
        hook.remove()
    assert [count for count in columns if count > 1] == [4, 4]


def test_release_frees_the_pages_of_a_model_and_its_next_call_makes_others(model: PreTrainedModel) -> None:
    """Half of a GPU's memory stayed with the model until it was deleted, or everything was unregistered."""
    dense = call(model, ONE)
    for options in ({}, {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}):
        call(model, ONE, **options, **PAGED)
        engine = engine_of(model)
        assert engine is not None
        pages = weakref.ref(engine.kv_cache)
        del engine
        hf_paged.release(model)
        gc.collect()
        assert pages() is None and engine_of(model) is None
        assert torch.equal(call(model, ONE, **PAGED), dense)
    hf_paged.release(model)
    hf_paged.release(model)  # there is nothing any more
    with pytest.raises(ValueError, match="a Transformers model"):
        hf_paged.release("model")  # type: ignore[arg-type]


def test_release_from_inside_a_call_is_refused(model: PreTrainedModel) -> None:
    def releasing(ids: Tensor, scores: Tensor) -> Tensor:
        hf_paged.release(model)
        return scores

    with pytest.raises(RuntimeError, match="from inside its own"):
        call(model, ONE, logits_processor=[releasing], **PAGED)
