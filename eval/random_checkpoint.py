"""Write a random-weight AWQ or GPTQ checkpoint of any Llama shape, to measure loading, memory and speed without a
download.

    python -m hf_paged.eval.random_checkpoint OUT --shape llama-2-70b --format gptq --group-size 128

One layer is made at a time (on the GPU if there is one) and is one shard; a few are written at once, so a 70B
checkpoint needs the memory of that many layers. Codes are uniform: every random word is a packed weight. Scales are
such that a layer keeps the size of its input; the text is nonsense. With act-order the linears of one input sort it
alike, as the Hessian that they share makes them do in real files.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_paged.quant.packing import pack_awq_words, pack_words, words_for

_WRITERS = 4  # shards being written at once


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    max_positions: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": LlamaShape(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocab=512),
    "llama-2-7b": LlamaShape(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32),
    "llama-2-13b": LlamaShape(hidden=5120, intermediate=13824, layers=40, heads=40, kv_heads=40),
    "llama-3-8b": LlamaShape(
        hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256, max_positions=8192
    ),
    "llama-2-70b": LlamaShape(hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8),
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the linears are stored."""

    method: str = "gptq"  # gptq | awq
    bits: int = 4
    group_size: int = 128  # -1: one group over all input channels
    symmetric: bool = True
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.method not in ("gptq", "awq"):
            raise ValueError(f"method {self.method!r}: expected gptq or awq")
        if self.method == "awq" and (self.bits != 4 or self.act_order):
            raise ValueError("awq: expected 4 bits and no act-order")


def write_checkpoint(out: Path, shape: LlamaShape, form: Format, *, dtype: str = "float16", seed: int = 0) -> None:
    """Write config.json, one shard per layer, one for embeddings and head, and the index into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)
    shards = shape.layers + 1
    weight_map: dict[str, str] = {}
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_WRITERS) as pool:
        for index in range(shards):
            name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
            made = _ends(shape, generator) if index == shape.layers else dict(_layer(index, shape, form, generator))
            tensors = {
                key: (value if "scales" in key or not value.is_floating_point() else value.to(getattr(torch, dtype)))
                .cpu()
                .contiguous()
                for key, value in made.items()
            }
            if len(writing) == _WRITERS:
                writing.popleft().result()
            writing.append(pool.submit(save_file, tensors, out / name, metadata={"format": "pt"}))
            weight_map.update(dict.fromkeys(tensors, name))
        for shard in writing:
            shard.result()
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (out / "config.json").write_text(json.dumps(_config(shape, form, dtype), indent=2))


def _layer(index: int, shape: LlamaShape, form: Format, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    prefix, kv = f"model.layers.{index}", shape.kv_heads * shape.head_dim
    groups = (  # input channels, and what reads them
        (shape.hidden, {"self_attn.q_proj": shape.hidden, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
        (shape.hidden, {"self_attn.o_proj": shape.hidden}),
        (shape.hidden, {"mlp.gate_proj": shape.intermediate, "mlp.up_proj": shape.intermediate}),
        (shape.intermediate, {"mlp.down_proj": shape.hidden}),
    )
    for k, readers in groups:
        g_idx = _group_index(k, form, generator)
        for name, n in readers.items():
            for suffix, tensor in random_linear(n, g_idx, form, generator).items():
                yield f"{prefix}.{name}.{suffix}", tensor
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", torch.ones(shape.hidden)


def _group_index(k: int, form: Format, generator: torch.Generator) -> Tensor:
    """`[k]` int32: the group of each input channel."""
    g_idx = torch.arange(k, device=generator.device, dtype=torch.int32) // (
        k if form.group_size == -1 else form.group_size
    )
    return g_idx[torch.randperm(k, generator=generator, device=generator.device)] if form.act_order else g_idx


def random_linear(n: int, g_idx: Tensor, form: Format, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of one random linear `[n, k]` in `form`'s layout, by suffix; `g_idx` `[k]`."""
    k, groups, levels = len(g_idx), int(g_idx.max()) + 1, 1 << form.bits
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    spread = (levels**2 / 12) ** 0.5  # standard deviation of the codes
    scales = ((torch.rand((groups, n), **options) * 0.5 + 0.75) / spread / k**0.5).half()
    zeros = torch.full((groups, n), levels // 2, dtype=torch.uint8, device=generator.device)
    if not form.symmetric:
        zeros = torch.randint(levels // 2 - 1, levels // 2 + 1, (groups, n), dtype=torch.uint8, **options)
    awq = form.method == "awq"
    words = (k, n // 8) if awq else (words_for(k, form.bits), n)
    out = {
        "qweight": torch.randint(-(2**31), 2**31, words, dtype=torch.int32, **options),
        "qzeros": pack_awq_words(zeros) if awq else pack_words(zeros - 1, form.bits),
        "scales": scales,
    }
    return out if awq else {**out, "g_idx": g_idx.clone()}  # a file holds each tensor apart


def _ends(shape: LlamaShape, generator: torch.Generator) -> dict[str, Tensor]:
    """Embeddings, head and last norm."""

    def table() -> Tensor:
        return torch.randn((shape.vocab, shape.hidden), generator=generator, device=generator.device) * 0.02

    return {
        "model.embed_tokens.weight": table(),
        "lm_head.weight": table(),
        "model.norm.weight": torch.ones(shape.hidden),
    }


def _config(shape: LlamaShape, form: Format, dtype: str) -> dict[str, object]:
    quantization: dict[str, object] = {"quant_method": form.method, "bits": form.bits, "group_size": form.group_size}
    if form.method == "awq":
        quantization |= {"version": "gemm", "zero_point": not form.symmetric, "modules_to_not_convert": None}
    else:
        quantization |= {"sym": form.symmetric, "desc_act": form.act_order, "checkpoint_format": "gptq"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": quantization,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random-weight quantized Llama checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--format", choices=("gptq", "awq"), default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape] if args.layers is None else replace(SHAPES[args.shape], layers=args.layers)
    form = Format(
        method=args.format,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        act_order=args.act_order,
    )
    write_checkpoint(args.out, shape, form, dtype=args.dtype, seed=args.seed)


if __name__ == "__main__":
    main()
