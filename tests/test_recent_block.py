"""The current block beside its codes, end to end on tiny models: a query reads its own block as it came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import VOCAB, tiny_model
from tiny_engine import GREEDY, llm, prompts, run, tiny_llama, tiny_mistral, tokens
from torch import Tensor
from transformers import AttentionInterface, LlamaForCausalLM

from hf_paged import PagedCache, SamplingParams
from hf_paged.kernels.reference import dequantize, dequantize_groups, quantize_groups, quantize_rows
from hf_paged.private_transformers import forget_attention

FORMATS = ("int4", "int8", "k=int8,v=int4", "k=fp8,v=auto")
RECENT = {"kv_recent_block": True, "kv_scales": "off"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny_llama()


@pytest.fixture(scope="module")
def alone(model: LlamaForCausalLM) -> dict[str, list[list[int]]]:
    """Every prompt on its own through a fresh cache, whole, by KV format."""

    def served(kv: str, prompt: list[int]) -> list[int]:
        return tokens(llm(model, kv_cache_dtype=kv, **RECENT).generate([prompt], GREEDY, use_tqdm=False))[0]

    return {kv: [served(kv, prompt) for prompt in prompts()] for kv in FORMATS}


def coded(x: Tensor, name: str) -> Tensor:
    """What pages of a format give back."""
    if name == "auto":
        return x
    if name == "int4":
        return dequantize_groups(*quantize_groups(x))
    return dequantize(*quantize_rows(x, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]))


def dense_with_codes(model: LlamaForCausalLM, ids: list[int], formats: tuple[str, str], block_size: int) -> Tensor:
    """Logits `[T, vocab]` of a dense forward whose keys and values are coded but for those of each query's block."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        group, position = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
        own = position[None] >= position[:, None] // block_size * block_size
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        old_keys, old_values = (
            coded(x, name).repeat_interleave(group, 1) for x, name in zip((key, value), formats, strict=True)
        )
        scores = torch.where(own, query @ keys.mT, query @ old_keys.mT) * query.shape[-1] ** -0.5
        probs = scores.masked_fill(position[None] > position[:, None], float("-inf")).softmax(-1)
        out = (probs * own) @ values + (probs * ~own) @ old_values
        return out.transpose(1, 2), None

    AttentionInterface.register("recent_test", attention)
    used = model.config._attn_implementation
    model.set_attn_implementation("recent_test")
    try:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([ids])).logits[0]
    finally:
        model.set_attn_implementation(used)
        forget_attention("recent_test")
    return logits


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_query_reads_its_own_block_as_it_came_and_all_before_it_as_codes(
    model: LlamaForCausalLM, alone: dict[str, list[list[int]]], kv_cache_dtype: str
) -> None:
    """Prefill-through-pages holds for codes: one key read exactly too many, or one too few, changes these logits."""
    formats = (kv_cache_dtype, kv_cache_dtype)
    if "," in kv_cache_dtype:
        formats = tuple(side.split("=")[1] for side in kv_cache_dtype.split(","))  # type: ignore[assignment]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    for prompt, got in zip(prompts(), alone[kv_cache_dtype], strict=True):
        ids = prompt + got
        want = dense_with_codes(model, ids, formats, 16)
        assert want[len(prompt) - 1 : -1].argmax(-1).tolist() == got
        (output,) = llm(model, kv_cache_dtype=kv_cache_dtype, **RECENT).generate([ids], params, use_tqdm=False)
        logprobs = [next(iter(entry.values())).logprob for entry in (output.prompt_logprobs or [])[1:]]
        expected = want.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        error = (torch.tensor(logprobs) - expected).abs()  # a key computed a rounding away may get the next code
        blocks_of_32 = dense_with_codes(model, ids, formats, 32).log_softmax(-1)[:-1]
        wrong = (blocks_of_32.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - expected).abs()
        assert (error < 1e-4).float().mean() > 0.5 and error.mean() < wrong.mean()


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 48, "async_scheduling": True},
        {"max_num_seqs": 2},
        {"fuse": False},
    ],
    ids=["batched", "chunked", "asynchronous", "two-rows", "not-fused"],
)
def test_a_request_does_not_see_how_it_was_served(
    model: LlamaForCausalLM, alone: dict[str, list[list[int]]], kv_cache_dtype: str, options: dict[str, object]
) -> None:
    """What is exact depends on positions only, not on chunks, rows or who else runs."""
    assert run(model, kv_cache_dtype=kv_cache_dtype, **RECENT, **options) == alone[kv_cache_dtype]


@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recomputed", "swapped"])
def test_a_preempted_request_computes_its_current_block_again(
    model: LlamaForCausalLM, alone: dict[str, list[list[int]]], swap_space: float
) -> None:
    """Blocks that were swapped out come back as codes; another request has the slot of the 16-bit block."""
    engine = llm(model, num_blocks=10, swap_space=swap_space, kv_cache_dtype="int4", max_model_len=100, **RECENT)
    got = tokens(engine.generate(prompts(), GREEDY, use_tqdm=False))
    scheduler = engine.engine.scheduler
    counts = (scheduler.num_recompute_preemptions, scheduler.num_swap_preemptions)
    assert counts[1 if swap_space else 0] > 0, "the pool was meant to be too small"
    assert got == alone["int4"]
    scheduler.check_integrity()


