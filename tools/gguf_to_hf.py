"""Turn a Llama GGUF file with a byte-level BPE into an ordinary Transformers folder.

Written for the demo model, so it knows what that file needs and refuses the rest: architecture `llama`, tokenizer
model `gpt2` with pre-tokenizer `smollm`, tied embeddings. The blocks are multiplied out to bf16, so the folder
computes what the quantized file computes, not what the original release computed. Transformers can read GGUF itself,
but will not save the result, and its GGUF tokenizer splits some texts differently from the published one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

CONTROL_TOKEN = 3  # ggml's token type for special tokens
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_path: Path, out_dir: Path) -> None:
    """Write config, tokenizer and bf16 safetensors of `gguf_path` into `out_dir`.

    Raises:
        ValueError: the file is not the kind of GGUF described above.
    """
    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    for key, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if meta.get(key) != wanted:
            raise ValueError(f"{gguf_path.name}: {key} is {meta.get(key)!r}, only {wanted!r} can be converted")
    out_dir.mkdir(parents=True, exist_ok=True)
    config = _config(meta)
    config.save_pretrained(out_dir)
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(out_dir)
    _tokenizer(meta).save_pretrained(out_dir)
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    state = {_hf_name(tensor.name): _weight(tensor, heads) for tensor in reader.tensors}
    save_file(state, out_dir / "model.safetensors", metadata={"format": "pt"})


def _config(meta: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=round(meta["llama.attention.layer_norm_rms_epsilon"], 12),  # the file holds it as float32
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": every digit is a token of its own, then the byte-level split of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        model_max_length=meta["llama.context_length"],
        chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        return f"{MODULES[name.removesuffix('.weight')]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_MODULES[part]}.weight"


def _weight(tensor: Any, heads: dict[str, int]) -> Tensor:
    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    part = tensor.name.split(".")[-2]
    if part in heads:  # GGUF keeps rotary pairs side by side, Transformers half a head apart
        weight = weight.view(heads[part], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight.to(torch.bfloat16).contiguous()
