"""The four products between two attentions as one kernel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernels.test_folded_linear import assert_close, random_norm, random_weight, rows
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import layer_chain as layer_chain_module
from hf_paged.kernels.cuda_kernel import CudaKernel, compile_cubin, nvrtc
from hf_paged.kernels.layer_chain import (
    MAX_CHAIN_ROWS,
    ChainShape,
    LayerChain,
    layer_chain,
    layer_chain_reference,
    new_exchange,
    source,
)
from hf_paged.kernels.on_device import multiprocessors
from hf_paged.kernels.packed_weight import packed_linear_reference
from hf_paged.kernels.reference_fused import gated_activation, rms_norm
from hf_paged.kernels.turn import turn

SHAPES = {  # channels of attention, hidden, of the MLP, outputs of QKV
    "llama-3-8b": (4096, 4096, 14336, 6144),
    "llama-2-13b": (5120, 5120, 13824, 15360),
    "small": (768, 640, 1152, 912),
}


def random_chain(shape: str, device: str = "cpu", orders: int = 0) -> LayerChain:
    """`orders`: bits, which of the products read their channels in an order."""
    attended, hidden, mlp, qkv = SHAPES[shape]
    weights = [
        random_weight(n, k, device=device)
        for n, k in ((hidden, attended), (2 * mlp, hidden), (hidden, mlp), (qkv, hidden))
    ]
    bias = rows(1, qkv, device)[0]
    for i, weight in enumerate(weights):
        if orders >> i & 1:
            order = torch.randperm(weight.in_features, device=device).to(torch.int32)
            weights[i] = replace(weight, perm=order)
    norms = random_norm(hidden, device), random_norm(hidden, device, 1.0)
    chain = LayerChain.of(weights, (None, None, None, bias), norms)
    assert chain is not None
    return chain


@pytest.mark.parametrize("orders", [0b0000, 0b1111])
def test_the_definition_is_what_the_layer_computes_kernel_by_kernel(orders: int) -> None:
    chain, x, residual = random_chain("small", orders=orders), rows(2, 768), rows(2, 640) * 4
    output, gate_up, down, qkv = chain.weights
    hidden = residual + packed_linear_reference(x, output, None)
    gate, up = packed_linear_reference(rms_norm(hidden, chain.norms[0]), gate_up, None).chunk(2, -1)
    hidden = hidden + packed_linear_reference(gated_activation(gate, up, "silu", None), down, None)
    total, projected = layer_chain_reference(x, residual, chain)
    assert_close(total, hidden, 4)
    assert_close(projected, packed_linear_reference(rms_norm(hidden, chain.norms[1]), qkv, chain.bias), 8)


def test_weights_that_the_kernel_does_not_know_make_no_chain() -> None:
    chain = random_chain("small")
    biases = (None, None, None, chain.bias)
    for part in range(4):
        for other in ("zeros", "group", "scales"):
            weights = list(chain.weights)
            n, k = weights[part].out_features, weights[part].in_features
            if other == "zeros":
                weights[part] = random_weight(n, k, zeros=True)
            elif other == "group":
                weights[part] = random_weight(n, k, group=64)
            else:
                weights[part] = replace(weights[part], scales=weights[part].scales.float())
            assert LayerChain.of(weights, biases, chain.norms) is None, (part, other)
    assert LayerChain.of(chain.weights, (chain.bias, *biases[1:]), chain.norms) is None
    assert LayerChain.of(chain.weights, biases, chain.norms) is not None


def test_few_multiprocessors_or_a_compiler_that_refuses_make_no_chain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slice of a GPU has no room for the outputs that each program owns, and no request may fail of it."""
    chain = random_chain("llama-3-8b")
    assert chain.shape(1, 78).stages >= layer_chain_module._LEAST_STAGES > chain.shape(1, 16).stages

    def refusing(*args: object) -> None:
        raise RuntimeError("NVRTC refused layer_chain")

    monkeypatch.setattr(layer_chain_module, "CudaKernel", refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert not layer_chain_module._compiles.__wrapped__(chain.shape(1, 132), 7)
    assert "NVRTC refused" in caplog.text


@pytest.mark.parametrize("orders", [0b0000, 0b1111])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_compiles_and_leaves_room_beside_it(shape: str, orders: int) -> None:
    """Here, without a GPU."""
    try:
        nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    for m in range(1, MAX_CHAIN_ROWS + 1):
        made = random_chain(shape, orders=orders).shape(m, 132)
        assert made.shared_bytes <= 220 * 1024 and made.stages >= 4
        assert compile_cubin(source(made), "layer_chain", "sm_90a")


@pytest.mark.parametrize("ordered", [False, True])
def test_chains_of_70b_have_room_for_four_stages(ordered: bool) -> None:
    shape = ChainShape(
        rows=1, attended=8192, hidden=8192, mlp=28672, qkv=10240, norms=((1e-5, 0.0), (1e-5, 0.0)), ordered=ordered,
        scales=torch.float16, programs=132,
    )  # fmt: skip
    assert shape.stages >= layer_chain_module._LEAST_STAGES and shape.shared_bytes <= 220 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, MAX_CHAIN_ROWS + 1))
