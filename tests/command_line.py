"""What the tests of the command line share: a run of it, and a model for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_tokenizer import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from hf_paged.cli import app

LAYERS, KV_HEADS, HEAD_DIM, VOCAB = 2, 2, 16, 97
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def save_model(folder: Path) -> Path:
    """A random two-layer Llama with a character tokenizer and a chat template, in `folder`."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
