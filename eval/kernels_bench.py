"""Time the attention and write kernels of one GPU against its measured read bandwidth.

    python -m hf_paged.eval.kernels_bench --what decode --formats bf16,int8,fp8
    python -m hf_paged.eval.kernels_bench --what decode --shape gqa8 --batch 64 --context 2048 --sweep

Every call of a captured graph uses other pages, rotated over at least four times the L2 cache, and a figure is the
median over replays. Bytes are codes and scales of the live tokens: the ceiling is bytes / read bandwidth. Prints one
table per kernel, then one JSON line per row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.decode_attention import DecodeConfig, choose_config, decode_attention
from hf_paged.kernels.layout import AttentionMetadata, LayerKV, Pages, PlainPages, ScaledPages
from hf_paged.kernels.prefill_attention import PrefillConfig, prefill_attention
from hf_paged.kernels.write_kernel import write_kv

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = {"mha": (32, 32), "gqa4": (32, 8), "gqa8": (64, 8)}  # heads, kv_heads
DECODE_CASES = [(1, 512), (1, 8192), (1, 32768), (1, 131072), (16, 4096), (64, 2048), (128, 1024), (256, 512)]
PREFILL_CASES = [(8, 1024), (4, 4096), (1, 8192), (1, 32768)]
ROTATED_BYTES = 4 * 60_000_000


@triton.jit
def _read(x_ptr, out_ptr, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    acc = tl.zeros([BLOCK], tl.int32)
    for i in range(0, PER_PROGRAM, BLOCK):
        acc ^= tl.load(x_ptr + start + i + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def read_bandwidth() -> float:
    """TB/s of a kernel that only reads: the best of a few launch shapes over 4 GiB."""
    x = torch.zeros(1 << 30, dtype=torch.int32, device="cuda")
    out = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    best = 0.0
    for per_program, block, warps in itertools.product((16384, 65536), (2048, 4096), (4, 8)):

        def run(per_program: int = per_program, block: int = block, warps: int = warps) -> None:
            _read[(x.numel() // per_program,)](x, out, PER_PROGRAM=per_program, BLOCK=block, num_warps=warps)

        best = max(best, x.numel() * 4 / graph_time([run]) / 1e12)
    return best


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 10) -> float:
    """Seconds per call: `calls` captured in one graph, median over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def random_pages(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Pages:
    shape = (num_blocks, kv_heads, block_size, head_dim)
    if dtype in (torch.int8, torch.float8_e4m3fn):
        codes = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 120)
        codes |= torch.empty_like(codes).random_(0, 2) << 7  # both signs, no e4m3 NaN
        scale = torch.rand(shape[:3], device="cuda").to(torch.float16) * 0.01
        return ScaledPages(codes=codes.view(dtype), scale=scale)
    return PlainPages(data=torch.empty(shape, dtype=dtype, device="cuda").normal_())


def bytes_per_token(pages: Pages) -> int:
    _, kv_heads, _, head_dim = pages.tensor.shape
    return kv_heads * (head_dim * pages.tensor.element_size() + (2 if isinstance(pages, ScaledPages) else 0))


