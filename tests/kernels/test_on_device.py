"""Kernels run on the GPU that holds their operands, whatever the current one is."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import on_device as module
from hf_paged.kernels.on_device import cuda_capability, on_device


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


def is_guarded(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "on_device" for decorator in function.decorator_list)


def unguarded(functions: list[ast.FunctionDef]) -> set[str]:
    """Of one file: those that hold `kernel[grid](...)`, or the name of one that does, and are not guarded."""
    names: set[str] = set()

    def launches(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = node.func.value
            return isinstance(kernel, ast.Name) and kernel.id.islower()
        return isinstance(node, ast.Name) and node.id in names

    open_ones = [function for function in functions if not is_guarded(function)]
    for _ in open_ones:
        names |= {function.name for function in open_ones if any(map(launches, ast.walk(function)))}
    return names


def test_every_launcher_is_guarded() -> None:
    """One that is forgotten works on every machine with a single GPU. Private ones are called by others of their
    file, those of the workspace by prefill attention, shares by both kinds of decode attention.
    """
    found: set[str] = set()
    for file in Path(module.__file__).parent.glob("*.py"):
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        found |= unguarded(functions)
    assert {name for name in found if not name.startswith("_")} == {"slices", "attend_shares"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_of_another_gpu_s_tensors_gives_their_result() -> None:
    from hf_paged.kernels.fused_ops import rms_norm
    from hf_paged.kernels.reference_fused import RMSNorm

    x = torch.randn(4, 256, device="cuda:1")
    result = rms_norm(x, RMSNorm(weight=torch.ones(256, device="cuda:1"), eps=1e-6, offset=0.0, cast_first=True))
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (256,), eps=1e-6))
    assert torch.cuda.current_device() == 0


def test_a_gpu_of_another_maker_is_not_taken_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's gfx942 says (9, 4): it would get NVIDIA's instructions. Nobody asks torch directly."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    assert cuda_capability(0) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert cuda_capability(0) == (0, 0)
    package = Path(module.__file__).parent.parent
    asking = {
        file.name
        for folder in (package, package / "kernels", package / "quant")
        for file in folder.glob("*.py")
        if "get_device_capability" in file.read_text()
    }
    assert asking == {"on_device.py"}
