"""What a checkpoint says beside its config.json: the label and the file names of tools from before Transformers' own.

AutoGPTQ wrote `quantize_config.json` and `gptq_model-4bit-128g.safetensors`, AutoAWQ `quant_config.json`, and the
config.json of that time knows nothing of either; compressed-tensors called its label `compression_config`. Left alone,
Transformers finds no weights, or starts the linears at random and loads the rest. `adopt` completes the config of a
local folder, and refuses packed weights without a label; `second_label` is what a folder says a second time.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_paged.quant.header import read_header
from hf_paged.quant.layout import TensorSpec

_LABELS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # file -> its method, where it names none
_STANDARD = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_PACKED = (".qweight", ".weight_packed")


def adopt(config: Any) -> None:
    """Give `config`, read from a local folder, the label and the file name that lie beside it.

    Raises:
        ValueError: the label is no JSON object, packed weights have none, or the index of the weight files is no index.
    """
    folder = Path(str(getattr(config, "_name_or_path", "") or ""))
    if not (folder / "config.json").is_file():
        return
    if getattr(config.get_text_config(decoder=True), "quantization_config", None) is None:
        label = getattr(config, "quantization_config", None) or _old_name(config) or second_label(folder)
        if label is None:
            _refuse_unlabelled(folder)
            return
        config.quantization_config = label
    label = getattr(config, "quantization_config", None)
    if isinstance(label, dict) and label.get("quant_method") is None and not _is_bitsandbytes(label):
        config.quantization_config = {"quant_method": _method(label), **_without(label, "quant_method")}
    _check_index(folder / SAFE_WEIGHTS_INDEX_NAME)
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1 and not any((folder / name).is_file() for name in _STANDARD):
        config.transformers_weights = single[0].name


def check_label(folder: Path) -> None:
    """Refuse a config.json whose label is no mapping: Transformers fails when it prints what it has read.

    Raises:
        ValueError: that; a file that is missing or no JSON is left to Transformers, which names it.
    """
    file = folder / "config.json"
    try:
        label = json.loads(file.read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if label is not None and not isinstance(label, dict):
        raise ValueError(f"{file}: quantization_config is {label!r:.80}; expected a JSON object")


def second_label(folder: Path) -> dict[str, Any] | None:
    """What a `quantize_config.json` or `quant_config.json` in `folder` says.

    Raises:
        ValueError: it is no JSON object.
    """
    for name, method in _LABELS.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            label = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: expected a JSON object ({error})") from error
        if not isinstance(label, dict):
            raise ValueError(f"{file}: expected a JSON object, found {type(label).__name__}")
        return {"quant_method": method, **label}
    return None


def _check_index(file: Path) -> None:
    """Transformers reads it first, and says less."""
    if not file.is_file() or (file.parent / SAFE_WEIGHTS_NAME).is_file():
        return
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
        known = bool(weight_map) and all(isinstance(name, str) for name in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise ValueError(
            f"{file}: expected a JSON object whose weight_map names a file for each tensor; fetch it again"
        )


def _old_name(config: Any) -> dict[str, Any] | None:
    """`compression_config`, in which the label lay alone or beside one of sparsity."""
    label = getattr(config, "compression_config", None)
    if not isinstance(label, dict):
        return None
    inner = label.get("quantization_config")
    fields = inner if isinstance(inner, dict) else label
    return {"quant_method": "compressed-tensors", **_without(fields, "quant_method")}


def _method(label: dict[str, Any]) -> str:
    """The method of a label that names none, by the keys that only its tool writes."""
    if "config_groups" in label:
        return "compressed-tensors"
    if "weight_block_size" in label or "activation_scheme" in label:
        return "fp8"
    return "awq" if label.keys() & {"w_bit", "q_group_size", "zero_point"} else "gptq"


def _is_bitsandbytes(label: dict[str, Any]) -> bool:
    return bool(label.get("load_in_4bit") or label.get("load_in_8bit"))


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _refuse_unlabelled(folder: Path) -> None:
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    files = [single]
    found: dict[str, TensorSpec] = {}
    # a damaged file is Transformers' to report
    with suppress(ValueError, AttributeError, KeyError, OSError, TypeError):
        if not single.is_file() and index.is_file():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        found.update(read_header([str(file) for file in files]).specs)
    packed = next((key for key, spec in found.items() if key.endswith(_PACKED) or spec.dtype.startswith("F8")), None)
    if packed is not None:
        raise ValueError(
            f"tensor {packed}: quantized, but {folder / 'config.json'} has no quantization_config; add the one that "
            'the tool wrote, for instance {"quant_method": "gptq", "bits": 4, "group_size": 128}'
        )