def build(
    batch: int, context: int, q_len: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> tuple[list[Tensor], LayerKV, list[AttentionMetadata], int]:
    """Queries, pages and as many disjoint sets of block tables as exceed the L2 cache, and the bytes of one set."""
    blocks = -(-context // block_size)
    probe = random_pages(1, kv_heads, block_size, head_dim, dtype)
    traffic = 2 * bytes_per_token(probe) * batch * context
    rotations = max(2, min(-(-ROTATED_BYTES // traffic), 64)) if traffic < 4 * ROTATED_BYTES else 1
    num_blocks = rotations * batch * blocks + 1
    k, v = (random_pages(num_blocks, kv_heads, block_size, head_dim, dtype) for _ in range(2))
    ids = (torch.randperm(num_blocks - 1, device="cuda") + 1).to(torch.int32).view(rotations, batch, blocks)
    metas = [
        AttentionMetadata(
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device="cuda") * q_len,
            seq_lens=torch.full((batch,), context, dtype=torch.int32, device="cuda"),
            block_tables=tables.contiguous(),
            slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
            num_decodes=batch if q_len == 1 else 0,
            max_seqlen_q=q_len,
            max_seq_len=context,
        )
        for tables in ids
    ]
    query = torch.randn(batch * q_len, heads, head_dim, device="cuda").to(torch.bfloat16)
    return [query], LayerKV(k=k, v=v), metas, traffic


def decode_variants(default: DecodeConfig, block_size: int, programs: int) -> Iterator[DecodeConfig]:
    """Configurations worth trying beside the default; splits around what fills the GPU."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    splits = {max(1, -(-sms * per_sm // programs)) for per_sm in (4, 8, 12, 16, 24)}
    if default.in_registers:
        for tile, count, registers in itertools.product((16, 32, 64), splits, (None, 128)):
            if tile <= block_size:
                yield DecodeConfig(tile=tile, num_splits=count, in_registers=True, max_registers=registers)
    for tile, warps, stages in itertools.product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4)):
        if tile <= min(block_size, 32 * warps):
            for count in splits:
                yield DecodeConfig(tile=tile, num_splits=count, num_warps=warps, num_stages=stages)


def bench_decode(args: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    cases = [(args.batch, args.context)] if args.batch else DECODE_CASES
    for shape, head_dim, (batch, context), name in itertools.product(args.shape, args.head_dim, cases, args.formats):
        heads, kv_heads = SHAPES[shape]
        if 2 * batch * context * kv_heads * head_dim * FORMATS[name].itemsize > 40e9:
            continue
        (query,), layer, metas, traffic = build(
            batch, context, 1, heads, kv_heads, head_dim, FORMATS[name], args.block_size
        )
        out = torch.empty_like(query)
        calls = [partial(decode_attention, query, layer, meta, out, **options(head_dim)) for meta in metas]
        default = choose_config(query, layer, batch, context)
        row = {"kernel": "decode", "shape": shape, "head_dim": head_dim, "batch": batch, "context": context}
        row |= {"format": name, "bytes": traffic}
        configs = {"default": default}
        if default.in_registers:
            configs["portable"] = portable(default, args.block_size)
        if args.sweep:
            tried = {c: seconds(calls, c) for c in decode_variants(default, args.block_size, batch * kv_heads)}
            for config, time in sorted(tried.items(), key=lambda item: item[1])[:3]:
                rows.append(row | figures("swept", config, time, traffic, bandwidth))
        for label, config in configs.items():
            rows.append(row | figures(label, config, seconds(calls, config), traffic, bandwidth))
            print_row(rows[-1])
        del query, layer, metas, out, calls
        torch.cuda.empty_cache()
    return rows


def options(head_dim: int) -> dict[str, Any]:
    return {"scale": head_dim**-0.5, "window": None, "softcap": None, "sinks": None}


def seconds(calls: list[partial], config: DecodeConfig) -> float:
    return graph_time([partial(call, config=config) for call in calls])


def portable(default: DecodeConfig, block_size: int) -> DecodeConfig:
    return DecodeConfig(tile=min(block_size, 64), num_splits=default.num_splits)


def figures(label: str, config: object, time: float, traffic: float, bandwidth: float) -> dict[str, Any]:
    rate = traffic / time / 1e12
    return {"us": time * 1e6, "tb_s": rate, "percent": 100 * rate / bandwidth, "variant": label, "config": str(config)}


def bench_prefill(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    cases = [(args.batch, args.context)] if args.batch else PREFILL_CASES
    for shape, head_dim, (batch, length), name in itertools.product(args.shape, args.head_dim, cases, args.formats):
        heads, kv_heads = SHAPES[shape]
        (query,), layer, metas, _ = build(
            batch, length, length, heads, kv_heads, head_dim, FORMATS[name], args.block_size
        )
        attend = partial(prefill_attention, query, layer, metas[0], torch.empty_like(query), **options(head_dim))
        flops = 2 * batch * length * length * heads * head_dim  # two products, half of the square
        configs: list[PrefillConfig | None] = [None]
        if args.sweep:
            configs += [
                PrefillConfig(rows=r, tile=t, num_warps=w, num_stages=s)
                for r, t, w, s in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
            ]
        for config in configs:
            row = {"kernel": "prefill", "shape": shape, "head_dim": head_dim, "batch": batch, "context": length}
            try:
                time = triton.testing.do_bench(partial(attend, config=config), return_mode="median")
            except triton.runtime.errors.OutOfResources:
                continue  # a swept shape that does not fit this GPU
            rows.append(row | {"format": name, "us": time * 1e3, "tflop_s": flops / time / 1e9, "config": str(config)})
            print_row(rows[-1])
        del query, layer, metas, attend
        torch.cuda.empty_cache()
    return rows


def bench_write(args: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for shape, head_dim, tokens, name in itertools.product(args.shape, args.head_dim, (1, 16, 128, 8192), args.formats):
        _, kv_heads = SHAPES[shape]
        k, v = (random_pages(1024, kv_heads, args.block_size, head_dim, FORMATS[name]) for _ in range(2))
        key, value = torch.randn(2, tokens, kv_heads, head_dim, device="cuda").to(torch.bfloat16)
        slots = torch.randperm(1023 * args.block_size, device="cuda")[:tokens] + args.block_size
        layer = LayerKV(k=k, v=v)
        time = graph_time([partial(write_kv, layer, key, value, slots)] * 8)
        traffic = tokens * (2 * bytes_per_token(k) + 4 * kv_heads * head_dim)
        row = {"kernel": "write", "shape": shape, "head_dim": head_dim, "batch": tokens, "context": 0, "format": name}
        rows.append(row | figures("default", "", time, traffic, bandwidth))
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    rate = f"{row['tflop_s']:7.1f} TFLOP/s" if "tflop_s" in row else f"{row['tb_s']:6.3f} TB/s {row['percent']:5.1f}%"
    print(
        f"{row['kernel']:8}{row['shape']:5} d{row['head_dim']:<4} b{row['batch']:<5} ctx {row['context']:<7}"
        f"{row['format']:5} {row['us']:10.1f} us {rate}  {row.get('variant', '')} {row['config']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="decode,prefill,write", help="decode, prefill, write, comma separated")
    parser.add_argument("--formats", default="bf16,int8,fp8", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--shape", default="mha,gqa4,gqa8", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--head-dim", default="128", help="comma separated")
    parser.add_argument("--batch", type=int, help="one case instead of the list")
    parser.add_argument("--context", type=int, default=4096, help="tokens per sequence with --batch")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations too")
    args = parser.parse_args()
    args.formats, args.shape = args.formats.split(","), args.shape.split(",")
    args.head_dim = [int(d) for d in args.head_dim.split(",")]
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {bandwidth:.3f} TB/s")
    rows: list[dict[str, Any]] = []
    for what in args.what.split(","):
        if what == "decode":
            rows += bench_decode(args, bandwidth)
        elif what == "prefill":
            rows += bench_prefill(args)
        elif what == "write":
            rows += bench_write(args, bandwidth)
        else:
            parser.error(f"--what {what}: allowed are decode, prefill, write")
    for row in rows:
        if row.get("variant") == "swept":
            print_row(row)
    for row in rows:
        print(json.dumps(row | {"read_tb_s": bandwidth}))


if __name__ == "__main__":
    main()
