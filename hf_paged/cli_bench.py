"""`hf-paged bench throughput | latency | online | memory | kernels`: a table for people, then one JSON line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_paged import cli_support as cli
from hf_paged.cli_eval_support import KVScales, PlotFile, check_plot, formats_of
from hf_paged.config import EngineConfig
from hf_paged.eval.memory import BLOCK_SIZES, dense_waste, paged_waste
from hf_paged.eval.workload import Workload, make_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_paged.eval.machine import Machine

bench = typer.Typer(
    name="bench", help="Measure throughput, latency and KV memory.", no_args_is_help=True, rich_markup_mode=None
)


class Kernel(str, Enum):
    decode = "decode"
    prefill = "prefill"
    write = "write"


class Baseline(str, Enum):
    dense = "dense"
    native = "native"
    native_as_called = "native-as-called"


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


@bench.command()
@cli.plain_errors
def throughput(
    model: BenchModel,
    workload: Workloads = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: OutputTokens = None,
    baseline: Annotated[
        list[Baseline] | None,
        typer.Option(
            help="Also dense generate, native generate_batch with a bounded pool and tuned, or that with nothing set, "
            "which takes most of the memory; may be repeated."
        ),
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Also at temperature 0.8 and top-p 0.95.")] = False,
    repeats: Repeats = 5,
    kv_cache_dtype: KVFormats = None,
    kv_scales: KVScales = EngineConfig.kv_scales,
    weight_bits: WeightBits = None,
    block_size: cli.BlockSize = EngineConfig.block_size,
    num_blocks: NumBlocks = EngineConfig.num_blocks,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    max_num_batched_tokens: MaxBatchedTokens = EngineConfig.max_num_batched_tokens,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    plot: PlotFile = None,
) -> None:
    """Generated tokens per second, prefill included, and time per decode step, beside the least possible.

    Formats and workloads run one after the other, each told on stderr when it is done.
    """
    check_plot(plot)
    formats = formats_of(kv_cache_dtype, default="auto")
    options = cli.engine_options(dict(locals()) | {"kv_cache_dtype": None})
    lengths = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    works = [cli.checked(make_workload, {"name": name, **lengths}) for name in workload or ["ragged128"]]
    from hf_paged.eval.machine import measure_machine
    from hf_paged.eval.throughput import weight_sizes

    loaded = _load(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    machine = measure_machine(loaded.device, loaded.dtype)
    title = f"{model}, {', '.join(map(str, works))}"
    table = _table(title, "workload", "seconds", "range", "tokens/s", "of ceiling", "ms a step", "least")
    results = []
    others = [choice.value for choice in baseline or ()]
    for result in _throughputs(loaded, works, machine, formats, options, others, sampled=sampled, repeats=repeats):
        table.add_row(*_throughput_row(result))
        results.append(result)
        cli.ERR.print(", ".join(_throughput_row(result)), highlight=False)
    facts = {"model": model, "dtype": str(loaded.dtype), "weight_bits": weight_bits}
    _report(table, machine, works, results, **facts, **weight_sizes(loaded))
    if plot is not None:  # last: a picture that fails costs no result
        from hf_paged.eval.plots import plot_throughput

        plot_throughput([result.as_dict() for result in results], plot)


def _throughputs(
    model: PreTrainedModel,
    works: Sequence[Workload],
    machine: Machine,
    formats: Sequence[str],
    options: dict[str, Any],
    baselines: Sequence[str],
    **measuring: Any,
) -> Iterator[Any]:
    """Results, one by one; a terminal shows what is being measured."""
    from hf_paged.eval.throughput import make_llm, measure_throughput

    with cli.ERR.status("") as status:
        for kv_format in formats:
            status.update(f"building the engine, KV cache {kv_format}")
            llm = make_llm(model, works, options | {"kv_cache_dtype": kv_format})
            others = baselines if kv_format == formats[0] else []  # they know one cache
            for work in works:
                yield from measure_throughput(llm, work, machine, baselines=others, tell=status.update, **measuring)
            del llm  # its pages make room for the next


def _throughput_row(result: Any) -> tuple[str, ...]:
    steps = ("", "") if result.step_ms is None else (f"{result.step_ms:.2f}", f"{result.step_ceiling:.2f}")
    return (
        result.system,
        result.kv_cache,
        result.workload,
        f"{result.seconds:.3f}",
        f"{result.fastest:.3f}..{result.slowest:.3f}",
        f"{result.tokens_per_s:,.1f}",
        f"{result.tokens_per_s / result.ceiling:.1%} of {result.ceiling:,.0f}",
        *steps,
    )


@bench.command()
@cli.plain_errors
def latency(
    model: BenchModel,
    prompt_tokens: PromptTokens = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate; times between them count.")] = 128,
    dense: Annotated[bool, typer.Option("--dense", help="Also dense generate.")] = False,
    repeats: Repeats = 5,
    kv_cache_dtype: KVFormats = None,
    block_size: cli.BlockSize = EngineConfig.block_size,
    num_blocks: NumBlocks = EngineConfig.num_blocks,
    weight_bits: WeightBits = None,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    max_num_batched_tokens: MaxBatchedTokens = EngineConfig.max_num_batched_tokens,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
) -> None:
    """Time to the first token and between tokens of one prompt."""
    formats = formats_of(kv_cache_dtype, default="auto")
    options = cli.engine_options(dict(locals()) | {"kv_cache_dtype": None})
    work = cli.checked(make_workload, {"name": "b1", "prompt_tokens": prompt_tokens, "new_tokens": new_tokens})
    from hf_paged.eval.latency import measure_latency

    loaded = _load(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    results = []
    for kv_format in formats:
        machine, found = measure_latency(
            loaded, work, dense=dense and kv_format == formats[0], repeats=repeats,
            engine_options=options | {"kv_cache_dtype": kv_format},
        )  # fmt: skip
        results += found
    table = _table(f"{model}, {work}", "first token ms", "least", "p50 ms", "p90 ms", "p99 ms", "least")
    for result in results:
        figures = (
            result.first_token, result.first_ceiling, result.p50, result.p90, result.p99, result.ceiling,
        )  # fmt: skip
        table.add_row(result.system, result.kv_cache, *(f"{figure:.2f}" for figure in figures))
    _report(table, machine, [work], results, model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)


@bench.command()
@cli.plain_errors
def online(
    model: BenchModel,
    workload: WorkloadName = "ragged512",
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: all come at once.")] = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: OutputTokens = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs after the warm-up; all count.")] = 1,
    kv_cache_dtype: cli.KVCacheDType = EngineConfig.kv_cache_dtype,
    block_size: cli.BlockSize = EngineConfig.block_size,
    num_blocks: NumBlocks = EngineConfig.num_blocks,
    weight_bits: WeightBits = None,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    max_num_batched_tokens: MaxBatchedTokens = EngineConfig.max_num_batched_tokens,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
    plot: PlotFile = None,
) -> None:
    """Time to the first token and between tokens of requests that arrive over time (Poisson)."""
    options = cli.engine_options(dict(locals()))
    work = cli.checked(make_workload, {"name": workload, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens})
    from hf_paged.eval.online import check_rate, measure_online

    if rate is not None:
        cli.checked(check_rate, {"rate": rate})
    check_plot(plot)
    loaded = _load(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    machine, result = measure_online(
        loaded, work, rate=math.inf if rate is None else rate, engine_options=options, repeats=repeats
    )
    title = f"{model}, {work}, {'all at once' if rate is None else f'{rate:g} requests/s'}"
    table = _table(title, "tokens/s", "first ms, mean", "p50", "p99", "between ms, p50", "p99")
    figures = (result.first_mean, result.first_p50, result.first_p99, result.between_p50, result.between_p99)
    table.add_row(
        result.system, result.kv_cache, f"{result.tokens_per_s:,.0f}", *(f"{figure:,.2f}" for figure in figures)
    )
    _report(table, machine, [work], [result], model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)
    if plot is not None:
        from hf_paged.eval.plots import plot_online

        plot_online([result.as_dict() | {"label": title}], plot)


@bench.command()
@cli.plain_errors
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


@bench.command()
@cli.plain_errors
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


def _load(model: str, *, dtype: str, device: str | None, weight_bits: int | None) -> PreTrainedModel:
    """A shape with random weights, or a model that is somewhere."""
    from hf_paged.eval.bench_models import SHAPES, load_bench_model  # not for --help

    cli.quiet_unless_terminal()
    name = model if model in SHAPES else cli.existing(model)
    return load_bench_model(name, dtype=dtype, device=cli.usable(device), weight_bits=weight_bits)


def _table(title: str, *figures: str) -> Table:
    table = Table("system", "KV", title=title, title_justify="left")
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def _report(
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
