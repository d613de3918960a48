"""Time the small fused kernels of a decoder layer on one GPU against their bytes / measured read bandwidth.

    python -m hf_paged.eval.fusion_bench                                   # 7B and 70B shapes, 1..2048 tokens
    python -m hf_paged.eval.fusion_bench --shapes 7b --tokens 1,64 --formats int8

A figure is the time per call of many calls in one CUDA graph, so it includes what a launch costs inside a graph and,
for few tokens, is that cost: activations lie in the L2 cache, as they do in a step. For 2048 tokens the bytes decide.
Prints a table, then one JSON line per row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from hf_paged.eval.kernels_bench import FORMATS, bytes_per_token, graph_time, random_pages, read_bandwidth
from hf_paged.kernels.gated_activation import gated_activation
from hf_paged.kernels.layout import LayerKV
from hf_paged.kernels.reference_fused import RMSNorm, Rope
from hf_paged.kernels.rms_norm import add_rms_norm, rms_norm
from hf_paged.kernels.rope_write import rope_write

CALLS = 64  # in one graph
BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "7b": Shape(hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128),
    "8b": Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128),
    "70b": Shape(hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; `ideal_us` is bytes read and written / read bandwidth."""

    kernel: str
    shape: str
    tokens: int
    kv: str
    us: float
    ideal_us: float


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def norm_calls(shape: Shape, tokens: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """RMSNorm alone and with the residual add: (name, call, bytes)."""
    x, residual = random(tokens, shape.hidden), random(tokens, shape.hidden)
    norm = RMSNorm(weight=random(shape.hidden), eps=1e-5, offset=0.0, cast_first=True)
    row = 2 * shape.hidden
    yield "rms_norm", partial(rms_norm, x, norm), (2 * tokens + 1) * row
    yield "add_rms_norm", partial(add_rms_norm, x, residual, norm, None), (4 * tokens + 1) * row


def activation_call(shape: Shape, tokens: int) -> tuple[Callable[[], object], int]:
    gate, up = random(tokens, 2 * shape.intermediate).chunk(2, -1)
    return partial(gated_activation, gate, up, "silu"), 3 * tokens * 2 * shape.intermediate


def rope_call(shape: Shape, tokens: int, kv: str) -> tuple[Callable[[], object], int]:
    dim = shape.head_dim
    sizes = (shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim)
    q, k, v = random(tokens, sum(sizes)).split(sizes, -1)
    query, key, value = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
    num_blocks = tokens + 1  # in a decode step every token lies in a block of its own
    pages = [random_pages(num_blocks, shape.kv_heads, BLOCK_SIZE, dim, FORMATS[kv]) for _ in range(2)]
    slots = (torch.randperm(tokens, device="cuda") + 1) * BLOCK_SIZE + 5
    angles = torch.rand(tokens, dim, device="cuda")
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    layer, rope = LayerKV(k=pages[0], v=pages[1]), Rope(rotary_dim=dim)
    call = partial(rope_write, query, key, value, cos, sin, layer, slots, rope=rope)
    stored = sum(map(bytes_per_token, pages))
    return call, tokens * (2 * (sum(sizes) + sizes[0]) + stored + 4 * dim + 8)


def measure(name: str, tokens: int, formats: list[str], bandwidth: float) -> Iterator[Row]:
    shape = SHAPES[name]
    calls = [(kernel, "-", call, size) for kernel, call, size in norm_calls(shape, tokens)]
    call, size = activation_call(shape, tokens)
    calls.append(("gated_activation", "-", call, size))
    for kv in formats:
        call, size = rope_call(shape, tokens, kv)
        calls.append(("rope_write", kv, call, size))
    for kernel, kv, call, size in calls:
        seconds = graph_time([call] * CALLS)
        yield Row(
            kernel=kernel, shape=name, tokens=tokens, kv=kv,
            us=round(seconds * 1e6, 2), ideal_us=round(size / bandwidth / 1e6, 2),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="7b,70b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="1,16,64,128,2048")
    parser.add_argument("--formats", default="bf16,int8,fp8", help=f"of {', '.join(FORMATS)}")
    args = parser.parse_args()
    bandwidth = read_bandwidth()  # TB/s = bytes per 1e-12 s
    print(f"{torch.cuda.get_device_name()}: {bandwidth:.2f} TB/s read")
    rows = []
    print(f"{'kernel':18}{'shape':>6}{'tokens':>8}{'kv':>6}{'us':>9}{'ideal':>9}")
    for name in args.shapes.split(","):
        for tokens in (int(text) for text in args.tokens.split(",")):
            for row in measure(name, tokens, args.formats.split(","), bandwidth):
                rows.append(row)
                print(f"{row.kernel:18}{name:>6}{tokens:>8}{row.kv:>6}{row.us:>9.2f}{row.ideal_us:>9.2f}", flush=True)
    for row in rows:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
