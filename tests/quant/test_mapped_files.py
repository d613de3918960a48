"""Pages of weight files are given back while a checkpoint is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from model_zoo import tiny_model
from quant_files import Cell, write_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_paged.eval.random_checkpoint import Format, LlamaShape, write_checkpoint
from hf_paged.quant import convert
from hf_paged.quant.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 64 << 20


def resident(folder: Path) -> int:
    """Bytes of the files in `folder` that this process holds; libraries, which load at any time, do not count."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # the head of a mapping: range, permissions, offset, device, inode, path
            inside = len(fields) == 6 and Path(fields[5]).is_relative_to(folder.resolve())
        elif inside and fields[0] == "Rss:":
            total += int(fields[1]) << 10
    return total


def test_pages_that_were_copied_are_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    """A 70B model loaded to a GPU would hold 35 GB of its files in CPU memory, too."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(SIZE // 8)}, file)
    files = MappedFiles([str(file)])
    with safe_open(file, framework="pt") as opened:
        value = opened.get_slice("a")[...]
        total = int(value.sum())
        assert resident(tmp_path) > SIZE // 2
        files.release()
        assert resident(tmp_path) == 0
        assert int(value.sum()) == total


def test_what_an_older_model_wrote_to_its_pages_is_not_lost(tmp_path: Path) -> None:
    """A model on the CPU views its files; trained there, it would go back to them when they are loaded to a GPU."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(SIZE // 64)}, file)
    with safe_open(file, framework="pt") as older:
        value = older.get_slice("a")[...]
        value.fill_(1)
        files = MappedFiles([str(file)])
        with safe_open(file, framework="pt") as opened:
            copied = opened.get_slice("a")[...].clone()
            files.release()
        assert not copied.any() and bool((value == 1).all())


def test_they_are_given_back_in_portions_and_only_for_tensors_that_left_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is loaded on the CPU may look into its files for good."""
    counted: list[int] = []
    monkeypatch.setattr(convert.MappedFiles, "was_copied", lambda self, num_bytes: counted.append(num_bytes))
    write_model(tiny_model("llama"), tmp_path, Cell())
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(counted) == 21 and not any(counted)
    monkeypatch.undo()
    released: list[int] = []
    files = MappedFiles([str(tmp_path / "model.safetensors")])
    monkeypatch.setattr(files, "release", lambda: released.append(1))
    for _ in range(5):
        files.was_copied(128 << 20)
    assert len(released) == 2


@pytest.mark.gpu
def test_a_checkpoint_larger_than_the_portions_never_lies_in_cpu_memory_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = LlamaShape(hidden=4096, intermediate=11008, layers=8, heads=32, kv_heads=32, vocab=256)
    write_checkpoint(tmp_path, shape, Format())
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    after: list[int] = []
    release = MappedFiles.release

    def counted(files: MappedFiles) -> None:
        release(files)
        after.append(resident(tmp_path))

    monkeypatch.setattr(MappedFiles, "release", counted)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, device_map="cuda")
    assert len(after) >= 3 and min(after) < size / 4, (size, after)  # threads read on meanwhile