def test_a_prefix_hit_gives_what_a_cold_start_gives(model: LlamaForCausalLM, alone: dict[str, list[list[int]]]) -> None:
    engine = llm(model, kv_cache_dtype="int4", **RECENT)
    for _ in range(2):
        assert tokens(engine.generate(prompts(), GREEDY, use_tqdm=False)) == alone["int4"]
    assert engine.engine.scheduler.blocks.prefix_hits > 0


@pytest.mark.parametrize("prompt", [1, 3, 5], ids=["inside a block", "at a block's second token", "at a block's end"])
def test_sequences_of_one_request_share_whole_blocks_of_its_prompt(model: LlamaForCausalLM, prompt: int) -> None:
    """A fork inside a block would find its parent's codes and nobody's 16 bits."""
    params = SamplingParams(n=4, temperature=1.5, seed=5, max_tokens=20, ignore_eos=True)
    (output,) = llm(model, kv_cache_dtype="int4", **RECENT).generate([prompts()[prompt]], params, use_tqdm=False)
    sequences = [tuple(c.token_ids) for c in output.outputs]
    assert len(set(sequences)) == 4
    one_row = llm(model, kv_cache_dtype="int4", max_num_seqs=1, enable_prefix_caching=False, **RECENT)
    (again,) = one_row.generate([prompts()[prompt]], params, use_tqdm=False)
    assert [tuple(c.token_ids) for c in again.outputs] == sequences


@pytest.mark.parametrize(("family", "num_blocks"), [("gemma2", 19), ("gpt_oss", 22), ("gpt2", 10), ("gpt_neox", 10)])
def test_other_families_are_served_as_alone(family: str, num_blocks: int) -> None:
    """Softcaps, sinks, layers beside windowed ones, layers that are not fused; a preempted request finds its window."""
    model = tiny_model(family)
    options: dict[str, object] = {"kv_cache_dtype": "k=int8,v=int4", "max_model_len": 100, **RECENT}
    engine = llm(model, num_blocks=num_blocks, swap_space=0.01, **options)
    kept = {index for index, layer in engine.engine.kv_cache.layers.items() if layer.recent is not None}
    assert kept == {spec.layer_idx for spec in engine.engine.kv_cache.specs if spec.window is None}
    ids = [[token % VOCAB for token in prompt] for prompt in prompts()]
    got = tokens(engine.generate(ids, GREEDY, use_tqdm=False))
    engine.engine.scheduler.check_integrity()
    preempted = engine.engine.scheduler.num_swap_preemptions > 0
    assert preempted or family == "gemma2", "the pool was meant to be too small"  # its windows free enough
    assert got == [tokens(llm(model, **options).generate([row], GREEDY, use_tqdm=False))[0] for row in ids]


def test_a_model_of_windows_only_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_recent_block=True: every layer of this model has a sliding window"):
        llm(tiny_mistral(), kv_cache_dtype="int4", **RECENT)


def test_what_is_kept_is_counted() -> None:
    """Slots that nobody counted would be the out-of-memory error of the largest batch."""
    model = tiny_llama()
    plain, kept = (
        llm(model, kv_cache_dtype="int4", max_num_seqs=3, kv_recent_block=on, kv_scales="off").engine.kv_cache
        for on in (False, True)
    )
    per_sequence = 2 * 16 * 2 * 2 * 16 * 4  # layers, tokens, K and V, heads, channels, bytes
    assert kept.recent_bytes == per_sequence and kept.bytes_per_token == plain.bytes_per_token
    assert kept.num_bytes - plain.num_bytes == kept.fixed_bytes == 4 * per_sequence
    held = sum(
        x.nbytes
        for layer in kept.layers.values()
        if layer.recent
        for x in (layer.recent.k.tensor, layer.recent.v.tensor)
    )
    assert held == kept.fixed_bytes and plain.fixed_bytes == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_cache_dtype": "auto"}, "kv_recent_block=True with kv_cache_dtype='auto'"),
        ({"kv_cache_dtype": "auto-quality"}, "kv_recent_block=True with kv_cache_dtype='auto-quality'"),
        ({"kv_cache_dtype": "int4", "max_num_batched_tokens": 15}, "max_num_batched_tokens=15"),
        ({"kv_cache_dtype": "k=auto,v=auto"}, "kv_recent_block=True"),
        ({"kv_cache_dtype": "int4", "skip_layers": (0, 1)}, "kv_recent_block=True"),
    ],
)
def test_what_cannot_keep_a_block_is_refused_by_name(
    model: LlamaForCausalLM, options: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        llm(model, kv_recent_block=True, **options)


def test_the_loop_refuses_what_only_the_engine_keeps(model: LlamaForCausalLM) -> None:
    """Beams reorder and crop half-filled blocks; their 16-bit parts would be another sequence's."""
    ids = torch.tensor([prompts()[1]])
    options: dict[str, Any] = {
        "cache_implementation": "paged", "cache_config": {"kv_cache_dtype": "int4", **RECENT},
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="kv_recent_block=True"):
        model.generate(ids, num_beams=2, **options)
    with pytest.raises(TypeError, match="kv_recent_block"):
        PagedCache(model, kv_cache_dtype="int4", kv_recent_block=True)  # type: ignore[call-arg]
    served = model.generate(ids, **options)
    want = tokens(
        llm(model, kv_cache_dtype="int4", block_size=32, **RECENT).generate(
            [prompts()[1]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False
        )
    )
    assert served[0, ids.shape[1] :].tolist() == want[0]
