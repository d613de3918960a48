"""`PagedCache` as a Transformers cache: every operation against `DynamicCache`, under any attention, without copies."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import VOCAB, cache_of, left_padded, prompts, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from hf_paged import PagedCache
from hf_paged.kv_cache import KVCache
from hf_paged.page_store import PageStore

BATCH = torch.stack(prompts((21, 21, 21)))
TOLERANCE = {"atol": 2e-3, "rtol": 1e-4}  # fp32 sums of at most 256 products in another order
ATTENTIONS = ("sdpa", "eager", "hf_paged")


@pytest.fixture(params=ATTENTIONS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model as a custom loop has it; "hf_paged" reads pages, the others get keys and values read back from them."""
    model = tiny_model("llama")
    model.set_attn_implementation(request.param)
    return model


@pytest.fixture
def plain() -> PreTrainedModel:
    return tiny_model("llama")


@torch.no_grad()
def step(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits[:, -1]


def both(model: PreTrainedModel, plain: PreTrainedModel, change: Callable[[Cache], Any]) -> None:
    """Prefill, change, decode twice and change in between: logits through pages are those through a DynamicCache."""
    caches = (PagedCache(model, block_size=16), DynamicCache())
    results = []
    for runner, cache in zip((model, plain), caches, strict=True):
        logits = [step(runner, cache, BATCH)]
        for round_ in range(3):
            cache = change(cache) or cache
            logits.append(step(runner, cache, torch.full((num_rows(cache), 1), 5 + round_)))
        results.append(logits)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def num_rows(cache: Cache) -> int:
    return cache.batch_size if isinstance(cache, PagedCache) else len(cache.layers[0].keys)


CHANGES: dict[str, Callable[[Cache], Any]] = {
    "nothing": lambda cache: None,
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0, 2] if num_rows(cache) == 3 else [1, 0])),
    "crop": lambda cache: cache.crop(-3),
    "crop by a tensor": lambda cache: cache.crop(-torch.tensor(4)),
    "crop nothing": lambda cache: cache.crop(0),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_operations_give_what_a_dynamic_cache_gives(
    model: PreTrainedModel, plain: PreTrainedModel, change: str
) -> None:
    both(model, plain, CHANGES[change])


def test_lengths_and_sizes_follow_the_contract(plain: PreTrainedModel) -> None:
    paged, dense = PagedCache(plain), DynamicCache(config=plain.config)
    for cache in (paged, dense):
        assert cache.get_seq_length() == 0
        step(plain, cache, BATCH)
    assert paged.get_seq_length() == dense.get_seq_length() == 21
    assert paged.get_query_offset(2) == 21
    assert paged.get_mask_sizes(4, 1) == dense.get_mask_sizes(4, 1) == (25, 0)
    assert paged.get_max_length() == -1
    assert (paged.is_compileable, paged.is_croppable, paged.is_sliding) == (False, True, [False] * 3)
    assert (paged.batch_size, len(paged)) == (3, 3)
    with pytest.raises(ValueError, match=r"crop\(5\)"):
        paged.crop(5)
    paged.reset()
    assert (paged.get_seq_length(), paged.batch_size) == (0, 0)


def test_rows_share_blocks_until_one_writes(plain: PreTrainedModel) -> None:
    """Reordering copies table entries; only the partly filled tail block of a shared row is copied, once per writer."""
    cache = PagedCache(plain, block_size=16)
    pool = cache._pages.store.pool
    step(plain, cache, BATCH[:1])  # 21 tokens: one full block and a tail
    cache.batch_repeat_interleave(4)
    assert used(cache) == 2
    step(plain, cache, torch.full((4, 1), 5))
    assert used(cache) == 5  # the full block once, four tails
    cache.reorder_cache(torch.tensor([1, 1, 1, 1]))
    assert used(cache) == 2
    cache.crop(-100)
    assert used(cache) == 0
    pool.check_integrity([])


def used(cache: PagedCache) -> int:
    pages = cache._pages
    pages.store.pool.check_integrity(pages.tables.table.tolist())
    return pages.store.pool.num_blocks - 1 - pages.store.pool.num_free


