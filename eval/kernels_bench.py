"""Time the attention and write kernels of one GPU against its measured read bandwidth, or torch's flash attention.

    hf-paged bench kernels --what decode --format bf16 --format int8 --format fp8
    hf-paged bench kernels --what decode --shape gqa8 --batch 64 --context 2048 --sweep
    hf-paged bench kernels --what prefill --shape mha

Calls of a captured graph rotate over pages of at least four times the L2 cache, and a figure is the median over
replays. Bytes are codes and scales of the live tokens: the ceiling is bytes / read bandwidth. A prompt's FLOPs are
those of two products over half of the square.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hf_paged.kernels.decode_attention import decode_attention
from hf_paged.kernels.decode_config import DecodeConfig, choose_config
from hf_paged.kernels.layout import (
    UINT4,
    AttentionMetadata,
    GroupPages,
    LayerKV,
    Pages,
    PlainPages,
    ScaledPages,
    num_groups,
)
from hf_paged.kernels.prefill_attention import prefill_attention
from hf_paged.kernels.prefill_config import PrefillConfig
from hf_paged.kernels.write_kernel import write_kv

FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": UINT4,
}
SHAPES = {"mha": (32, 32), "gqa4": (32, 8), "gqa8": (64, 8)}  # heads, kv_heads
DECODE_CASES = [
    (1, 512), (1, 8192), (1, 131072), (4, 131072), (16, 512), (16, 4096),
    (64, 2048), (64, 4096), (64, 8192), (256, 512), (256, 1024), (256, 2048),
]  # fmt: skip
RAGGED_CASES = {(64, 2048), (64, 8192), (256, 2048)}  # timed once more with lengths from half the context to all of it
MOST_BYTES = 4.5e9  # of codes and scales: a larger case tells no more
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
    x = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    out = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    best = 0.0
    for per_program, block, warps in itertools.product((16384, 65536), (2048, 4096), (4, 8)):

        def run(per_program: int = per_program, block: int = block, warps: int = warps) -> None:
            _read[(x.numel() // per_program,)](x, out, PER_PROGRAM=per_program, BLOCK=block, num_warps=warps)

        best = max(best, x.numel() * 4 / graph_time([run]) / 1e12)
    return best


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 10) -> float:
    """Seconds per call: `calls`, in turn and at least 16 of them, captured in one graph, median over replays.

    Replays are queued one behind the other: the first one on an idle GPU begins 5 to 14 us late.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured = list(calls) * -(-16 // len(calls))
    with torch.cuda.graph(graph):
        for call in captured:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return statistics.median(times) / 1e3 / len(captured)


def random_pages(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Pages:
    shape = (num_blocks, kv_heads, block_size, head_dim)
    if dtype in (torch.int8, torch.float8_e4m3fn):
        codes = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 120)
        codes |= torch.empty_like(codes).random_(0, 2) << 7  # both signs, no e4m3 NaN
        scale = torch.rand(shape[:3], device="cuda").to(torch.float16) * 0.01
        return ScaledPages(codes=codes.view(dtype), scale=scale)
    if dtype == UINT4:
        codes = torch.empty((*shape[:3], head_dim // 2), dtype=torch.uint8, device="cuda").random_(0, 256)
        scale = torch.rand((*shape[:3], num_groups(head_dim), 2), device="cuda") * 0.1
        scale[..., 1] = -7.5 * scale[..., 0]  # codes around zero
        return GroupPages(codes=codes, scale=scale.to(torch.float16))
    return PlainPages(data=torch.empty(shape, dtype=dtype, device="cuda").normal_())


def bytes_per_token(pages: Pages) -> int:
    block_bytes = pages.tensor[0].nbytes + (0 if isinstance(pages, PlainPages) else pages.scale[0].nbytes)
    return block_bytes // pages.tensor.shape[2]


def build(
    batch: int, context: int, q_len: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> tuple[Tensor, LayerKV, list[AttentionMetadata], int]:
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
    return query, LayerKV(k=k, v=v), metas, traffic


def decode_variants(default: DecodeConfig, block_size: int) -> Iterator[DecodeConfig]:
    """Configurations worth trying beside the default; programs around what the GPU holds at once."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if default.in_registers:
        for tile, registers in itertools.product((16, 32), (96, 128, 168, 255)):
            if tile <= block_size:
                held = 4 * (512 // registers)
                for per_sm in sorted({held, held * 3 // 4, held // 2}):
                    yield replace(default, tile=tile, programs=sms * per_sm, max_registers=registers)
    for tile, warps, stages, per_sm in itertools.product((16, 32, 64, 128), (2, 4), (2, 3, 4), (2, 4, 8)):
        if tile <= min(block_size, 32 * warps):
            yield DecodeConfig(tile=tile, programs=sms * per_sm, num_warps=warps, num_stages=stages)


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """What to time: every combination of shapes, head dimensions, formats and cases."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    head_dims: tuple[int, ...] = (128,)
    formats: tuple[str, ...] = ("bf16", "int8", "fp8")
    case: tuple[int, int] | None = None  # batch and context, instead of the lists
    block_size: int = 32
    sweep: bool = False  # other launch configurations too

    def __post_init__(self) -> None:
        for name, value, known in (("shape", self.shapes, SHAPES), ("format", self.formats, FORMATS)):
            unknown = [x for x in value if x not in known]
            if unknown:
                raise ValueError(f"{name}={unknown[0]!r} is unknown; allowed are {', '.join(known)}")

    def combinations(self, cases: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, tuple[int, int], str]]:
        return itertools.product(self.shapes, self.head_dims, [self.case] if self.case else cases, self.formats)

    def decode(self, bandwidth: float) -> Iterator[dict[str, Any]]:
        """Rows of the decode kernel, as they are measured."""
        for shape, head_dim, (batch, context), name in self.combinations(DECODE_CASES):
            heads, kv_heads = SHAPES[shape]
            token = bytes_per_token(random_pages(1, kv_heads, self.block_size, head_dim, FORMATS[name]))
            if 2 * batch * context * token > MOST_BYTES:
                continue
            query, layer, metas, traffic = build(
                batch, context, 1, heads, kv_heads, head_dim, FORMATS[name], self.block_size
            )
            calls = decode_calls(query, layer, metas)
            row = {"kernel": "decode", "shape": shape, "head_dim": head_dim, "batch": batch, "context": context}
            row |= {"format": name, "bytes": traffic}
            default = choose_config(query, layer, batch, context)
            yield row | figures("default", default, seconds(calls, default), traffic, bandwidth)
            if (batch, context) in RAGGED_CASES:
                seeded = torch.Generator().manual_seed(0)  # the same lengths for all formats
                lengths = torch.randint(context // 2, context + 1, (batch,), dtype=torch.int32, generator=seeded).cuda()
                ragged = decode_calls(query, layer, [replace(meta, seq_lens=lengths) for meta in metas])
                live = traffic * int(lengths.sum()) // (batch * context)
                yield row | {"bytes": live} | figures("ragged", default, seconds(ragged, default), live, bandwidth)
                del ragged
            if self.sweep:
                tried = {config: seconds(calls, config) for config in decode_variants(default, self.block_size)}
                for config, time in sorted(tried.items(), key=lambda item: item[1])[:3]:
                    yield row | figures("swept", config, time, traffic, bandwidth)
            del query, layer, metas, calls
            torch.cuda.empty_cache()

    def prefill(self) -> Iterator[dict[str, Any]]:
        """Rows of torch's flash attention over the same prompts in bf16, then of the prefill kernel."""
        for shape, head_dim, (batch, length), name in self.combinations(PREFILL_CASES):
            heads, kv_heads = SHAPES[shape]
            flops = 2 * batch * length * length * heads * head_dim  # two products, half of the square
            row = {"kernel": "prefill", "shape": shape, "head_dim": head_dim, "batch": batch, "context": length}
            if name == self.formats[0]:
                time = varlen_seconds(batch, length, heads, kv_heads, head_dim)
                yield row | {"format": "bf16", "us": time * 1e6, "tflop_s": flops / time / 1e12, "variant": "torch"}
            query, layer, metas, _ = build(
                batch, length, length, heads, kv_heads, head_dim, FORMATS[name], self.block_size
            )
            attend = partial(prefill_attention, query, layer, metas[0], torch.empty_like(query), **options(head_dim))
            for config in (None, *(prefill_variants() if self.sweep else ())):
                try:
                    time = triton.testing.do_bench(partial(attend, config=config), return_mode="median") / 1e3
                except triton.runtime.errors.OutOfResources:
                    continue  # a swept shape that does not fit this GPU
                row |= {"format": name, "us": time * 1e6, "tflop_s": flops / time / 1e12}
                yield row | {"variant": "swept" if config else "default", "config": str(config or "")}
            del query, layer, metas, attend
            torch.cuda.empty_cache()

    def write(self, bandwidth: float) -> Iterator[dict[str, Any]]:
        """Rows of the kernel that quantizes and stores."""
        for shape, head_dim, (tokens, _), name in self.combinations([(n, 0) for n in (1, 16, 128, 8192)]):
            _, kv_heads = SHAPES[shape]
            k, v = (random_pages(1024, kv_heads, self.block_size, head_dim, FORMATS[name]) for _ in range(2))
            key, value = torch.randn(2, tokens, kv_heads, head_dim, device="cuda").to(torch.bfloat16)
            slots = torch.randperm(1023 * self.block_size, device="cuda")[:tokens] + self.block_size
            time = graph_time([partial(write_kv, LayerKV(k=k, v=v), key, value, slots)] * 8)
            traffic = tokens * (2 * bytes_per_token(k) + 4 * kv_heads * head_dim)
            row = {"kernel": "write", "shape": shape, "head_dim": head_dim, "batch": tokens, "context": 0}
            yield row | {"format": name, "bytes": traffic} | figures("default", "", time, traffic, bandwidth)

    def rows(self, kernels: Iterable[str], bandwidth: float) -> Iterator[dict[str, Any]]:
        """All rows of the named kernels: decode, prefill, write."""
        for kernel in kernels:
            if kernel == "prefill":
                yield from self.prefill()
            else:
                yield from getattr(self, kernel)(bandwidth)


def decode_calls(query: Tensor, layer: LayerKV, metas: Sequence[AttentionMetadata]) -> list[partial]:
    given = options(query.shape[2])
    return [partial(decode_attention, query, layer, meta, torch.empty_like(query), **given) for meta in metas]


def options(head_dim: int) -> dict[str, Any]:
    return {"scale": head_dim**-0.5, "window": None, "softcap": None, "sinks": None}


def seconds(calls: list[partial], config: DecodeConfig) -> float:
    return graph_time([partial(call, config=config) for call in calls])


def figures(label: str, config: object, time: float, traffic: float, bandwidth: float) -> dict[str, Any]:
    rate = traffic / time / 1e12
    return {"us": time * 1e6, "tb_s": rate, "percent": 100 * rate / bandwidth, "variant": label, "config": str(config)}


def prefill_variants() -> Iterator[PrefillConfig]:
    for rows, tile, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
        yield PrefillConfig(rows=rows, tile=tile, num_warps=warps, num_stages=stages)


def varlen_seconds(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> float:
    """torch's own causal varlen flash attention over bf16 values that lie side by side."""
    query = torch.randn(batch * length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, batch * length, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    known = inspect.signature(varlen_attn).parameters  # the argument changed its name between 2.11 and 2.13
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        causal["enable_gqa"] = heads != kv_heads
    elif heads != kv_heads:
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    attend = partial(varlen_attn, query, key, value, cu, cu, length, length, **causal)
    return float(triton.testing.do_bench(attend, return_mode="median")) / 1e3
