"""What a benchmark runs: how many prompts, how long, how many new tokens, and what that costs at least."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged.eval.machine import Machine

UNIFORM_LEN = (512, 512)
RAGGED_LEN = (128, 1024)
NAMED = ("b1", "b16", "b64", "ragged128")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`prompt_lens` in tokens; every prompt gets exactly `new_tokens` more."""

    name: str
    prompt_lens: tuple[int, ...]
    new_tokens: int

    @property
    def generated_tokens(self) -> int:
        return len(self.prompt_lens) * self.new_tokens

    @property
    def longest(self) -> int:
        return max(self.prompt_lens) + self.new_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same for the same workload."""
        generator = random.Random(1)
        return [[generator.randrange(vocab_size) for _ in range(length)] for length in self.prompt_lens]


def make_workload(name: str, *, prompt_tokens: str | None = None, new_tokens: int = 128) -> Workload:
    """`bN`: N prompts of 512 tokens; `raggedN`: N prompts of 128..1024 tokens, uniform, seed 0.

    Args:
        prompt_tokens: another length ("256") or range ("16..256").

    Raises:
        ValueError: a name or range of another form.
    """
    match = re.fullmatch(r"(b|ragged)([1-9]\d*)", name)
    if match is None:
        raise ValueError(f"workload {name!r} is unknown; allowed: bN and raggedN, such as {', '.join(NAMED)}")
    low, high = UNIFORM_LEN if match[1] == "b" else RAGGED_LEN
    if prompt_tokens is not None:
        low, high = parse_range(prompt_tokens)
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens} is not allowed; allowed: an integer >= 1")
    generator = random.Random(0)
    lens = tuple(generator.randint(low, high) for _ in range(int(match[2])))
    return Workload(name=name, prompt_lens=lens, new_tokens=new_tokens)


def parse_range(text: str) -> tuple[int, int]:
    """ "256" -> (256, 256), "16..256" -> (16, 256). Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)(?:\.\.([1-9]\d*))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise ValueError(f"a length is a number or a range such as 16..256, not {text!r}")
    return low, high


def least_seconds(
    machine: Machine,
    prompt_lens: Sequence[int],
    new_tokens: int,
    *,
    linear_parameters: int,
    weight_bytes: int,
    kv_bytes_per_token: float,
) -> float:
    """The roof: prompts at the FLOP roof, then every step reads all weights and live KV once, or computes, if longer.

    Attention FLOPs and everything that is not a matrix product are left out, so no system can be faster than this.
    """
    flops_per_token = 2 * linear_parameters
    prefill = flops_per_token * sum(prompt_lens) / machine.flops_per_s
    live = (sum(prompt_lens) + len(prompt_lens) * new_tokens / 2) * kv_bytes_per_token  # mean over the steps
    read = (weight_bytes + live) / machine.bytes_per_s
    compute = flops_per_token * len(prompt_lens) / machine.flops_per_s
    return prefill + (new_tokens - 1) * max(read, compute)
