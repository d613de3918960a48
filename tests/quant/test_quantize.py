"""The pipeline around the algorithms: from files or memory, one layer at a time, on a CPU or a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_runs import CONFIG, ids, quantize, same_weights
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged.quant import decoder_layers
from hf_paged.quant.quantize_config import QuantizeConfig


def test_a_model_in_memory_gives_the_files_that_its_folder_gives(model_path: Path, tmp_path: Path) -> None:
    quantize(model_path, tmp_path / "from-files")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = quantize(model, tmp_path / "from-memory")
    assert report.model == "a model in memory"  # and not its whole module tree, as str() has it
    assert same_weights(tmp_path / "from-files", tmp_path / "from-memory")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())  # left alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-files", "from-memory"]


def test_only_one_layer_is_ever_materialised(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.quant.source_model import SourceModel

    most = [0]
    fill = SourceModel.fill

    def counting(self: Any, prefix: str, *args: Any) -> None:
        fill(self, prefix, *args)
        layers = self.model.model.layers
        held = sum(any(not p.is_meta for p in layer.parameters()) for layer in layers)
        most[0] = max(most[0], held)

    monkeypatch.setattr(SourceModel, "fill", counting)
    quantize(model_path, tmp_path / "out")
    assert most == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn", "fp8"])
def test_a_gpu_gives_a_checkpoint_as_good_as_the_cpus(
    method: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, method=method, group_size=-1 if method == "fp8" else 32)
    calibration = ids() if config.calibrated else None
    reports = {}
    for where in ("cpu", "cuda", "offloaded"):
        if where == "offloaded":  # hidden states do not fit: they stay on the CPU between layers
            monkeypatch.setattr(decoder_layers, "_SHARE_ON_DEVICE", 0.0)
        reports[where] = hf_paged.quantize(
            model_path, config, calibration, output=tmp_path / where, progress=False,
            device="cpu" if where == "cpu" else "cuda",
        )  # fmt: skip
    assert reports["cuda"].peak_device_bytes and reports["cpu"].peak_device_bytes is None
    assert same_weights(tmp_path / "cuda", tmp_path / "offloaded")
    for one, other in zip(reports["cpu"].layers, reports["cuda"].layers, strict=True):
        for a, b in zip(one.linears, other.linears, strict=True):
            assert b.error == pytest.approx(a.error, rel=0.2), (a, b)  # near ties are rounded apart
    AutoModelForCausalLM.from_pretrained(tmp_path / "cuda", dtype=torch.float32, device_map="cuda")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_descent_lowers_the_error_of_the_first_layers_linears(method: str, model_path: Path, tmp_path: Path) -> None:
    """Those see the same inputs with and without it, up to the first that reads what another wrote."""
    config = replace(CONFIG, method=method)
    with_it = quantize(model_path, tmp_path / "with", config)
    without = quantize(model_path, tmp_path / "without", replace(config, descent=False))
    for name in ("q_proj", "k_proj", "v_proj"):
        one, other = (
            next(linear.error for linear in report.layers[0].linears if linear.name.endswith(name))
            for report in (with_it, without)
        )
        assert one < other, name


def test_act_order_is_the_default_only_where_no_reader_must_reorder() -> None:
    """With groups that move it costs readers a gather: that must be asked for."""
    assert QuantizeConfig(method="gptq").resolved().act_order is True
    assert QuantizeConfig(method="gptq", static_groups=False).resolved().act_order is False
    assert QuantizeConfig(method="awq").resolved().act_order is False


def test_a_cpu_needs_no_triton(model_path: Path, tmp_path: Path) -> None:
    """It exists on Linux only; elsewhere every method is its definition."""
    script = textwrap.dedent("""
        import sys
        sys.modules["triton"] = None
        from dataclasses import replace
        from pathlib import Path
        from quantize_runs import CONFIG, quantize
        for method in ("gptq", "awq", "rtn", "fp8"):
            config = replace(CONFIG, method=method, group_size=-1 if method == "fp8" else 32)
            quantize(sys.argv[1], Path(sys.argv[2]) / method, config)
    """)
    command = [sys.executable, "-W", "ignore", "-c", script, str(model_path), str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*/config.json"))) == 4
