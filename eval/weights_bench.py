"""Time the packed-weight GEMM of one GPU against its measured read bandwidth and against cuBLAS in the same run.

    python -m hf_paged.eval.weights_bench                              # layers of 7B to 70B models
    python -m hf_paged.eval.weights_bench --shapes 57344x8192 --rows 1,8,16 --sweep
    python -m hf_paged.eval.weights_bench --zeros --dtype fp16         # AWQ
    python -m hf_paged.eval.weights_bench --act-order                  # with the gather of its channels
    python -m hf_paged.eval.weights_bench --path portable              # the Triton kernel, whatever the GPU

A captured graph holds at least a millisecond of calls, one behind the other as in a step, that rotate over as many
copies of the weight as exceed the L2 cache four times. Graphs of ours and of cuBLAS (the same weights, dequantized)
are replayed in turn, and a figure is the median of nine replays after five: both sides see the same clocks, and
neither the first milliseconds after a pause count, up to a tenth slower, nor the start of a graph. Large products slow
down with heat when they go on, which `--warm 40` shows. The roof is max(bytes / read bandwidth, FLOPs / measured
matrix rate), where bytes are the packed weight, its scales and zeros, and the activations in and out, each once.
"Ours" is the product as a layer calls it. Prints a table with the launch that was chosen (tokens x outputs of a tile,
programs), then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_paged.eval.kernels_bench import graph_time, read_bandwidth
from hf_paged.kernels.on_device import multiprocessors
from hf_paged.kernels.packed_linear import lock_count, packed_linear
from hf_paged.kernels.packed_weight import PackedWeight, field_bits, packed_shape, tile_k
from hf_paged.kernels.w4a16 import w4a16
from hf_paged.kernels.w4a16_hopper import fits_hopper, w4a16_hopper
from hf_paged.kernels.w4a16_hopper_tiles import HopperTiles, choose_hopper_tiles, hopper_launches, hopper_rows
from hf_paged.kernels.w4a16_tiles import Tiles, choose_tiles
from hf_paged.kernels.weight_dequantize import dequantize

SHAPES = (  # N x K: Llama-2-7B and 70B, Llama-3-8B, Llama-2-13B
    "12288x4096,22016x4096,4096x11008,10240x8192,57344x8192,8192x28672,4096x4096,8192x8192,"
    "6144x4096,28672x4096,4096x14336,15360x5120,5120x5120,27648x5120,5120x13824"
)
ROWS = "1,4,8,16,32,64,128,256,512,2048,8192"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROTATED_BYTES = 4 * 60_000_000
REPLAY_SECONDS = 1e-3  # at least, of a graph
REPLAYS = 9

Call = Callable[[], object]


def random_weight(n: int, k: int, args: argparse.Namespace) -> PackedWeight:
    """Random words: every bit pattern is a weight."""
    group = k if args.group == -1 else args.group
    field = field_bits(args.bits)
    words = torch.randint(-(2**31), 2**31, packed_shape(k, n, field), dtype=torch.int32, device="cuda")
    zeros = torch.randint(0, 1 << args.bits, (k // group, n), dtype=torch.uint8, device="cuda") if args.zeros else None
    return PackedWeight(
        packed=words,
        scales=torch.rand((k // group, n), device="cuda").half() / 100,
        zeros=zeros,
        perm=torch.randperm(k, device="cuda").to(torch.int32) if args.act_order else None,
        field_bits=field,
        code_bits=args.bits,
        group_size=group,
        in_features=k,
        out_features=n,
    )


def weight_bytes(weight: PackedWeight) -> int:
    parts = [weight.packed, weight.scales, weight.zeros, weight.perm]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large cuBLAS product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return 2 * 8192**3 / graph_time([partial(torch.matmul, a, a)])


def times_in_turn(sides: Sequence[Sequence[Call]], least: float, warm: int) -> list[float]:
    """Seconds per call of each side, a call of which takes `least` or longer: medians of replays that take turns, after
    `warm` of each.
    """
    counts = [max(len(calls), math.ceil(REPLAY_SECONDS / least)) for calls in sides]
    graphs = [captured(calls, count) for calls, count in zip(sides, counts)]
    for graph in graphs * warm:
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS * len(graphs) + 1)]
    events[0].record()
    for event, graph in zip(events[1:], itertools.cycle(graphs)):
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
    return [statistics.median(times[i :: len(graphs)]) / count for i, count in enumerate(counts)]


def captured(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    """`count` calls, in turn."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    return graph