def test_a_prefix_can_be_reused_by_copies_and_outlives_them(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Users deepcopy a prompt's cache for each question: copies share the prefix and do not see each other."""
    prefix = PagedCache(model, block_size=16)
    step(model, prefix, BATCH[:1])
    questions = (BATCH[1:2], BATCH[2:3])
    expected = [step(plain, DynamicCache(), torch.cat([BATCH[:1], ids], dim=1)) for ids in questions]
    copies = [copy.deepcopy(prefix), copy.copy(prefix)]
    for twin, ids, logits in zip(copies, questions, expected, strict=True):
        torch.testing.assert_close(step(model, twin, ids), logits, **TOLERANCE)
    assert prefix.get_seq_length() == 21
    del copies, twin
    pool = prefix._pages.store.pool
    assert pool.num_blocks - 1 - pool.num_free == 2  # the prefix's own
    torch.testing.assert_close(step(model, prefix, questions[0]), expected[0], **TOLERANCE)


def test_padded_rows_and_later_turns(plain: PreTrainedModel) -> None:
    """Multi-turn over a padded batch: the returned cache continues, and padding is never stored."""
    batch = left_padded(prompts((4, 9)))
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    for paged in ({"cache_implementation": "paged"}, {"past_key_values": PagedCache(plain, block_size=16)}):
        ours, theirs = plain.generate(**batch, **options, **paged), plain.generate(**batch, **options)
        cache = cache_of(ours)
        assert isinstance(cache, PagedCache)
        assert cache._pages.tables.lengths.tolist() == [8, 13]
        for turn in range(2):
            ids = torch.cat([theirs.sequences, torch.stack(prompts((3, 3), seed=turn))], dim=1)
            mask = torch.cat([batch["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1)
            turn_options = {"input_ids": ids, "attention_mask": mask, **options}
            theirs = plain.generate(**turn_options, past_key_values=cache_of(theirs))
            ours = plain.generate(**turn_options, past_key_values=cache, cache_implementation="paged" if turn else None)
            assert torch.equal(ours.sequences, theirs.sequences)
            assert cache_of(ours) is cache


def test_a_mask_with_holes_or_another_padding_is_refused_by_name(plain: PreTrainedModel) -> None:
    ids = BATCH[:2, :6]
    for mask in ([[1, 1, 0, 1, 1, 1], [1] * 6], [[1, 1, 1, 1, 0, 0], [1] * 6]):
        for num_beams in (1, 2):
            with pytest.raises(ValueError, match="left"):
                plain.generate(
                    ids,
                    attention_mask=torch.tensor(mask),
                    cache_implementation="paged",
                    max_new_tokens=3,
                    do_sample=False,
                    num_beams=num_beams,
                )
    plain.set_attn_implementation("hf_paged")
    cache = PagedCache(plain)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    step(plain, cache, ids, padded)
    with pytest.raises(ValueError, match="pads the 2 rows by"):
        step(plain, cache, ids[:, :1], torch.ones(2, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="must be"):
        step(plain, cache, ids[:, :1], torch.ones(2, 3, dtype=torch.long))


def test_padding_may_span_prefill_chunks(plain: PreTrainedModel) -> None:
    """A row that is all padding in the first chunks stores nothing and attends to nothing until its prompt begins."""
    batch = left_padded(prompts((2, 23)))
    options = {"do_sample": False, "max_new_tokens": 5, "prefill_chunk_size": 4, "num_beams": 2}
    dense = plain.generate(**batch, **options)
    assert torch.equal(plain.generate(**batch, **options, cache_implementation="paged"), dense)


def test_a_fixed_pool_says_what_it_lacks_and_stays_whole(plain: PreTrainedModel) -> None:
    cache = PagedCache(plain, block_size=16, num_blocks=4)
    step(plain, cache, BATCH[:1])
    with pytest.raises(ValueError, match="num_blocks=4"):
        step(plain, cache, BATCH[:1].repeat(1, 3))
    assert used(cache) == 2
    cache.reset()
    assert used(cache) == 0
    with pytest.raises(ValueError, match="num_blocks=4 is too small: 3 rows of up to 30 tokens need 7 blocks"):
        cache.reserve(3, 30)
    with pytest.raises(ValueError, match="skip_layers"):
        PagedCache(plain, skip_layers=(3,))
    with pytest.raises(ValueError, match="block_size=48"):
        PagedCache(plain, block_size=48)


def test_rows_and_shapes_that_do_not_fit_are_refused(plain: PreTrainedModel) -> None:
    cache = PagedCache(plain)
    step(plain, cache, BATCH)
    with pytest.raises(ValueError, match="holds 3 rows"):
        step(plain, cache, BATCH[:2])
    other = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match="this cache stores"):
        step(other, cache, BATCH)


def test_a_dropped_cache_gives_its_memory_back_at_once(plain: PreTrainedModel) -> None:
    """No reference cycle: GPU memory must not wait for the garbage collector."""
    gc.disable()
    try:
        cache = PagedCache(plain)
        step(plain, cache, BATCH)
        pages = weakref.ref(cache._pages.store)
        del cache
        assert pages() is None
    finally:
        gc.enable()


def test_beams_store_a_prompt_once(plain: PreTrainedModel) -> None:
    ids = torch.stack(prompts((40, 40)))
    options = {"do_sample": False, "max_new_tokens": 2, "num_beams": 4, "return_dict_in_generate": True}
    dense = plain.generate(ids, **options)
    for chunk in (None, 7):
        paged = plain.generate(
            ids, **options, prefill_chunk_size=chunk, cache_implementation="paged", cache_config={"block_size": 16}
        )
        assert torch.equal(paged.sequences, dense.sequences)
        assert used(cache_of(paged)) <= 2 * (2 + 4)  # two full blocks per prompt, at most a tail per beam


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4", "k=int8,v=int4", "k=int4,v=auto"])
@pytest.mark.parametrize("attention", ["sdpa", "hf_paged"])
def test_every_attention_sees_the_same_quantized_values(
    plain: PreTrainedModel, kv_cache_dtype: str, attention: str
) -> None:
    """Reading back under sdpa and attending over pages are one arithmetic; layers that are skipped stay exact."""
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    caches = [PagedCache(m, kv_cache_dtype=kv_cache_dtype, skip_layers=(0,)) for m in (plain, model)]
    exact = DynamicCache()
    for ids in (BATCH, BATCH[:, :1], BATCH[:, 3:7]):
        a, b = (step(m, cache, ids) for m, cache in zip((plain, model), caches, strict=True))
        # a flipped code moves single logits; two codings that differ lie further apart than one from the truth
        assert (a - b).abs().mean() < (a - step(plain, exact, ids)).abs().mean()
    exact = DynamicCache()
    step(plain, exact, BATCH)
    keys, _ = caches[0].layers[0]._pages.update(0, *(torch.zeros(3, 2, 1, 16),) * 2)
    torch.testing.assert_close(keys[:, :, :21], exact.layers[0].keys, atol=0, rtol=0)


def test_latent_attention_keeps_latents_in_pages() -> None:
    """MLA stores latents and expands them later: pages hold the latents, attention is the model's own."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_shared_experts=1, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    model.generation_config.eos_token_id = None
    batch = left_padded(prompts((5, 9)))
    for num_beams, as_dict in itertools.product((1, 3), (False, True)):
        options = {
            "do_sample": False,
            "max_new_tokens": 8,
            "num_beams": num_beams,
            "return_dict_in_generate": as_dict,
        }
        dense = model.generate(**batch, **options)
        paged = model.generate(**batch, **options, cache_implementation="paged")
        sequences = (paged.sequences, dense.sequences) if as_dict else (paged, dense)
        assert torch.equal(*sequences)


def test_a_cache_whose_last_row_was_dropped_takes_no_other_until_it_is_reset(model: PreTrainedModel) -> None:
    """It still counts columns, so a new row would be taken for one that has stored them."""
    cache = PagedCache(model)
    model(BATCH, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="holds 0 rows"):
        model(BATCH, past_key_values=cache)
    cache.reset()
    model(BATCH, past_key_values=cache)
    assert cache.get_seq_length() == BATCH.shape[1]


def test_a_cache_that_could_not_grow_promises_no_block_that_a_layer_lacks(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer finds no memory; its caller goes on with shorter rows."""
    cache, grow, calls = PagedCache(plain, block_size=16), KVCache.grow, itertools.count(1)
    step(plain, cache, BATCH[:1, :16])

    def failing(self: KVCache, num_blocks: int) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        grow(self, num_blocks)

    monkeypatch.setattr(KVCache, "grow", failing)
    with pytest.raises(torch.OutOfMemoryError):
        step(plain, cache, BATCH[:1].repeat(1, 3))
    monkeypatch.undo()
    cache.reset()
    ids = BATCH[:1].repeat(1, 4)
    torch.testing.assert_close(step(plain, cache, ids), step(plain, DynamicCache(), ids), **TOLERANCE)


def test_rows_whose_tail_was_not_copied_are_not_read(plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out between a table and its bytes left rows that point to a block nobody had written."""
    plain.set_attn_implementation("hf_paged")
    cache = PagedCache(plain)
    step(plain, cache, BATCH[:1])
    twin = copy.deepcopy(cache)
    with monkeypatch.context() as patch:
        patch.setattr(PageStore, "copy_blocks", lambda *args: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            step(plain, twin, BATCH[:1, :1])
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        step(plain, twin, BATCH[:1, :1])
    step(plain, cache, BATCH[:1, :1])  # the other one is as it was
    twin.reset()
    step(plain, twin, BATCH[:1])
