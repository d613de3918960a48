"""A quantization that ends in the middle: nothing half-written, and continued where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import tiny_model
from quantize_runs import CONFIG, ids, quantize, same_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged.quant import partial_output
from hf_paged.quant.quantize import _Run


class Stopped(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize(
    "settings",
    [{"method": "gptq"}, {"method": "gptq", "scale": True}, {"method": "awq"}, {"method": "rtn"}],
    ids=str,
)
def test_a_resumed_run_gives_the_files_of_one_that_was_never_stopped(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a model in fp16: norms that took scales go on as they were rounded for the file."""
    model_path = tmp_path / "model"
    tiny_model("qwen2", intermediate_size=128).half().save_pretrained(model_path)
    config = replace(CONFIG, **settings)
    quantize(model_path, tmp_path / "whole", config)
    write = partial_output.PartialOutput.write_layer

    def stopping(self: Any, tensors: Any, report: Any) -> None:
        write(self, tensors, report)
        if report.index == 1:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "write_layer", stopping)
        with pytest.raises(Stopped):
            quantize(model_path, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="holds an unfinished run"):
        quantize(model_path, tmp_path / "out", config)
    with pytest.raises(ValueError, match=r"was started with config\.group_size=32, now it is 16"):
        quantize(model_path, tmp_path / "out", replace(config, group_size=16), resume=True)
    report = quantize(model_path, tmp_path / "out", config, resume=True)
    assert report.resumed_layers == 2 and len(report.layers) == 3
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_other_weights_of_the_same_shapes_do_not_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a model of one training beside half a model of another would load without a word."""

    def stopped(*args: Any) -> None:
        raise Stopped

    monkeypatch.setattr(partial_output.PartialOutput, "assemble", stopped)
    model = tiny_model("llama", intermediate_size=128)
    for _ in range(2):  # the same weights do
        with pytest.raises(Stopped):
            quantize(model, tmp_path / "out", resume=True)
    for parameter in model.parameters():
        parameter.data *= 1.01
    with pytest.raises(ValueError, match="was started with model="):
        quantize(model, tmp_path / "out", resume=True)


def test_another_calibration_text_does_not_continue_a_run(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any) -> None:
        raise Stopped

    monkeypatch.setattr(partial_output.PartialOutput, "assemble", stopped)
    with pytest.raises(Stopped):
        quantize(model_path, tmp_path / "out")
    with pytest.raises(ValueError, match="was started with calibration="):
        hf_paged.quantize(model_path, CONFIG, ids() + 1, output=tmp_path / "out", device="cpu", resume=True)


def test_a_run_killed_without_warning_leaves_no_output_and_can_be_resumed(model_path: Path, tmp_path: Path) -> None:
    code = f"""
        import sys, time, torch
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        torch.set_num_threads(1)
        from quantize_runs import CONFIG, ids
        from hf_paged.quant import partial_output
        from hf_paged.quant.quantize import quantize
        write = partial_output.PartialOutput.write_layer
        def slow(self, tensors, report):
            write(self, tensors, report)
            print("layer", report.index, flush=True)
            time.sleep(60 if report.index == 1 else 0)
        partial_output.PartialOutput.write_layer = slow
        quantize({str(model_path)!r}, CONFIG, ids(), output={str(tmp_path / "out")!r}, device="cpu", progress=False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env={**os.environ}, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "layer 1":
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    with pytest.raises((ValueError, OSError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out.partial")
    assert quantize(model_path, tmp_path / "out", resume=True).resumed_layers == 2
    quantize(model_path, tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_partial_folder_is_no_checkpoint_at_any_moment(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json is the last file of the whole folder, so that what Transformers finds there is complete."""
    order: list[str] = []
    write = partial_output._write_text

    def noting(path: Path, text: str) -> None:
        order.append(path.name)
        write(path, text)

    monkeypatch.setattr(partial_output, "_write_text", noting)
    quantize(model_path, tmp_path / "out")
    assert order[0] == "manifest.json" and order[-1] == "config.json"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_finished_layer_that_cannot_be_read_costs_no_other(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError deletes what is there, since it would come again; one about a layer file goes with the file."""

    def stopping(self: Any, index: int, *args: Any) -> Any:
        if index == 2:
            raise Stopped
        return quantize_layer(self, index, *args)

    def unusable(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor

    quantize_layer = _Run._quantize_layer
    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_quantize_layer", stopping)
        with pytest.raises(Stopped):
            quantize(model_path, tmp_path / "out")
    layer = tmp_path / "out.partial" / "layer-00001.safetensors"
    with safe_open(layer, framework="pt") as opened:
        metadata = opened.metadata()
    for broken in ({**metadata, "report": "{"}, metadata):
        save_file({name: unusable(tensor) for name, tensor in load_file(layer).items()}, layer, broken)
        with pytest.raises(OSError, match=r"layer-00001\.safetensors is damaged, delete it and continue"):
            quantize(model_path, tmp_path / "out", resume=True)
        assert layer.with_name("layer-00000.safetensors").exists()
    layer.unlink()
    assert quantize(model_path, tmp_path / "out", resume=True).resumed_layers == 1
