"""What a checkpoint says beside its config.json: the label and the file names of tools from before Transformers' own.

AutoGPTQ wrote `quantize_config.json` and `gptq_model-4bit-128g.safetensors`, AutoAWQ `quant_config.json`, and the
config.json of that time knows nothing of either. Left alone, Transformers finds no weights, or starts the linears at
random and loads the rest. `adopt` completes the config of a local folder, and refuses packed weights without a label.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_paged.quant.header import read_header

logger = logging.getLogger(__name__)

_LABELS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # file -> its method, where it names none
_STANDARD = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_PACKED = (".qweight", ".weight_packed")


def adopt(config: Any) -> None:
    """Give `config`, read from a local folder, the label and the file name that lie beside it.

    Raises:
        ValueError: the label is no JSON object, or packed weights have none.
    """
    folder = Path(str(getattr(config, "_name_or_path", "") or ""))
    if not (folder / "config.json").is_file():
        return
    if getattr(config.get_text_config(decoder=True), "quantization_config", None) is None:
        label = getattr(config, "quantization_config", None) or _label(folder)
        if label is not None:
            config.quantization_config = label
        else:
            _refuse_unlabelled(folder)
            return
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1 and not any((folder / name).is_file() for name in _STANDARD):
        config.transformers_weights = single[0].name


def _label(folder: Path) -> dict[str, Any] | None:
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
        logger.info("quantization_config is read from %s", file)
        return {"quant_method": method, **label}
    return None


def _refuse_unlabelled(folder: Path) -> None:
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    names: list[str] = []
    with suppress(ValueError, AttributeError):  # a damaged file is Transformers' to report
        if single.is_file():
            names = list(read_header([str(single)]).specs)
        elif index.is_file():
            names = list(json.loads(index.read_text()).get("weight_map", ()))
    packed = next((name for name in names if name.endswith(_PACKED)), None)
    if packed is not None:
        raise ValueError(
            f"tensor {packed}: packed, but {folder / 'config.json'} has no quantization_config; add the one that the "
            'tool wrote, for instance {"quant_method": "gptq", "bits": 4, "group_size": 128}'
        )
