"""`hf-paged bench throughput | latency | online | steps | start | memory | kernels`: a table for people, then one JSON
line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_paged import cli_support as cli
from hf_paged.cli_bench_parts import kernels, memory
from hf_paged.cli_bench_support import (
    BenchModel,
    KVFormats,
    MaxBatchedTokens,
    MaxModelLen,
    NumBlocks,
    OutputTokens,
    PromptTokens,
    Repeats,
    WeightBits,
    WorkloadName,
    Workloads,
    load_model,
    make_table,
    report,
)
from hf_paged.cli_eval_support import KVScales, PlotFile, check_plot, formats_of
from hf_paged.config import EngineConfig
from hf_paged.eval.workload import Workload, make_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_paged.eval.machine import Machine

bench = typer.Typer(
    name="bench", help="Measure throughput, latency and KV memory.", no_args_is_help=True, rich_markup_mode=None
)


class Baseline(str, Enum):
    paged_generate = "paged-generate"
    dense = "dense"
    native = "native"
    native_tuned = "native-tuned"
    native_as_called = "native-as-called"


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
            help="Also generate with our cache, dense generate, native generate_batch with a bounded pool and tuned, "
            "tuned alone, or with nothing set, which takes most of the memory; may be repeated."
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

    loaded = load_model(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    machine = measure_machine(loaded.device, loaded.dtype)
    title = f"{model}, {', '.join(map(str, works))}"
    table = make_table(title, "workload", "seconds", "range", "tokens/s", "of ceiling", "ms a step", "least")
    results = []
    others = [choice.value for choice in baseline or ()]
    for result in _throughputs(loaded, works, machine, formats, options, others, sampled=sampled, repeats=repeats):
        table.add_row(*_throughput_row(result))
        results.append(result)
        cli.ERR.print(", ".join(_throughput_row(result)), highlight=False)
    facts = {"model": model, "dtype": str(loaded.dtype), "weight_bits": weight_bits}
    report(table, machine, works, results, **facts, **weight_sizes(loaded))
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

    loaded = load_model(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    results = []
    for kv_format in formats:
        machine, found = measure_latency(
            loaded, work, dense=dense and kv_format == formats[0], repeats=repeats,
            engine_options=options | {"kv_cache_dtype": kv_format},
        )  # fmt: skip
        results += found
    table = make_table(f"{model}, {work}", "first token ms", "least", "p50 ms", "p90 ms", "p99 ms", "least")
    for result in results:
        figures = (
            result.first_token, result.first_ceiling, result.p50, result.p90, result.p99, result.ceiling,
        )  # fmt: skip
        table.add_row(result.system, result.kv_cache, *(f"{figure:.2f}" for figure in figures))
    report(table, machine, [work], results, model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)


@bench.command()
@cli.plain_errors
def online(
    model: BenchModel,
    workload: WorkloadName = "ragged512",
    rate: Annotated[float | None, typer.Option(help="Requests per second; default: all come at once.")] = None,
    load: Annotated[
        float | None, typer.Option(help="All at once, then arriving at this share of that rate, e.g. 0.6.")
    ] = None,
    arrivals: Annotated[
        int | None, typer.Option(min=1, help="How many of the requests arrive over time; default: all.")
    ] = None,
    prompt_tokens: PromptTokens = None,
    new_tokens: OutputTokens = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs after the warm-up; all count.")] = 1,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Default: where prompts share a prefix.")
    ] = None,
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
    from hf_paged.eval.online import measure_online

    _check_arrivals(work, rate, load, arrivals)
    if plot is not None and max(work.output_lens) < 2:
        raise typer.BadParameter("--plot draws the times between tokens; allowed: with two new tokens or more")
    check_plot(plot)
    loaded = load_model(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    machine, results = measure_online(
        loaded, work, rate=math.inf if rate is None else rate, load=load, arrivals=arrivals, engine_options=options,
        repeats=repeats,
    )  # fmt: skip
    table = make_table(
        f"{model}, {work}", "requests", "a second", "tokens/s", "of ceiling", "first ms, mean", "p50", "p99",
        "between ms, p50", "p99",
    )  # fmt: skip
    for result in results:
        rates = ("at once" if math.isinf(result.rate) else f"{result.rate:.4g}", f"{result.tokens_per_s:,.0f}")
        share = "" if result.ceiling is None else f"{result.tokens_per_s / result.ceiling:.1%} of {result.ceiling:,.0f}"
        times = (result.first_mean, result.first_p50, result.first_p99, result.between_p50, result.between_p99)
        row = (result.system, result.kv_cache, f"{result.requests}", *rates, share)
        table.add_row(*row, *("-" if milliseconds is None else f"{milliseconds:,.2f}" for milliseconds in times))
    report(table, machine, [work], results, model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)
    if plot is not None:
        from hf_paged.eval.plots import plot_online

        plot_online([result.as_dict() | {"label": f"{model}, {result.requests} requests"} for result in results], plot)


def _check_arrivals(work: Workload, rate: float | None, load: float | None, arrivals: int | None) -> None:
    from hf_paged.eval.online import check_load, check_rate

    if rate is not None and load is not None:
        raise typer.BadParameter(f"rate={rate} and load={load} both say how often requests come; allowed: one of them")
    if rate is not None:
        cli.checked(check_rate, {"rate": rate})
    if load is not None:
        cli.checked(check_load, {"load": load})
    if arrivals is not None and arrivals > (most := len(work.prompt_lens)):
        raise typer.BadParameter(f"arrivals={arrivals} is not allowed; allowed: the {most} requests of {work.name}")


@bench.command()
@cli.plain_errors
def steps(
    model: BenchModel,
    running: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests that decode; may be repeated; default: 1, 64 and 128.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of their prompts.")] = 512,
    beside: Annotated[int, typer.Option(min=0, help="Also beside a new prompt of so many tokens in every step.")] = 0,
    kv_cache_dtype: KVFormats = None,
    block_size: cli.BlockSize = EngineConfig.block_size,
    num_blocks: NumBlocks = EngineConfig.num_blocks,
    weight_bits: WeightBits = None,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
) -> None:
    """Time of a step by the clock and of the host, and how long the device is idle in it."""
    counts = running or [1, 64, 128]
    formats = formats_of(kv_cache_dtype, default="auto")
    options = cli.engine_options(dict(locals()) | {"kv_cache_dtype": None})
    from hf_paged.eval.machine import measure_machine
    from hf_paged.eval.steps import measure_steps, steps_workload
    from hf_paged.eval.throughput import make_llm

    loaded = load_model(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    machine = measure_machine(loaded.device, loaded.dtype)
    work = steps_workload(max(counts), context=prompt_tokens, beside=beside)
    title = f"{model}, steps of requests with prompts of {prompt_tokens} tokens"
    table = make_table(title, "running", "beside", "ms a step", "least", "host ms", "idle ms", "busy")
    results = []
    for kv_format in formats:
        llm = make_llm(loaded, [work], options | {"kv_cache_dtype": kv_format})
        for count, prompt in ((count, prompt) for count in counts for prompt in ((0, beside) if beside else (0,))):
            result = measure_steps(llm, machine, running=count, context=prompt_tokens, beside=prompt)
            times = [f"{result.wall:.3f}", f"{result.ceiling:.3f}"]
            if result.busy is not None:
                times += [f"{result.host:.3f}", f"{result.idle:.3f}", f"{result.busy:.2%}"]
            table.add_row(result.system, result.kv_cache, f"{count}", f"{prompt}", *times)
            results.append(result)
        del llm
    report(table, machine, [work], results, model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)


@bench.command()
@cli.plain_errors
def start(
    model: BenchModel,
    cold: Annotated[bool, typer.Option("--cold", help="With an empty cache of compiled kernels; one format.")] = False,
    kv_cache_dtype: KVFormats = None,
    num_blocks: NumBlocks = EngineConfig.num_blocks,
    weight_bits: WeightBits = None,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
) -> None:
    """Seconds from `LLM(...)` on a model in memory to the first token."""
    formats = formats_of(kv_cache_dtype, default="auto")
    if cold and len(formats) > 1:
        raise typer.BadParameter(f"--cold with {len(formats)} formats: the first leaves compiled kernels; allowed: one")
    options = cli.engine_options(dict(locals()) | {"kv_cache_dtype": None})
    from hf_paged.eval.machine import measure_machine
    from hf_paged.eval.start import empty_kernel_cache, measure_start

    loaded = load_model(model, dtype=dtype.value, device=device, weight_bits=weight_bits)
    table = make_table(
        f"{model}, kernel cache {'empty' if cold else 'as it is'}", "LLM() s", "first token s", "KV tokens"
    )
    results = []
    with empty_kernel_cache() if cold else nullcontext():
        for kv_format in formats:
            result = measure_start(loaded, cold=cold, engine_options=options | {"kv_cache_dtype": kv_format})
            times = (f"{result.engine:.2f}", f"{result.first_token:.2f}", f"{result.kv_tokens:,}")
            table.add_row(result.system, result.kv_cache, *times)
            results.append(result)
    machine = measure_machine(loaded.device, loaded.dtype)
    report(table, machine, [], results, model=model, dtype=str(loaded.dtype), weight_bits=weight_bits)


bench.command()(cli.plain_errors(memory))
bench.command()(cli.plain_errors(kernels))
