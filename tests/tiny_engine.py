"""Tiny models, prompts for them, and an engine that runs these."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from hf_paged import LLM, RequestOutput, SamplingParams
from hf_paged.engine import Engine
from hf_paged.engine_registry import ENGINES

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (5, 40, 70, 33, 1, 64)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
}


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def tiny_mistral() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)).eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 120, (n,), generator=generator).tolist() for n in LENGTHS]


def llm(model: PreTrainedModel, **options: object) -> LLM:
    return LLM(model, **{"num_blocks": 120, "block_size": 16, **options})  # type: ignore[arg-type]  # mixed values


def engine_of(model: PreTrainedModel) -> Engine | None:
    """What `generate()` keeps for a model."""
    slot = ENGINES._slots.get(model)
    return None if slot is None else slot.engine


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(o.finished and o.error is None for o in outputs)
    return [o.outputs[0].token_ids for o in outputs]


def run(model: PreTrainedModel, params: SamplingParams = GREEDY, **options: object) -> list[list[int]]:
    engine = llm(model, **options)
    result = tokens(engine.generate(prompts(), params, use_tqdm=False))
    scheduler = engine.engine.scheduler
    scheduler.check_integrity()
    assert not engine.engine.has_work
    return result
