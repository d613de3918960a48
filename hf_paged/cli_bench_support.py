"""What the bench commands share: options, the model, a table for people and one JSON line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_paged import cli_support as cli
from hf_paged.eval.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_paged.eval.machine import Machine

BenchModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model folder or hub name, or a shape with random weights: llama-2-7b, llama-2-13b, llama-2-70b, "
        "llama-3-8b, smollm2.",
        show_default=False,
    ),
]
_WORKLOADS = (
    "bN (N prompts of 512 tokens), longN (8,192), raggedN (128..1024; beyond 128 prompts also 16..512 new "
    "tokens each), shared-prefix (64 prompts, 2,048 tokens in common) or burst (256 ragged ones at once)"
)
WorkloadName = Annotated[str, typer.Option("--workload", help=f"{_WORKLOADS}.")]
Workloads = Annotated[
    list[str] | None, typer.Option("--workload", help=f"{_WORKLOADS}; may be repeated; default: ragged128.")
]
PromptTokens = Annotated[str | None, typer.Option(help="Another prompt length, e.g. 64, or range, e.g. 16..256.")]
OutputTokens = Annotated[
    str | None, typer.Option("--new-tokens", help="Another number of new tokens, e.g. 64, or range, e.g. 16..512.")
]
KVFormats = Annotated[
    list[str] | None, typer.Option("--kv-cache-dtype", help="Formats, e.g. auto,fp8,int8; default: auto.")
]
WeightBits = Annotated[
    int | None, typer.Option(min=2, max=8, help="Store the linears of a shape as GPTQ does, in groups of 128.")
]
MaxBatchedTokens = Annotated[int, typer.Option(help="Tokens per step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence; default: what the model was made for.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs after the warm-up; the median counts.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks; default: what the workload needs.")]


def load_model(model: str, *, dtype: str, device: str | None, weight_bits: int | None) -> PreTrainedModel:
    """A shape with random weights, or a model that is somewhere."""
    from hf_paged.eval.bench_models import SHAPES, load_bench_model  # not for --help

    cli.quiet_unless_terminal()
    name = model if model in SHAPES else cli.existing(model)
    return load_bench_model(name, dtype=dtype, device=cli.usable(device), weight_bits=weight_bits)


def make_table(title: str, *figures: str) -> Table:
    table = Table("system", "KV", title=title, title_justify="left")
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def report(
    table: Table, machine: Machine, works: Sequence[Workload], results: Sequence[Any], **facts: str | int | None
) -> None:
    cli.OUT.print(table)
    if hasattr(results[0], "ceiling"):
        cli.OUT.print("Ceiling: weights and live KV read once per step, prompts at the FLOP roof.")
    cli.OUT.print(str(machine), highlight=False)
    record = {
        **facts,
        "workloads": [
            {"name": work.name, "prompt_tokens": sum(work.prompt_lens), "new_tokens": work.generated_tokens}
            for work in works
        ],
        "machine": machine.name,
        "bytes_per_s": machine.bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "results": [result.as_dict() for result in results],
    }
    print(json.dumps(record))
