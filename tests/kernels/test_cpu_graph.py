"""A step that is recorded on a CPU and run again, without its Python, on what its memory holds then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels import cpu_launch, fused_ops
from hf_paged.kernels.cpu_graph import CpuGraph
from hf_paged.kernels.reference_fused import RMSNorm

BF16 = torch.bfloat16
needs_numba = pytest.mark.skipif(not cpu_launch.has_kernels(BF16), reason="needs Numba and libgomp")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def captured(work: Callable[[Tensor], Tensor], x: Tensor) -> tuple[CpuGraph, Tensor]:
    graph = CpuGraph()
    with graph.capture():
        out = work(x)
    return graph, out


@pytest.mark.parametrize(
    "work",
    [
        lambda x: F.linear(x, x.flip(0)) + 1,
        lambda x: x.t().reshape(-1).float().cos().view(6, -1)[1:].contiguous(),
        lambda x: x.new_zeros(4, 6).copy_(x[:4]).add_(x[1:5]),
        lambda x: torch.cat(x.split([2, 1, 3], -1)[::-1], -1).max(-1).values,
        lambda x: x[torch.tensor([2, 0])].unflatten(-1, (2, 3)).transpose(0, 1),
        lambda x: torch.where(x > 0, x, torch.arange(6)),
    ],
)
def test_operations_run_again_on_what_their_input_holds_then(work: Callable[[Tensor], Tensor]) -> None:
    """Views that are kept, copies that are not, writes in place, constants, several results."""
    x = randn(6, 6)
    graph, out = captured(work, x)
    assert torch.equal(out, work(randn(6, 6)))
    x.copy_(randn(6, 6, seed=1))
    graph.replay()
    assert torch.equal(out, work(randn(6, 6, seed=1)))


@needs_numba
def test_kernels_run_again_and_layers_share_memory() -> None:
    """A graph that kept the activations of every layer would be larger than the cache that they should stay in."""
    weight = RMSNorm(weight=randn(64, seed=2), eps=1e-5, offset=0.0, cast_first=True)

    def layers(x: Tensor, count: int = 20) -> Tensor:
        residual = x
        for _ in range(count):
            gated = fused_ops.gated_activation(x, x, "silu")
            residual, normed = fused_ops.add_rms_norm(gated, residual, weight)
            assert normed is not None
            x = normed
        return x

    x = randn(5, 64)
    graph, out = captured(layers, x)
    x.copy_(randn(5, 64, seed=1))
    graph.replay()
    assert torch.equal(out, layers(randn(5, 64, seed=1)))
    assert 0 < sum(block.nbytes for block in graph._memory._all) <= 6 * out.nbytes
    assert len(graph._steps) == 2 * 20  # launches alone: there is nothing to do again for empty memory


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x.sum().item(),
        lambda x: x.tolist() and x,
        lambda x: x.numpy() is None or x,
        lambda x: x if (x > 0).any() else -x,
        lambda x: x[: int(x.sum())],
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x if torch.equal(x, x) else -x,
    ],
)
def test_work_that_depends_on_values_is_refused(work: Callable[[Tensor], Tensor]) -> None:
    """It would be done again as it was for the values of the capture."""
    with pytest.raises(RuntimeError, match=r"reads a value|depends on values"):
        captured(work, torch.rand(3))


@needs_numba
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_kernel_without_memory_is_an_error_and_no_result() -> None:
    """What is raised inside a compiled callback is printed and forgotten."""
    from hf_paged.kernels import cpu_kernels

    rows, columns, length, at_once, pieces = 1, 0, 1 << 44, 16, 1
    with pytest.raises(MemoryError, match="linear ran out of memory"):
        cpu_launch.launch(cpu_kernels.linear, 1, 0, 0, 0, 0, 0, rows, columns, length, at_once, pieces)
