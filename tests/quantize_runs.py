"""What the tests of `hf_paged.quantize` share: a run on a tiny model, and whether two outputs hold the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_zoo import VOCAB
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import hf_paged
from hf_paged.quant.quantize_config import QuantizeConfig
from hf_paged.quant.quantize_report import QuantizeReport

CONFIG = QuantizeConfig(group_size=32)  # windows are given as ids


def ids(samples: int = 6, seqlen: int = 32) -> Tensor:
    return torch.randint(3, VOCAB, (samples, seqlen), generator=torch.Generator().manual_seed(7))


def quantize(
    model_path: Path | PreTrainedModel, output: Path, config: QuantizeConfig = CONFIG, **options: Any
) -> QuantizeReport:
    return hf_paged.quantize(
        model_path, config, ids() if config.calibrated else None, output=output, device="cpu", progress=False, **options
    )


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