def portable_launches(m: int, n: int, tiles: int, programs: int) -> Iterator[Tiles]:
    """Launches of the Triton kernel worth trying for this shape."""
    blocks_m = [block for block in (8, 16, 32, 64, 128, 256) if m <= 8 * block and (block < 2 * m or block == 8)]
    for block_m, block_n, split, warps, stages, scale in itertools.product(
        blocks_m, (64, 128, 256), (1, 2, 4, 8, 16), (4, 8), (3, 4, 6, 8), (False, True)
    ):
        programs_made = -(-n // block_n) * -(-m // block_m) * split
        if tiles < 2 * split or (split > 1 and programs_made > 12 * programs) or block_m * block_n > 128 * 256:
            continue
        if split > 1 and programs_made // split > lock_count(n):
            continue
        if (scale and m < 32) or (not scale and m > 64) or (block_n == 64 and warps == 8):
            continue
        yield Tiles(
            block_m=block_m, block_n=block_n, split_k=split, scale_weights=scale, num_warps=warps, num_stages=stages
        )


def likely_launches(m: int, n: int, k: int, programs: int) -> Iterator[HopperTiles]:
    """Launches of the Hopper kernels that may cost up to twice the chosen one."""
    launches = list(hopper_launches(m, n, k, programs))
    least = min(cost for cost, _ in launches)
    return (tiles for cost, tiles in launches if cost < 2 * least)


def bench_shape(n: int, k: int, args: argparse.Namespace, bandwidth: float, rate: float) -> list[dict[str, Any]]:
    dtype = DTYPES[args.dtype]
    first = random_weight(n, k, args)
    copies = max(2, -(-ROTATED_BYTES // weight_bytes(first)))
    weights = [first, *(random_weight(n, k, args) for _ in range(copies - 1))]
    dense = [dequantize(weight, dtype) for weight in weights[: max(2, -(-ROTATED_BYTES // (2 * n * k)))]]
    locks = torch.zeros(lock_count(n), dtype=torch.int32, device="cuda")
    rows = []
    for m in (int(rows) for rows in args.rows.split(",")):
        x = torch.randn((m, k), device="cuda", dtype=dtype)
        roof = max((weight_bytes(first) + 2 * m * (n + k)) / bandwidth, 2 * m * n * k / rate)
        row = {
            "n": n,
            "k": k,
            "m": m,
            "bits": args.bits,
            "group": args.group,
            "zeros": args.zeros,
            "dtype": args.dtype,
            "act_order": args.act_order,
            "roof_us": roof * 1e6,
        }
        packed_calls = [partial(ours(args), x, weight, None, locks) for weight in weights]
        cublas_calls = [partial(torch.nn.functional.linear, x, weight) for weight in dense]
        times = times_in_turn([packed_calls, cublas_calls], roof, args.warm)
        row["ours_us"], row["cublas_us"] = (1e6 * time for time in times)
        if args.path == "auto" and m <= hopper_rows(k) and fits_hopper(x, first):
            tiles = choose_hopper_tiles(m, n, k, multiprocessors(0))
            row["launch"] = f"{tiles.block_m} x {tiles.rows}, {tiles.programs}"
            if tiles.cluster > 1:
                row["launch"] += f" by {tiles.cluster}"
        row["percent"] = 100 * row["roof_us"] / row["ours_us"]
        row["gb_s"] = weight_bytes(first) / row["ours_us"] / 1e3
        if args.sweep:
            row |= sweep(x, weights, locks, args, roof)
        rows.append(row)
        print_row(row)
    return rows


def ours(args: argparse.Namespace) -> Callable[[Tensor, PackedWeight, None, Tensor], Tensor]:
    paths: dict[str, Callable[[Tensor, PackedWeight, None, Tensor], Tensor]] = {
        "auto": packed_linear,
        "portable": portable_linear,
        "dequantize": dequantized_linear,
    }
    return paths[args.path]


def portable_linear(x: Tensor, weight: PackedWeight, bias: None, locks: Tensor) -> Tensor:
    launch = choose_tiles(x.shape[0], weight.out_features, weight.packed.shape[1], multiprocessors(0))
    return w4a16(x, weight, bias, locks, launch)


def dequantized_linear(x: Tensor, weight: PackedWeight, bias: None, locks: Tensor) -> Tensor:
    gathered = x if weight.perm is None else x.index_select(1, weight.perm)
    return torch.nn.functional.linear(gathered, dequantize(weight, x.dtype))


def sweep(
    x: Tensor, weights: list[PackedWeight], locks: Tensor, args: argparse.Namespace, roof: float
) -> dict[str, Any]:
    """The best of all launches of the kernel that serves this GPU, and a line for each of the first `--show`."""
    (m, k), n, programs = x.shape, weights[0].out_features, multiprocessors(0)
    launches: Iterator[Any] = portable_launches(m, n, weights[0].packed.shape[1], programs)
    kernel: Callable[..., Tensor] = w4a16
    if args.path == "auto" and fits_hopper(x, weights[0]):
        launches, kernel = likely_launches(m, n, k, programs), w4a16_hopper
    timed = []
    for launch in launches:
        time = launch_time([partial(kernel, x, weight, None, locks, launch) for weight in weights], roof, args.warm)
        if time is not None:
            timed.append((time, str(launch)))
    for time, launch_text in sorted(timed)[: args.show]:
        print(f"    {time * 1e6:9.1f} us  {launch_text}", flush=True)
    return {"best_us": min(timed)[0] * 1e6, "best_launch": min(timed)[1]}


def launch_time(calls: list[Call], roof: float, warm: int) -> float | None:
    """Seconds, or None for a launch that needs more shared memory or registers than there are."""
    try:
        return times_in_turn([calls], roof, warm)[0]
    except (RuntimeError, torch.AcceleratorError) as error:
        if "out of resource" not in str(error):
            raise
        return None


def print_row(row: dict[str, Any]) -> None:
    swept = f" best {row['best_us']:9.1f}" if "best_us" in row else ""
    print(
        f"{row['n']:6} x {row['k']:<6} m {row['m']:<5} roof {row['roof_us']:8.1f} ours {row['ours_us']:9.1f}{swept} "
        f"cuBLAS {row['cublas_us']:9.1f} us {row['percent']:5.1f}% of the roof, {row['gb_s']:7.0f} GB/s "
        f"{row.get('launch', '')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="N x K of the weights, comma separated")
    parser.add_argument("--rows", default=ROWS, help="rows of activations, comma separated")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zeros", action="store_true", help="with zero points (AWQ, asymmetric GPTQ)")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--path", choices=("auto", "portable", "dequantize"), default="auto")
    parser.add_argument("--warm", type=int, default=5, help="replays of each side before those that count")
    parser.add_argument("--sweep", action="store_true", help="try other launches too")
    parser.add_argument("--show", type=int, default=5, help="launches to print per row with --sweep")
    args = parser.parse_args()
    bandwidth, rate = read_bandwidth() * 1e12, matrix_rate(DTYPES[args.dtype])
    print(
        f"{torch.cuda.get_device_name()}: read {bandwidth / 1e12:.3f} TB/s, cuBLAS {rate / 1e12:.0f} TFLOP/s; "
        f"{args.bits} bits, tile of {tile_k(field_bits(args.bits))} channels"
    )
    rows: list[dict[str, Any]] = []
    for shape in args.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        rows += bench_shape(n, k, args, bandwidth, rate)
        torch.cuda.empty_cache()
    print(json.dumps({"read_tb_s": bandwidth / 1e12, "tflop_s": rate / 1e12, "rows": rows}))


if __name__ == "__main__":
    main()
