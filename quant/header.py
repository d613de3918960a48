"""What the weight files say about their tensors, without reading the tensors.

Everything that can be wrong in a header is found here, with the file's name: not a safetensors file, truncated, a
tensor in two shards. `.bin` files are pickles and are only opened when the caller asked for them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_paged.quant.layout import TensorSpec

_TORCH_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a header's dtype name. Raises ValueError for one that torch does not have."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name} in a weight file: expected one of {sorted(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The tensors of all files of a checkpoint."""

    specs: Mapping[str, TensorSpec]
    files: Mapping[str, str]  # tensor name -> file

    def load(self, name: str, *, columns: int | None = None) -> Tensor:
        """Read one (small) tensor to the CPU, or the first columns of a matrix."""
        file = self.files[name]
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensor: Tensor = opened.get_tensor(name) if columns is None else opened.get_slice(name)[:, :columns]
                return tensor
        loaded: Tensor = _pickled(file, "cpu")[name]
        return loaded if columns is None else loaded[:, :columns]


def read_header(files: Iterable[str], *, allow_bin: bool = False) -> Header:
    """The header of a checkpoint's files. Raises ValueError, or OSError for one that is missing, naming
    the file and why it cannot be used."""
    specs: dict[str, TensorSpec] = {}
    owner: dict[str, str] = {}
    for file in files:
        if not file.endswith(".safetensors") and not allow_bin:
            raise ValueError(
                f"weight file {file}: expected .safetensors; a .bin is a pickle. Convert it, or pass "
                "quantization_config=...Config(allow_bin=True) of hf_paged.quant.config to read it"
            )
        for name, spec in _file_header(file).items():
            if name in specs:
                raise ValueError(f"tensor {name}: expected in one file, found in {owner[name]} and in {file}")
            specs[name], owner[name] = spec, file
    return Header(specs=specs, files=owner)


def _file_header(file: str) -> dict[str, TensorSpec]:
    if not Path(file).is_file():
        raise FileNotFoundError(f"weight file {file} is missing: the index names it; fetch it")
    if Path(file).stat().st_size == 0:
        raise ValueError(f"weight file {file}: expected a safetensors file, found 0 bytes; fetch it again")
    if not file.endswith(".safetensors"):
        return {
            name: TensorSpec(dtype=_TORCH_NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape))
            for name, tensor in _pickled(file, "meta").items()
        }
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: TensorSpec(dtype=view.get_dtype(), shape=tuple(view.get_shape())) for name, view in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"weight file {file}: damaged or truncated safetensors file ({error}); fetch it again"
        ) from error


def _pickled(file: str, device: str) -> dict[str, Tensor]:
    """The tensors of a .bin file. Those from before torch 1.6 are no archives and are read as a whole."""
    try:
        tensors = torch.load(file, map_location=device, mmap=zipfile.is_zipfile(file), weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"weight file {file}: damaged or truncated .bin file ({error}); fetch it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"weight file {file}: expected a dict of tensors, as torch.save(model.state_dict()) writes it")
    return tensors
