"""What a benchmark runs: how many prompts, how long, how many new tokens, and what that costs at least."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged.eval.machine import Machine

UNIFORM_LEN = (512, 512)
RAGGED_LEN = (128, 1024)
LONG_LEN = (8192, 8192)
RAGGED_OUTPUTS = (16, 512)
NAMED = ("b1", "b16", "b64", "b256", "long16", "ragged128", "ragged512", "shared-prefix", "burst")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are all there at the start.

    Args:
        prompt_lens: prompt tokens of each request, `common_prefix` included.
        output_lens: new tokens of each request, no fewer and no more.
        common_prefix: leading tokens that all prompts have in common.
        max_num_seqs: how many may run at once; None: as many as there are.
    """

    name: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    common_prefix: int = 0
    max_num_seqs: int | None = None

    @property
    def generated_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def total_lens(self) -> list[int]:
        return [prompt + output for prompt, output in zip(self.prompt_lens, self.output_lens, strict=True)]

    @property
    def longest(self) -> int:
        return max(self.total_lens)

    def most_blocks(self, block_size: int) -> int:
        """KV blocks that hold all requests that run at the same time, in one KV group."""
        running = sorted(self.total_lens)[-(self.max_num_seqs or 0) :]
        return sum(-(-length // block_size) for length in running)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same for the same workload."""
        generator = random.Random(1)
        common = [generator.randrange(vocab_size) for _ in range(self.common_prefix)]
        return [
            common + [generator.randrange(vocab_size) for _ in range(length - len(common))]
            for length in self.prompt_lens
        ]

    def __str__(self) -> str:
        shared = f", the first {self.common_prefix} in common" if self.common_prefix else ""
        running = f", at most {self.max_num_seqs} running" if self.max_num_seqs else ""
        return (
            f"{self.name}: {len(self.prompt_lens)} prompts of {_span(self.prompt_lens)} tokens{shared}, "
            f"{_span(self.output_lens)} new tokens each{running}"
        )


def _span(lens: Sequence[int]) -> str:
    low, high = min(lens), max(lens)
    return f"{low}" if low == high else f"{low}..{high}"


def make_workload(name: str, *, prompt_tokens: str | None = None, new_tokens: str | int | None = None) -> Workload:
    """A workload by name; lengths are uniform, seed 0, and 128 new tokens each where nothing else is said.

        bN              N prompts of 512 tokens
        longN           N prompts of 8,192 tokens
        raggedN         N prompts of 128..1024 tokens; beyond 128 of them with 16..512 new tokens, 128 running at most
        shared-prefix   64 prompts of 2,048 common tokens and 32 of their own
        burst           256 prompts of 128..1024 tokens with 16..512 new tokens, all running

    Args:
        prompt_tokens: another prompt length ("256") or range ("16..256"); for shared-prefix that of the own part.
        new_tokens: another number of new tokens, or range.

    Raises:
        ValueError: a name, length or range of another form.
    """
    match = re.fullmatch(r"(b|long|ragged)([1-9]\d*)|shared-prefix|burst", name)
    if match is None:
        raise ValueError(
            f"workload {name!r} is unknown; allowed: bN, longN, raggedN, shared-prefix and burst, such as "
            f"{', '.join(NAMED)}"
        )
    count = int(match[2]) if match[2] else {"shared-prefix": 64, "burst": 256}[name]
    common, own = (2048, (32, 32)) if name == "shared-prefix" else (0, RAGGED_LEN)
    varied = name == "burst" or (match[1] == "ragged" and count > 128)
    prompt_range = {"b": UNIFORM_LEN, "long": LONG_LEN}.get(match[1], own)
    if prompt_tokens is not None:
        prompt_range = parse_range(prompt_tokens)
    output_range = RAGGED_OUTPUTS if varied else (128, 128)
    if new_tokens is not None:
        output_range = parse_range(str(new_tokens))
    generator = random.Random(0)
    prompt_lens = tuple(common + generator.randint(*prompt_range) for _ in range(count))
    return Workload(
        name=name,
        prompt_lens=prompt_lens,
        output_lens=tuple(generator.randint(*output_range) for _ in range(count)),
        common_prefix=common,
        max_num_seqs=128 if match[1] == "ragged" and count > 128 else None,
    )


def parse_range(text: str) -> tuple[int, int]:
    """ "256" -> (256, 256), "16..256" -> (16, 256). Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)(?:\.\.([1-9]\d*))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise ValueError(f"a length is a number >= 1 or a range such as 16..256, not {text!r}")
    return low, high


def least_seconds(
    machine: Machine,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    linear_parameters: int,
    head_parameters: int,
    weight_bytes: int,
    head_bytes: int,
    kv_bytes_per_token: float,
    max_num_seqs: int | None = None,
    common_prefix: int = 0,
) -> float:
    """The roof: prompts at the FLOP roof, a common prefix once, then steps, the sum of what their operations take.

    Of a prompt only the last token goes through the head. Every new token reads all keys and values before it. There
    are as many steps as the longest output takes, or as `max_num_seqs` rows need for all tokens. Attention FLOPs and
    everything that is not a matrix product are left out. Faster could be only what reads for one operation while it
    computes another.
    """
    prompt_tokens = sum(prompt_lens) - common_prefix * (len(prompt_lens) - 1)
    prompt_products = (linear_parameters - head_parameters) * prompt_tokens + head_parameters * len(prompt_lens)
    prefill = 2 * prompt_products / machine.flops_per_s
    decoded = sum(output_lens) - len(output_lens)  # the first token of each comes with its prompt
    steps = max(max(output_lens) - 1, -(-decoded // (max_num_seqs or len(output_lens))))
    live = sum((output - 1) * (prompt + output / 2) for prompt, output in zip(prompt_lens, output_lens, strict=True))
    tokens = decoded / max(steps, 1)
    products = least_products(
        machine, tokens, tokens, linear_parameters=linear_parameters, head_parameters=head_parameters,
        weight_bytes=weight_bytes, head_bytes=head_bytes,
    )  # fmt: skip
    return prefill + steps * products + live * kv_bytes_per_token / machine.bytes_per_s


def least_products(
    machine: Machine,
    tokens: float,
    head_tokens: float,
    *,
    linear_parameters: int,
    head_parameters: int,
    weight_bytes: int,
    head_bytes: int,
) -> float:
    """Seconds of the products of a step, layers of `tokens` and the head of `head_tokens`: each is read or computed,
    whichever takes longer.
    """
    layers = (weight_bytes - head_bytes, (linear_parameters - head_parameters) * tokens)
    head = (head_bytes, head_parameters * head_tokens)
    return sum(max(read / machine.bytes_per_s, 2 * products / machine.flops_per_s) for read, products in (layers, head))
