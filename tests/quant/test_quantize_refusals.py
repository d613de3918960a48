"""What `quantize` refuses: each in one message that names the thing, and before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged.quant.calibration import load_calibration
from hf_paged.quant.partial_output import PartialOutput
from hf_paged.quant.quantize_config import QuantizeConfig


class _ChatTokenizer:
    """Refuses every conversation, as a template does that finds a field missing."""

    chat_template = "{{ raise }}"
    bos_token = eos_token_id = None

    def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
        raise KeyError("role")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="50KB")
    return tmp_path / "model"


def quantize(path: Path, output: Path, device: str = "cpu", **settings: Any) -> hf_paged.QuantizeReport:
    config = QuantizeConfig(**{"group_size": 32, **settings})
    ids = torch.arange(64).view(4, 16) if config.calibrated else None
    return hf_paged.quantize(path, config, ids, output=output, device=device, progress=False)


def left(output: Path) -> list[str]:
    return [path.name for path in output.parent.iterdir() if path.name.startswith(output.name)]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "rtn", "clip": False},
        {"method": "gptq", "clip": False},
        {"method": "rtn", "damping": 0.5},
        {"method": "awq", "static_groups": False},
        {"method": "int8", "true_sequential": False},
        {"method": "rtn", "samples": 7},
        {"method": "int8", "seqlen": 64},
        {"method": "fp8", "seed": 1},
        {"bits": 4.0},
    ],
)
def test_a_setting_that_the_method_does_not_have_is_not_ignored(settings: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not allowed; allowed: "):
        QuantizeConfig(**settings)


@pytest.mark.parametrize("config", [{"method": "rtn"}, "rtn", QuantizeConfig])
def test_settings_of_another_type_are_named_instead_of_failing_somewhere(
    model_path: Path, tmp_path: Path, config: Any
) -> None:
    with pytest.raises(ValueError, match=r"config=.* is not allowed; allowed: a QuantizeConfig"):
        hf_paged.quantize(model_path, config, output=tmp_path / "out")


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_a_device_that_is_not_here_leaves_no_partial_folder(model_path: Path, tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="device="):
        quantize(model_path, tmp_path / "out", device=device)
    assert left(tmp_path / "out") == []


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": "none.safetensors"}}'])
def test_a_damaged_index_is_named(model_path: Path, tmp_path: Path, index: str) -> None:
    (model_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        quantize(model_path, tmp_path / "out", method="rtn")
    assert left(tmp_path / "out") == []


def test_a_layer_that_no_file_holds_is_found_before_any_work(model_path: Path, tmp_path: Path) -> None:
    config = json.loads((model_path / "config.json").read_text())
    (model_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing from the files of .*model\.layers\.2\."):
        quantize(model_path, tmp_path / "out", method="rtn")
    assert left(tmp_path / "out") == []


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_activations_that_are_nan_give_no_checkpoint(model_path: Path, tmp_path: Path, method: str) -> None:
    model = LlamaForCausalLM.from_pretrained(model_path)
    model.get_input_embeddings().weight.data[5] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="activations hold NaN"):
        quantize(tmp_path / "broken", tmp_path / "out", method=method)
    assert left(tmp_path / "out") == []


def test_an_output_that_is_a_link_is_refused_before_hours_of_work(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a link"):
        quantize(model_path, tmp_path / "out", method="rtn")


def test_an_output_below_a_file_is_refused(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="cannot be made"):
        quantize(model_path, tmp_path / "file" / "out", method="rtn")


def test_given_token_ids_are_judged_by_their_own_length(model_path: Path, tmp_path: Path) -> None:
    report = quantize(model_path, tmp_path / "out")  # seqlen is 2048 by default, the context 64, the windows 16
    assert len(report.layers) == 2


def test_skipping_everything_is_told_in_one_short_line(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no linear is left to quantize") as caught:
        quantize(model_path, tmp_path / "out", method="rtn", skip=(".",))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b'{"text": \n', b'{"messages": ["x"]}\n', b"[" * 100_000])
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\n" + content)
    with pytest.raises(ValueError, match=r"records\.jsonl:2: "):
        load_calibration(path, _ChatTokenizer())  # type: ignore[arg-type]


def test_a_resume_names_the_one_setting_that_differs_and_the_file_that_is_damaged(tmp_path: Path) -> None:
    output, settings = tmp_path / "out", {"config": {"bits": 4, "seed": 0}, "calibration": None}
    partial = PartialOutput(output, settings, resume=False)
    with pytest.raises(ValueError, match=r"started with config\.bits=4, now it is 3: "):
        PartialOutput(output, {**settings, "config": {"bits": 3, "seed": 0}}, resume=True)
    (partial.folder / "layer-00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(OSError, match=r"layer-00000\.safetensors is damaged, delete it"):
        partial.finished(0)
    (partial.folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        PartialOutput(output, settings, resume=True)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "int8"])
def test_a_linear_that_no_reader_would_take_is_named_at_its_layer(
    model_path: Path, tmp_path: Path, method: str
) -> None:
    """Equal weights become equal codes, which a loader takes for a download that broke off, hours later."""
    model = LlamaForCausalLM.from_pretrained(model_path)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(0.3)
    model.save_pretrained(tmp_path / "equal")
    with pytest.raises(ValueError, match=r"model\.layers\.1: .*mlp\.up_proj.* --skip"):
        quantize(tmp_path / "equal", tmp_path / "out", method=method)
    assert left(tmp_path / "out") == []
    quantize(tmp_path / "equal", tmp_path / "out", method=method, skip=("1.mlp.up_proj",))