@pytest.mark.parametrize("orders", [0b0000, 0b0001, 0b0010, 0b0100, 0b1000, 0b1111])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_equals_its_definition_again_and_again(shape: str, orders: int, m: int) -> None:
    """Nothing depends on which program is first, and a number that is none gets through."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    chain = random_chain(shape, "cuda", orders)
    x, residual = rows(m, SHAPES[shape][0], "cuda"), rows(m, SHAPES[shape][1], "cuda") * 4
    total, projected = layer_chain_reference(x, residual, chain)
    exchange = new_exchange(chain, m, 20)
    first: list[Tensor] = []
    for memory in exchange:
        results = layer_chain(x, residual, chain, memory)
        assert_close(results[0], total, 2)
        assert_close(results[1], projected, 4)
        first = first or list(results)
        assert torch.equal(results[0], first[0]) and torch.equal(results[1], first[1])
    x[0, 5] = float("nan")
    assert layer_chain(x, residual, chain, new_exchange(chain, m, 1)[0])[1][0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("orders", [0b0000, 0b1111])
@pytest.mark.parametrize("shape", SHAPES)
def test_captured_chains_give_the_same_bits_for_every_input_however_often_they_are_replayed(
    shape: str, orders: int
) -> None:
    """There a chain begins before the kernel ahead of it has ended: what it read too early would be of another replay,
    and so would what it found in an exchange that was not filled again.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    chain, attended = random_chain(shape, "cuda", orders), SHAPES[shape][0]
    x, residual = rows(1, attended, "cuda"), rows(1, SHAPES[shape][1], "cuda")

    def two_layers() -> tuple[Tensor, Tensor]:
        first, second = new_exchange(chain, 1, 2)
        total, projected = layer_chain(x, residual, chain, first)
        return layer_chain(projected[:, :attended], total, chain, second)

    two_layers()  # compiled before anything is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = two_layers()
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(100):
        for _ in range(3):  # right behind each other
            x.normal_(generator=generator)
            residual.normal_(generator=generator)
            graph.replay()
        for got, expected in zip(captured, two_layers(), strict=True):
            assert torch.equal(got, expected)


HOLD = """
extern "C" __global__ void hold(int nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}
"""


@pytest.mark.gpu
def test_chains_on_two_streams_take_turns() -> None:
    """While half of the multiprocessors are held the first chain finds places on the others. The second, of a stream
    that goes first, would take what becomes free then, and both would wait until they trap.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    chain, device = random_chain("llama-3-8b", "cuda"), torch.device("cuda")
    x, residual = rows(1, 4096, "cuda"), rows(1, 4096, "cuda")
    expected = layer_chain(x, residual, chain, new_exchange(chain, 1, 1)[0])
    hold = CudaKernel(HOLD, "hold", "sm_90a", 200 * 1024)
    sides = [(torch.cuda.Stream(priority=priority), torch.cuda.CUDAGraph()) for priority in (0, -1)]
    results = []
    for stream, graph in sides:
        with torch.cuda.graph(graph, stream=stream):
            results.append([layer_chain(x, residual, chain, exchange) for exchange in new_exchange(chain, 1, 3)])
    for _ in range(20):
        hold.launch(multiprocessors(device) // 2, 32, [2_000_000])
        for stream, graph in sides:
            with torch.cuda.stream(stream), turn(device):
                graph.replay()
    torch.cuda.synchronize()
    for total, projected in (result for side in results for result in side):
        assert torch.equal(total, expected[0]) and torch.equal(projected, expected[1])
