"""Products of the Hopper kernels whose programs share tiles: they must end, and give the same bits, whenever their
programs get places.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels.cuda_kernel import CudaKernel
from hf_paged.kernels.packed_linear import lock_count
from hf_paged.kernels.packed_weight import PackedWeight, packed_linear_reference, packed_shape
from hf_paged.kernels.w4a16_hopper import w4a16_hopper
from hf_paged.kernels.w4a16_hopper_tiles import MAX_PROGRAMS, SHAPES, HopperTiles

STREAMS = 24  # half of them of high priority
ROUNDS = 8
SECONDS = 60.0  # the work takes milliseconds, what it is compared with a few seconds
N, K = 1024, 4096
STEP = 2**-7  # of bf16 and the largest output: see test_w4a16_hopper.py

HOLD = """
extern "C" __global__ void hold(int microseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < microseconds * 1000ull);
}
"""


def random_weight() -> PackedWeight:
    return PackedWeight(
        packed=torch.randint(-(2**31), 2**31, packed_shape(K, N, 4), dtype=torch.int32, device="cuda"),
        scales=torch.rand((K // 128, N), device="cuda").half(),
        zeros=None,
        perm=None,
        field_bits=4,
        code_bits=4,
        group_size=128,
        in_features=K,
        out_features=N,
    )


def shared_launches(many: bool, m: int) -> list[HopperTiles]:
    """Every tile shared by a cluster, by many programs evenly and unevenly, and by two and more."""
    launches = []
    for tiles in (shape.tiles for shape in SHAPES if shape.tiles.many == many and shape.tiles.block_m >= m):
        blocks = tiles.blocks(m, N)
        counts = (MAX_PROGRAMS * blocks, MAX_PROGRAMS * blocks - 5, 2 * blocks + 1)
        launches += [replace(tiles, programs=min(count, 132 * tiles.resident)) for count in counts]
        launches.append(replace(tiles, cluster=8, programs=8 * blocks))  # the largest of clusters
    return launches


class Streamed:
    """A stream with a captured graph of products that share tiles; each has its locks, which must outlive the graph."""

    def __init__(self, x: Tensor, weight: PackedWeight, launches: list[HopperTiles], priority: int) -> None:
        self.stream, self.done = torch.cuda.Stream(priority=priority), torch.cuda.Event()
        self.locks = torch.zeros(lock_count(N), dtype=torch.int32, device="cuda")
        for tiles in launches:  # compiled before anything is captured
            w4a16_hopper(x, weight, None, self.locks, tiles)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.results = [w4a16_hopper(x, weight, None, self.locks, tiles) for tiles in launches]

    def start(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            self.done.record()


def run(many: bool) -> None:
    """Streams of products beside kernels that hold most multiprocessors for a random while."""
    properties = torch.cuda.get_device_properties(0)
    # all shared memory of a multiprocessor: nothing else runs there meanwhile
    holder = CudaKernel(HOLD, "hold", "sm_90a", properties.shared_memory_per_block_optin)
    x = torch.randn(64 if many else 8, K, device="cuda").bfloat16()
    weight, launches = random_weight(), shared_launches(many, x.shape[0])
    streams = [Streamed(x, weight, launches, priority=-(i % 2)) for i in range(STREAMS)]
    streams[0].start()
    torch.cuda.synchronize()
    defined = packed_linear_reference(x, weight, None).float()
    alone = [result.clone() for result in streams[0].results]
    far = [
        tiles for tiles, result in zip(launches, alone) if (result - defined).abs().max() >= STEP * defined.abs().max()
    ]
    assert not far, far
    held, choose = torch.cuda.Stream(priority=-1), random.Random(0)
    print("ready", flush=True)
    for _ in range(ROUNDS):
        for result in (result for streamed in streams for result in streamed.results):
            result.fill_(float("nan"))
        torch.cuda.synchronize()
        for streamed in streams:
            with torch.cuda.stream(held):
                free = choose.choice((1, 1, 32))
                holder.launch(properties.multi_processor_count - free, 32, [choose.choice((5, 100, 1000))])
            streamed.start()
        torch.cuda.synchronize()
        for streamed in streams:
            other = [tiles for tiles, *two in zip(launches, streamed.results, alone) if not torch.equal(*two)]
            assert not other, other
            assert not streamed.locks.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["few", "many"])
def test_products_that_share_tiles_give_the_same_bits_and_end_whenever_their_programs_run(kernel: str) -> None:
    """A program that waits keeps its place: were all places kept by such, nothing would ever run again. In a process of
    its own, which can be ended then.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen([sys.executable, __file__, kernel], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"  # compiled, and right when alone
        assert child.wait(SECONDS) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("programs wait for others that have no place")
    finally:
        child.kill()


if __name__ == "__main__":
    run(sys.argv[1] == "many")
