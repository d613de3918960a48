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


def resident() -> int:
    """Bytes of files that this process holds."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_pages_that_were_copied_are_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    """A 70B model loaded to a GPU would hold 35 GB of its files in CPU memory, too."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(SIZE // 8)}, file)
    with safe_open(file, framework="pt") as opened:
        before = resident()
        value = opened.get_slice("a")[...]
        total = int(value.sum())
        assert resident() - before > SIZE // 2
        MappedFiles([str(file)]).release()
        assert resident() - before < SIZE // 8
        assert int(value.sum()) == total


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
    torch.zeros(1, device="cuda")  # loads libraries, which are files, too
    before, after = resident(), list[int]()
    release = MappedFiles.release

    def counted(files: MappedFiles) -> None:
        release(files)
        after.append(resident() - before)

    monkeypatch.setattr(MappedFiles, "release", counted)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, device_map="cuda")
    assert len(after) >= 3 and min(after) < size / 4, (size, after)  # threads read on meanwhile
