"""Pages of weight files are given back while a checkpoint is read."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import subprocess
import sys
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_paged.eval.random_checkpoint import Format, LlamaShape, write_checkpoint
from hf_paged.quant.mapped_files import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 64 << 20


def resident(folder: Path, process: int | str = "self") -> int:
    """Bytes of the files in `folder` that a process holds; libraries, which load at any time, do not count."""
    total, inside = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
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


def test_what_another_device_got_is_given_back_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    files = MappedFiles([str(tmp_path / "model.safetensors")])
    monkeypatch.setattr(files, "release", lambda: released.append(1))
    for _ in range(5):
        files.were_copied([torch.empty(32 << 20, dtype=torch.uint8)], torch.device("cuda"))
    files.were_copied([torch.empty(256 << 20, dtype=torch.uint8)], torch.device("cpu"))
    assert len(released) == 2


def test_a_model_on_the_cpu_does_not_hold_its_packed_files_beside_the_packed_weights(tmp_path: Path) -> None:
    """4 GB of a model would take 8. What is not packed stays in the files, and is not given back under it."""
    shape = LlamaShape(hidden=1024, intermediate=2816, layers=4, heads=8, kv_heads=8, vocab=4096)
    write_checkpoint(tmp_path, shape, Format())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    with safe_open(next(tmp_path.glob("model-00005-of-*")), framework="pt") as ends:
        plain = sum(ends.get_tensor(name).nbytes for name in ends.keys())  # noqa: SIM118 (not a dict)
        assert torch.equal(model.lm_head.weight, ends.get_tensor("lm_head.weight"))
    del ends
    packed = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) - plain
    assert resident(tmp_path) < 2 * plain + packed / 5, (
        resident(tmp_path),
        plain,
        packed,
    )  # we, too, read the plain ones


PEAK = """
import json
import subprocess
import sys
import threading
from pathlib import Path
import hf_paged
from transformers import AutoModelForCausalLM

def memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def load(folder):
    ends = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(ends, "cpu") | {f"model.layers.{i}": "disk" for i in range(10)}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder + "-disk")

load(sys.argv[1])  # imports, code and threads are not the checkpoint's
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
load(sys.argv[2])
print(memory("VmHWM") - before)
"""


def test_a_checkpoint_streams_through_the_cpu_shard_by_shard(tmp_path: Path) -> None:
    """The peak of all memory, pages of files included, over a load whose layers go elsewhere (here to disk): a 70B
    model has to pass through the memory of a small machine.
    """
    small = LlamaShape(hidden=256, intermediate=512, layers=10, heads=4, kv_heads=2, vocab=256)
    shape = LlamaShape(hidden=2048, intermediate=5504, layers=10, heads=16, kv_heads=16, vocab=256)
    write_checkpoint(tmp_path / "small", small, Format())
    write_checkpoint(tmp_path / "large", shape, Format())
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors")]
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "clear_refs" in done.stderr:
        pytest.skip("this kernel does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    # beside two shards 64 MB of the gigabyte that is allowed
    assert int(done.stdout.split()[-1]) < 2 * max(sizes) + (64 << 20) < 0.5 * sum(sizes), (done.stdout, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_checkpoint_larger_than_the_portions_never_lies_in_cpu_memory_as_a_whole(tmp_path: Path, fp8: bool) -> None:
    """Measured beside the load, since threads of Transformers read ahead of what is converted, unless they are told not
    to. Nor does the GPU need a tenth more than the packed size."""
    shape = LlamaShape(hidden=4096, intermediate=11008, layers=8, heads=32, kv_heads=32, vocab=256)
    write_checkpoint(tmp_path, shape, Format())
    if fp8:
        rewrite_as_fp8(tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    watch = mp.get_context("spawn")  # a thread would wait for this process' lock while the load copies
    held, done = watch.SimpleQueue(), watch.Event()
    watcher = watch.Process(target=_watch, args=(tmp_path, os.getpid(), held, done))
    watcher.start()
    held.get()  # it looks
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16, device_map="cuda")
    finally:
        done.set()
    peak = held.get()
    watcher.join()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * sum(sizes)
    assert 0 < peak < 2 * max(sizes) + (256 << 20), (peak >> 20, [size >> 20 for size in sizes])


def _watch(folder: Path, process: int, held: SimpleQueue[int], done: Event) -> None:
    """Put a first look, then the most that was held until `done`."""
    held.put(peak := resident(folder, process))
    while not done.is_set():
        peak = max(peak, resident(folder, process))
    held.put(peak)


def rewrite_as_fp8(folder: Path) -> None:
    """Put FP8 weights of 128 x 128 blocks in the place of packed ones."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(".qweight")]:
            base, (k, n) = name.removesuffix(".qweight"), (tensors[name].shape[0] * 8, tensors[name].shape[1])
            for suffix in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{base}.{suffix}"]
            tensors[f"{base}.weight"] = torch.full((n, k), 0.5).to(torch.float8_e4m3fn)
            tensors[f"{base}.weight_scale_inv"] = torch.full((n // 128, k // 128), 1 / 64)
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    names = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
