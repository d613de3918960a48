"""The model to quantize, as its files: an empty model to know the structure, and tensors read when they are needed.

Nothing but buffers is ever materialised whole: a part (the embeddings, one decoder layer) is filled from the
safetensors shards, used, and emptied again, so a model larger than the GPU's and the CPU's memory can be worked on.
Experts that a file holds one by one stay so (`UnfusedExperts`), because that is how quantized files hold them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from hf_paged.private_transformers import find_file
from hf_paged.quant.experts import PROJECTIONS
from hf_paged.quant.header import read_header
from hf_paged.quant.unfused_experts import UnfusedExperts, can_unfuse

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a file: a weight file is not read whole to tell it from another


class SourceModel:
    """A checkpoint folder (or hub name) of a plain model.

    Raises:
        OSError: there is no such model.
        ValueError: it is quantized already, has no safetensors files, or a tensor that fits nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.config = AutoConfig.from_pretrained(path)
        _refuse_quantized(path, self.config)
        self.header = read_header(_weight_files(path))
        with init_empty_weights(include_buffers=False):  # buffers (rotary frequencies) are small, and not in files
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config, dtype=self.config.dtype or torch.float32, **_attention(self.config)
            )
        self.model.eval().requires_grad_(False)
        self.tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})  # tied name -> its source
        self._shapes = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        self.file_name = self._match_files()  # the model's name of a tensor -> its name in the files

    def config_fields(self) -> dict[str, Any]:
        """config.json as it is."""
        path = cached_file(self.path, "config.json")
        assert path is not None
        fields: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return fields

    def fingerprint(self) -> str:
        """A hash of the config, of what the files' headers say, and of samples of the weights."""
        files = {Path(file).name: _sampled(Path(file)) for file in set(self.header.files.values())}
        specs = {name: str(spec) for name, spec in self.header.specs.items()}
        text = json.dumps([self.config.to_json_string(), files, specs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def refuse_missing(self, prefix: str) -> None:
        """Raise ValueError when a tensor of the module `prefix` is not in the files."""
        names = [name for name in self._shapes if name.startswith(f"{prefix}.")]
        if missing := [name for name in names if self._key(name) is None and not self._ignored(name)]:
            raise ValueError(
                f"{len(missing)} tensors of config.json's model are missing from the files of {self.path}, such as "
                f"{missing[0]}"
            )

    def _key(self, name: str) -> str | None:
        """Where the files hold a tensor of the model."""
        return self.file_name.get(name) or self.file_name.get(self.tied.get(name, ""))

    def fill(self, prefix: str, device: torch.device, dtype: torch.dtype | None) -> None:
        """Give the module `prefix` ("" for what no module owns) its weights, on `device`, floats as `dtype`."""
        module = self.model.get_submodule(prefix)
        names = [f"{prefix}.{name}" if prefix else name for name in module.state_dict()]
        for name, value in self.read(names):
            kind = dtype if value.is_floating_point() else None
            set_module_tensor_to_device(self.model, name, device, value=value, dtype=kind)
        module.to(device)  # buffers that are in no file

    def empty(self, prefix: str) -> None:
        """Take the weights away again; buffers stay, on the CPU."""
        module = self.model.get_submodule(prefix)
        for owner in module.modules():
            for name, value in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))
            for name, buffer in list(owner.named_buffers(recurse=False)):
                owner._buffers[name] = buffer.cpu()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(model name, tensor on the CPU) for every name, tied ones from what they are tied to; file by file.

        Raises:
            ValueError: a tensor is not in the files.
        """
        wanted: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            key = self._key(name)
            if key is None:
                if self._ignored(name):
                    continue
                raise ValueError(f"tensor {name} is missing from the files of {self.path}")
            wanted.setdefault(self.header.files[key], []).append((name, key))
        for file, pairs in wanted.items():
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name, key in pairs:
                    yield name, opened.get_tensor(key)

    def read_files(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name in the files, tensor on the CPU), in the order asked for."""
        for key in keys:
            with safe_open(self.header.files[key], framework="pt", device="cpu") as opened:
                yield key, opened.get_tensor(key)

    def _match_files(self) -> dict[str, str]:
        """Names as Transformers' own loading would give them, experts left apart; shapes are checked."""
        conversions = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        renamed = {
            key: rename_source_key(key, renamings, [], self.model.base_model_prefix, self._shapes)[0]
            for key in self.header.specs
        }
        self._unfuse_experts(renamed)
        matched: dict[str, str] = {}
        for key, name in renamed.items():
            expected = self._shapes.get(name)
            if expected is None:
                name, pattern = rename_source_key(
                    key, renamings, converters, self.model.base_model_prefix, self._shapes
                )
                if pattern is not None:
                    raise ValueError(
                        f"tensor {key}: {type(self.model).__name__} converts it when it loads ({pattern}), which "
                        "quantizing from the files cannot do; save the model with Transformers first"
                    )
                continue  # belongs to no module: Transformers ignores it, and it is copied as it is
            found = self.header.specs[key].shape
            if expected != found:
                raise ValueError(f"tensor {key}: expected {list(expected)}, found {list(found)}")
            matched[name] = key
        return matched

    def _unfuse_experts(self, renamed: dict[str, str]) -> None:
        """Replace fused experts that the files hold one by one. The names of `renamed` follow the module."""
        pattern = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight$")
        owners: dict[str, dict[str, set[int]]] = {}
        prefix = f"{self.model.base_model_prefix}."
        modules = dict(self.model.named_modules())
        for key, name in renamed.items():
            match = pattern.fullmatch(name)
            if match is None or match[3] not in sum(PROJECTIONS, ()):
                continue
            owner = next((o for o in (match[1], prefix + match[1]) if can_unfuse(modules.get(o))), None)
            if owner is not None:
                owners.setdefault(owner, {}).setdefault(match[3], set()).add(int(match[2]))
                renamed[key] = f"{owner}.{match[2]}.{match[3]}.weight"
        for owner, found in owners.items():
            names = next((names for names in PROJECTIONS if set(names) == set(found)), None)
            count = int(modules[owner].num_experts)
            if names is None or any(experts != set(range(count)) for experts in found.values()):
                raise ValueError(f"experts {owner}: expected {count} experts with {PROJECTIONS}, found {sorted(found)}")
            with init_empty_weights(include_buffers=False):
                self.model.set_submodule(owner, UnfusedExperts(modules[owner], names))
        if owners:
            self._shapes = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}

    def _ignored(self, name: str) -> bool:
        patterns = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)


def _sampled(file: Path) -> str:
    """A hash of the length and of pieces from all over a file: training changes nearly every weight."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for i in range(_SAMPLES):
            opened.seek(size * i // _SAMPLES)
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _refuse_quantized(path: str, config: Any) -> None:
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", found)
        raise ValueError(f"model {path} is quantized already ({method}): expected the plain weights it was made from")


def _attention(config: Any) -> dict[str, str]:
    """SDPA drops a softcap without a word: such models calibrate with the eager attention."""
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if softcap else {}


def _weight_files(path: str) -> list[str]:
    """The safetensors files of a folder or hub name."""
    index = find_file(path, _INDEX)
    if index is not None:
        try:
            files, _ = get_checkpoint_shard_files(path, index)
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"model {path}: {_INDEX} is damaged, expected JSON with a weight_map: {error}") from error
        if missing := [file for file in files if not Path(file).is_file()]:
            raise ValueError(f"model {path}: {_INDEX} names {Path(missing[0]).name}, which is not there")
        return list(files)
    single = find_file(path, _SINGLE)
    if single is None:
        raise ValueError(f"model {path}: expected {_SINGLE} or {_INDEX}; save it with Transformers first")
    return [single]
