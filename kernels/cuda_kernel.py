"""A CUDA C++ kernel compiled at first use, for what Triton cannot say: register operands of `wgmma`, bulk copies.

NVRTC (the runtime compiler that PyTorch ships and uses itself) makes a cubin, kept in Triton's cache folder by the hash
of source and compiler; the driver loads and launches it. Public C interfaces only, through ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, *_CLUSTER_DIMENSION, *_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE, _CLUSTER, _OVERLAP = 2, 4, 6
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_TENSOR_TYPES = {torch.int32: 3, torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128_BYTES, _PROMOTE_256_BYTES = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorBox:
    """A view of a tensor that a kernel's bulk copies take boxes of, the fastest dimension first."""

    tensor: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the first; multiples of 16
    box: tuple[int, ...]
    swizzle: int = 0  # CU_TENSOR_MAP_SWIZZLE_*


class TensorMaps:
    """Says to a kernel's bulk copies how to find boxes; what is outside of a view is zero there.

    One argument, an array of one map a view. Does not keep tensors alive.
    """

    def __init__(self, views: Sequence[TensorBox]) -> None:
        self._memory = (ctypes.c_ubyte * (128 * len(views) + 64))()  # each aligned to 64
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        for i, view in enumerate(views):
            _encode(self.address + 128 * i, view)


def _encode(address: int, view: TensorBox) -> None:
    rank = len(view.sizes)
    encoded = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        _TENSOR_TYPES[view.tensor.dtype],
        rank,
        ctypes.c_void_p(view.tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*view.sizes),
        (ctypes.c_uint64 * (rank - 1))(*view.strides),
        (ctypes.c_uint32 * rank)(*view.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        view.swizzle,
        _PROMOTE_256_BYTES,
        0,  # zeros outside
    )
    _check(encoded)


class TensorMap(TensorMaps):
    """Of boxes of `rows` rows by 64 columns of a matrix.

    `x`: `[M, K]` fp16 or bf16, contiguous, K a multiple of 8, 16-byte aligned. A box lies in shared memory as rows of
    128 bytes whose 16-byte pieces are swizzled; what is outside of the matrix is zero there. Does not keep `x` alive.
    """

    def __init__(self, x: Tensor, rows: int) -> None:
        m, k = x.shape
        view = TensorBox(tensor=x, sizes=(k, m), strides=(2 * k,), box=(64, rows), swizzle=_SWIZZLE_128_BYTES)
        super().__init__([view])


class CudaKernel:
    """One function of a compiled source on the current device."""

    def __init__(self, source: str, name: str, architecture: str, shared_bytes: int) -> None:
        """`architecture`: as in "sm_90a"; `shared_bytes`: dynamic shared memory of every launch.

        RuntimeError when the compiler is missing or refuses.
        """
        torch.cuda.current_stream()  # the driver's context exists from here on
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        cubin = _compiled(source, name, architecture)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes))
        self._shared_bytes = shared_bytes

    def launch(
        self,
        grid: int,
        threads: int,
        arguments: Sequence[Tensor | TensorMaps | int | None],
        *,
        overlap: bool = False,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        """Pointers (None is null), tensor maps and 32-bit integers, on the current stream.

        With `overlap` it may start before the kernel before it has ended, and must wait for that one
        (`griddepcontrol.wait`) before it reads or writes what the other touches. `cluster`: blocks that run side by
        side and reach each other's shared memory; a divisor of `grid`. `cooperative`: all blocks run at the same time,
        or none; RuntimeError where there is no room for all.
        """
        values = [
            ctypes.c_int(item) if isinstance(item, int) else ctypes.c_void_p(None if item is None else item.data_ptr())
            for item in arguments
            if not isinstance(item, TensorMaps)
        ]
        plain = iter(values)
        pointers = (ctypes.c_void_p * len(arguments))(
            *(item.address if isinstance(item, TensorMaps) else ctypes.addressof(next(plain)) for item in arguments)
        )
        asked = ((_CLUSTER, (cluster, 1, 1)),) * (cluster > 1) + ((_OVERLAP, (1,)),) * overlap
        asked += ((_COOPERATIVE, (1,)),) * cooperative
        attributes = (_Attribute * 3)(*(_Attribute(id, 0, value) for id, value in asked))
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(grid, 1, 1, threads, 1, 1, self._shared_bytes, stream, attributes, len(asked))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


@cache
def serves_processes(index: int) -> bool:
    """Whether a GPU runs kernels of several processes at the same time (MPS); True where the driver cannot say."""
    device, value = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(device), index))
    return bool(_driver().cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device) or value.value)


def read_source(files: Iterable[str], defines: Mapping[str, object]) -> str:
    """CUDA sources of this folder as one, after their definitions."""
    texts = (Path(__file__).with_name(f"{file}.cu").read_text() for file in files)
    return "".join([*(f"#define {name} {value}\n" for name, value in defines.items()), *texts])


def _compiled(source: str, name: str, architecture: str) -> bytes:
    """The cubin, from Triton's cache folder or from the compiler."""
    from triton.runtime.cache import get_cache_manager

    version = (ctypes.c_int(), ctypes.c_int())
    _check_compiler(nvrtc().nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1])))
    told = f"{version[0].value}.{version[1].value} {architecture} {source}"
    manager = get_cache_manager(hashlib.sha256(told.encode()).hexdigest())
    found = manager.get_file(f"{name}.cubin")
    if found is not None:
        return Path(found).read_bytes()
    cubin = compile_cubin(source, name, architecture)
    manager.put(cubin, f"{name}.cubin", binary=True)
    return cubin


def compile_cubin(source: str, name: str, architecture: str) -> bytes:
    compiler, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    made = compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    _check_compiler(made)
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    done = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if done:
        _check_compiler(compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check_compiler(compiler.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC refused {name} for {architecture}:\n{log.value.decode()}")
    _check_compiler(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    _check_compiler(compiler.nvrtcGetCUBIN(program, cubin))
    _check_compiler(compiler.nvrtcDestroyProgram(ctypes.byref(program)))
    return cubin.raw


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC: the one of PyTorch's CUDA if the loader finds it, else the one of an installed `nvidia-cuda-nvrtc`."""
    if torch.version.cuda is not None:
        with suppress(OSError):
            return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    try:
        distribution = importlib.metadata.distribution("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError("neither PyTorch's libnvrtc nor the package nvidia-cuda-nvrtc is there") from error
    paths = [str(distribution.locate_file(file)) for file in distribution.files or [] if ".alt." not in file.name]
    ctypes.CDLL(next(path for path in paths if "libnvrtc-builtins.so" in path))  # the compiler asks for it by name
    return ctypes.CDLL(next(path for path in paths if "libnvrtc.so" in path))


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")


def _check_compiler(result: int) -> None:
    if result:
        compiler = nvrtc()
        compiler.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {compiler.nvrtcGetErrorString(result).decode()}")
