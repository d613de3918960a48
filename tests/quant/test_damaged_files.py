"""A damaged checkpoint ends in an error that names what is wrong, or loads exactly what the file says. Nothing
between.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from model_zoo import tiny_model
from quant_files import Cell, write_fp8_model, write_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

MUTATIONS = 200
CELLS = (
    Cell(act_order=True),
    Cell(kind="awq_gemm"),
    Cell(kind="compressed", bits=8),
    Cell(kind="int8", bits=8),
    Cell(kind="compressed", unpacked_zeros=True, act_order=True),
    Cell(kind="awq_gemv"),
    Cell(kind="llm_awq"),
    Cell(bits=3, version=2),
    Cell(bits=8, symmetric=True),
)
GRAINS = ("channel", "block")  # of FP8


class File:
    """A safetensors file in memory, cut into its header and its data."""

    def __init__(self, path: Path) -> None:
        self.raw = bytearray(path.read_bytes())
        (size,) = struct.unpack("<Q", self.raw[:8])
        self.header = json.loads(self.raw[8 : 8 + size])
        self.data = self.raw[8 + size :]
        self.header.pop("__metadata__", None)

    def join(self) -> bytes:
        text = json.dumps(self.header).encode()
        return struct.pack("<Q", len(text)) + text + bytes(self.data)


def _some(file: File, rng: random.Random) -> dict[str, list[int]]:
    return file.header[rng.choice(sorted(file.header))]


def _truncate(file: File, rng: random.Random) -> bytes:
    return bytes(file.raw[: rng.randrange(len(file.raw))])


def _flip_header(file: File, rng: random.Random) -> bytes:
    position = rng.randrange(8 + len(json.dumps(file.header)))
    file.raw[position] ^= 1 << rng.randrange(8)
    return bytes(file.raw)


def _flip_data(file: File, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 20)):
        file.data[rng.randrange(len(file.data))] ^= 1 << rng.randrange(8)
    return file.join()


def _dtype(file: File, rng: random.Random) -> bytes:
    entry = _some(file, rng)
    same_size = {"I32": ["F32"], "F32": ["I32"], "F16": ["BF16", "I16"], "I64": ["F64"]}
    entry["dtype"] = rng.choice(same_size.get(str(entry["dtype"]), ["U8"]))
    return file.join()


def _shape(file: File, rng: random.Random) -> bytes:
    entry = _some(file, rng)
    entry["shape"] = rng.choice([entry["shape"][::-1], [1, *entry["shape"]], [0, *entry["shape"][1:]]])
    if 0 in entry["shape"]:
        entry["data_offsets"] = [entry["data_offsets"][0]] * 2
    return file.join()


def _drop(file: File, rng: random.Random) -> bytes:
    del file.header[rng.choice(sorted(file.header))]
    return file.join()


def _swap(file: File, rng: random.Random) -> bytes:
    one, two = rng.sample(sorted(file.header), 2)
    file.header[one], file.header[two] = file.header[two], file.header[one]
    return file.join()


def _not_a_number(file: File, rng: random.Random) -> bytes:
    entry = _some(file, rng)
    start, end = entry["data_offsets"]
    at = rng.randrange(start, end - 3) // 4 * 4
    file.data[at : at + 4] = b"\xff\xff\xff\xff"  # NaN in F16 and F32, all ones in integers
    return file.join()


def _of_tensors(change: Callable[[Tensor], Tensor]) -> Callable[[File, random.Random], bytes]:
    def apply(file: File, rng: random.Random) -> bytes:
        tensors = safetensors.torch.load(bytes(file.raw))
        name = rng.choice(sorted(tensors))
        return safetensors.torch.save({**tensors, name: change(tensors[name]).contiguous()})

    return apply


_zero = _of_tensors(torch.zeros_like)
_negate = _of_tensors(lambda value: -value if value.is_floating_point() and value.element_size() > 1 else value)
_cut = _of_tensors(lambda value: value[: (len(value) + 1) // 2] if value.dim() else value)

CHANGES: tuple[Callable[[File, random.Random], bytes], ...] = (
    _truncate,
    _flip_header,
    _flip_data,
    _dtype,
    _shape,
    _drop,
    _swap,
    _not_a_number,
    _zero,
    _negate,
    _cut,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    sizes = {"num_hidden_layers": 1, "intermediate_size": 128}
    for cell in CELLS:
        made.append(tmp_path_factory.mktemp(str(cell)))
        write_model(tiny_model("llama", **sizes), made[-1], cell)
    for grain in GRAINS:
        made.append(tmp_path_factory.mktemp(grain))
        write_fp8_model(tiny_model("llama", **sizes), made[-1], grain)
    made.append(tmp_path_factory.mktemp("experts"))
    write_model(tiny_model("mixtral", num_hidden_layers=1), made[-1], Cell(kind="awq_gemm"))
    return made


@pytest.mark.parametrize("part", range(8))
def test_random_damage_is_named_or_loads_what_the_file_says(part: int, folders: list[Path], tmp_path: Path) -> None:
    """200 mutations in all: no crash, no hang, no model that differs from its file."""
    rng = random.Random(part)
    for number in range(MUTATIONS // 8):
        folder = folders[number % len(folders)]
        change = CHANGES[(number + part) % len(CHANGES)]
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        path = tmp_path / "model.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(change(File(folder / "model.safetensors"), rng))
        try:
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        except ValueError as error:
            named = any(word in str(error) for word in ("tensor", "weight file", "module"))
            assert named, str(error)  # noqa: PT017 (most mutations end here, some load)
            continue
        stored = load_file(path)
        model.save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again" / "model.safetensors")
        for name, value in stored.items():
            if name in again and (
                name.endswith(
                    ("qweight", "weight_packed", "scales", "weight_scale", "proj.weight", "embed_tokens.weight")
                )
            ):
                assert torch.equal(value.float(), again[name].float()), (change.__name__, name)
        with torch.no_grad():
            assert model(torch.arange(3, 9)[None]).logits.shape == (1, 6, 96)


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"not a safetensors file at all", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_file_is_named(content: bytes, folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"weight file .*model\.safetensors: "):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
