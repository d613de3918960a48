"""Kernels run on the GPU that holds their operands, whatever the current one is."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import on_device as module
from hf_paged.kernels.decode_attention import decode_attention
from hf_paged.kernels.on_device import on_device
from hf_paged.kernels.prefill_attention import prefill_attention
from hf_paged.kernels.sample import sample
from hf_paged.kernels.w4a16 import w4a16
from hf_paged.kernels.write_kernel import write_kv


def test_a_launcher_runs_with_the_device_of_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which is cuda:0 for a model on cuda:1 unless someone says so."""
    current = ["cuda:0"]

    class OnGpu:
        is_cuda, device = True, "cuda:1"

    @contextmanager
    def device_of(tensor: OnGpu):
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(module, "Tensor", OnGpu)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    assert on_device(lambda layer, tensor: current[-1])("a layer", OnGpu()) == "cuda:1"
    assert current == ["cuda:0"]


@pytest.mark.parametrize("launcher", [decode_attention, prefill_attention, write_kv, sample, w4a16])
def test_launchers_are_guarded(launcher) -> None:
    assert launcher.__wrapped__.__globals__["on_device"] is on_device


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_of_another_gpu_s_tensors_gives_their_result() -> None:
    from hf_paged.kernels.fused_ops import rms_norm
    from hf_paged.kernels.reference_fused import RMSNorm

    x = torch.randn(4, 256, device="cuda:1")
    result = rms_norm(x, RMSNorm(weight=torch.ones(256, device="cuda:1"), eps=1e-6, offset=0.0, cast_first=True))
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (256,), eps=1e-6))
    assert torch.cuda.current_device() == 0
