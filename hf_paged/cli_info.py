"""`hf-paged info`: what a model's KV cache costs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hf_paged import cli_support as cli

if TYPE_CHECKING:
    from hf_paged.info import LayerKind, ModelInfo

MIB = 2**20


def info(
    model: cli.Model,
    json_output: cli.JSONOutput = False,
    fusion: Annotated[
        bool | None,
        typer.Option("--fusion/--no-fusion", help="Load the weights and run the fusion pass; default: on a GPU."),
    ] = None,
    protection: Annotated[
        bool | None,
        typer.Option(
            "--protection/--no-protection",
            help="Load the weights and calibrate, to show which layers are stored finer; default: on a GPU.",
        ),
    ] = None,
    kv_scales: Annotated[
        Path | None,
        typer.Option(help="Take the protection from a file of `hf-paged calibrate`.", exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Show layers, KV bytes per token and how many tokens fit.

    By KV format, on this machine; also what is fused, and which layers are stored finer.
    """
    from hf_paged.info import model_info  # not for --help

    cli.quiet_unless_terminal()
    scales = None if kv_scales is None else str(kv_scales)
    found = model_info(cli.existing(model), fusion=fusion, protection=protection, kv_scales=scales)
    if json_output:
        print(json.dumps(found.as_dict()))
        return
    cli.OUT.print(
        f"{found.architecture}, {found.num_parameters / 1e6:,.1f} M parameters, {found.weight_bytes / MIB:,.0f} MiB of "
        f"weights, {found.dtype}, context {found.max_model_len:,}",
        highlight=False,
    )
    cli.OUT.print(_layers(found.layers))
    cli.OUT.print(_kv_cache(found))
    for name, reason in found.refused.items():
        cli.OUT.print(f"{name}: {reason}", markup=False, highlight=False)
    cli.OUT.print(str(found.fusion), markup=False, highlight=False)


def _layers(kinds: list[LayerKind]) -> Table:
    table = Table(title="attention layers", title_justify="left")
    for name in ("layers", "heads", "KV heads", "head dim", "window", "softcap", "sinks"):
        table.add_column(name, justify="right")
    for kind in kinds:
        head_dim = f"{kind.head_dim}" if kind.head_dim == kind.v_head_dim else f"{kind.head_dim} / {kind.v_head_dim}"
        table.add_row(
            str(kind.num_layers),
            str(kind.num_heads),
            str(kind.kv_heads),
            head_dim,
            "all" if kind.window is None else f"{kind.window:,}",
            "-" if kind.softcap is None else f"{kind.softcap:g}",
            "yes" if kind.has_sinks else "-",
        )
    return table


def _kv_cache(found: ModelInfo) -> Table:
    table = Table(title=f"KV cache ({found.memory}, {found.kv_bytes / MIB:,.0f} MiB for blocks)", title_justify="left")
    measured = any(cost.protection is not None for cost in found.kv_cache)
    for name in ("kv_cache_dtype", "bytes per token", "tokens that fit", "kv_recent_block"):
        table.add_column(name, justify="right")
    if measured:
        table.add_column("protected")
    for cost in found.kv_cache:
        recent = f"{cost.recent_block_bytes / MIB:,.2f} MiB a sequence" if cost.recent_block_bytes else "-"
        cells = [cost.kv_cache_dtype, f"{cost.bytes_per_token:,.0f}", f"{cost.tokens_that_fit:,}", recent]
        table.add_row(*cells, *([cost.protection or "none"] if measured else []))
    if not measured:
        table.caption = "before any protection of layers: --protection measures it"
    return table
