"""The demo: a ragged batch of real prompts through the paged INT8 engine, and its KV cache beside a dense one.

python tools/demo.py MODEL [--kv-cache-dtype int8] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

import hf_paged

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three things to pack for a rainy hike.",
    "Translate to French: Good morning, where is the library?",
    "Complete the story: The old lighthouse keeper heard a knock at the door, though no boat had come for a month. "
    "He put down his pipe, took the lamp from its hook and went slowly down the hundred and twelve steps.",
    "Here are the notes of a meeting. Anna: the release slips by a week, since the importer loses dates before 1970. "
    "Ben: the importer is fixed, tests run until Thursday. Anna: then Friday. Carla: the manual still shows the old "
    "menu, I need two days. Ben: we can ship the manual later. Anna: no, both on Friday. Who does what until when?",
    "Write a Python function that returns the n-th Fibonacci number.",
]
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="A ragged batch through the paged engine.")
    parser.add_argument("model")
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    console = Console()
    llm = hf_paged.LLM(args.model, kv_cache_dtype=args.kv_cache_dtype)
    params = hf_paged.SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    start = time.perf_counter()
    outputs = llm.chat(chats, params)
    seconds = time.perf_counter() - start

    texts = Table("prompt", "tokens", "answer", title=args.model, show_lines=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        texts.add_row(prompt, str(len(output.prompt_token_ids)), output.outputs[0].text.strip())
    console.print(texts)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    console.print(f"{generated} tokens in {seconds:.2f} s: {generated / seconds:.1f} tokens/s on {llm.engine.device}\n")
    console.print(kv_bytes(llm, outputs))


def kv_bytes(llm: hf_paged.LLM, outputs: list[hf_paged.RequestOutput]) -> Table:
    """What the batch needs at its longest: whole blocks here, rows padded to the longest in a dense cache."""
    cache = llm.engine.kv_cache
    lens = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs]
    blocks = sum(-(-length // cache.block_size) for length in lens) * len(cache.groups)
    dense_token = sum(s.kv_heads * (s.head_dim + s.v_head_dim) * s.dtype.itemsize for s in cache.specs)
    paged, dense = blocks * cache.block_bytes, len(lens) * max(lens) * dense_token
    table = Table("KV cache", "bytes per token", "token slots", "MiB", "of dense", title="the whole batch at its end")
    table.add_row("dense, padded", f"{dense_token:,}", f"{len(lens) * max(lens):,}", f"{dense / MIB:.2f}", "100%")
    slots = blocks // len(cache.groups) * cache.block_size
    name = f"paged, {llm.engine.config.kv_cache_dtype}"
    table.add_row(name, f"{cache.bytes_per_token:,.0f}", f"{slots:,}", f"{paged / MIB:.2f}", f"{paged / dense:.0%}")
    return table


if __name__ == "__main__":
    main()
