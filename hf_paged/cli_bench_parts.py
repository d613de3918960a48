"""`hf-paged bench memory | kernels`: what is measured without a model."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer
from rich.table import Table

from hf_paged import cli_support as cli
from hf_paged.cli_bench_support import WorkloadName
from hf_paged.config import EngineConfig
from hf_paged.eval.memory import BLOCK_SIZES, dense_waste, paged_waste
from hf_paged.eval.workload import make_workload


class Kernel(str, Enum):
    decode = "decode"
    prefill = "prefill"
    write = "write"


def memory(
    workload: WorkloadName = "ragged64",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt length or range.")] = "256..2048",
    new_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens that every prompt generates; may be repeated.")
    ] = None,
) -> None:
    """KV slots that a ragged batch holds but does not use.

    For every block size, and for a padded dense cache, by how many tokens every prompt generates: 128, 512 and 1,024
    where nothing else is said. Needs no model: the lengths decide.
    """
    counts = new_tokens or [128, 512, 1024]
    work = cli.checked(make_workload, {"name": workload, "prompt_tokens": prompt_tokens, "new_tokens": counts[0]})
    table = Table(title=f"{work.name}: {len(work.prompt_lens)} prompts of {prompt_tokens} tokens", title_justify="left")
    for name in ("KV cache", "new tokens", "slots at the peak", "unused", "unused over the run"):
        table.add_column(name, justify="left" if name == "KV cache" else "right")
    records = []
    for count in counts:
        wastes = [paged_waste(work.prompt_lens, count, block_size) for block_size in BLOCK_SIZES]
        for waste in (*wastes, dense_waste(work.prompt_lens, count)):
            shares = (f"{waste.peak_slots:,}", f"{waste.peak_share:.2%}", f"{waste.run_share:.2%}")
            table.add_row(waste.cache, f"{count:,}", *shares)
            records.append({"new_tokens": count, **waste.as_dict()})
        table.add_section()
    cli.OUT.print(table)
    cli.OUT.print("A block size of B leaves (B - 1) / 2 slots per request unused on average; the least possible is 0.")
    print(json.dumps({"workload": work.name, "caches": records}))


def kernels(
    what: Annotated[list[Kernel] | None, typer.Option("--what", help="May be repeated; default: all.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="mha, gqa4, gqa8; may be repeated; default: all.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be repeated; default: 128.")] = None,
    kv_format: Annotated[
        list[str] | None,
        typer.Option("--format", help="bf16, fp16, int8, fp8, int4; may be repeated; default: bf16, int8, fp8."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="One case instead of the list.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens per sequence, with --batch.")] = 4096,
    block_size: cli.BlockSize = EngineConfig.block_size,
    sweep: Annotated[bool, typer.Option("--sweep", help="Other launch configurations too.")] = False,
) -> None:
    """Attention and page-write kernels of this GPU beside its read bandwidth and torch's flash attention."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench kernels measures a CUDA GPU, and PyTorch finds none on this machine")
    from hf_paged.eval.kernels_bench import KernelBench, read_bandwidth  # Triton exists on Linux only

    chosen = {"shapes": shape, "head_dims": head_dim, "formats": kv_format, "case": batch and (batch, context)}
    options = {name: tuple(value) for name, value in chosen.items() if value}
    run = cli.checked(KernelBench, {**options, "block_size": block_size, "sweep": sweep})
    bandwidth = read_bandwidth()
    table = Table("kernel", "shape", "head_dim", "batch x context", "KV", "variant")
    for name in ("us", "TB/s or TFLOP/s", "of read bandwidth"):
        table.add_column(name, justify="right")
    rows = []
    with cli.ERR.status("measuring"):
        for row in run.rows([kernel.value for kernel in what or Kernel], bandwidth):
            rows.append(row)
            rate = f"{row['tflop_s']:.0f} TFLOP/s" if "tflop_s" in row else f"{row['tb_s']:.2f} TB/s"
            share = f"{row['percent']:.0f}%" if "percent" in row else ""
            case = f"{row['batch']:,} x {row['context']:,}"
            figures = (f"{row['us']:.1f}", rate, share)
            table.add_row(
                row["kernel"], row["shape"], str(row["head_dim"]), case, row["format"], row["variant"], *figures
            )
    cli.OUT.print(table)
    cli.OUT.print(f"Ceiling: codes and scales of the live tokens read at {bandwidth:.2f} TB/s.", highlight=False)
    print(json.dumps({"read_tb_s": bandwidth, "rows": rows}))
