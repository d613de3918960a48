"""The decoder layers of an empty model, and what each is called with.

Found by structure: the one module list as long as the config has layers. What a layer is called with besides its hidden
states (masks, rotary embeddings) is learned from one forward in which every layer is replaced by a stub that hands its
input on, so a layer can then be run alone, on inputs that are kept between layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.quant.source_model import SourceModel

_TOKENS_PER_FORWARD = 8192  # enough for full matrix units; bounds a layer's temporaries
_SHARE_ON_DEVICE = 0.25  # of the device memory that is free, at most, for the hidden states between layers


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """The arguments of one layer for one batch, without its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Stop(Exception):
    """The last stub was reached."""


class _Stub(nn.Module):
    """Stands for a layer: notes what it is called with and hands its input on."""

    def __init__(self, layer: nn.Module, log: list[tuple[Tensor, LayerCall]], *, as_tuple: bool, last: bool) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a child: its attributes are read by some models (attention_type)
        self.log, self.as_tuple, self.last = log, as_tuple, last

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, call = args[0], LayerCall(args=args[1:], kwargs=kwargs)
        else:
            kwargs = dict(kwargs)
            hidden, call = kwargs.pop("hidden_states"), LayerCall(args=(), kwargs=kwargs)
        self.log.append((hidden, call))
        if self.last:
            raise _Stop
        return (hidden,) if self.as_tuple else hidden


def find_decoder_layers(model: PreTrainedModel) -> str:
    """The name of the list of decoder layers.

    Raises:
        ValueError: an encoder-decoder model, or no list (or several) of the length that the config states.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; decoder-only models can be quantized")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    names = [n for n, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    names = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]  # lists inside a layer
    if len(names) > 1:  # a tower beside the decoder: the decoder's parameters are in its base model
        decoder = model.get_decoder()
        names = [n for n in names if any(model.get_submodule(n) is module for module in decoder.modules())]
    if len(names) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, found {len(names)} {names or ''}"
        )
    if len({id(layer) for layer in model.get_submodule(names[0]).children()}) != count:
        raise ValueError(f"{type(model).__name__} uses one decoder layer several times: it has no weights of its own")
    return names[0]


class LayerInputs:
    """The hidden states between two decoder layers for all calibration windows, and how to call a layer with them.

    They stay on the device while they take less than a quarter of what is free there, else on the CPU.
    """

    def __init__(self, hidden: Tensor, calls: dict[int, list[LayerCall]], batch: int, device: torch.device) -> None:
        self.hidden = hidden  # [samples, seqlen, hidden_size]
        self.device, self.batch = device, batch
        self._calls = calls  # batch size -> per layer
        self._on_device: dict[int, tuple[int, LayerCall]] = {}

    @property
    def samples(self) -> int:
        return self.hidden.shape[0]

    def run(self, index: int, layer: nn.Module, *, limit: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Run `layer` (the `index`-th) batch by batch: (samples, output `[batch, seqlen, hidden_size]`)."""
        for start in range(0, self.samples if limit is None else min(limit, self.samples), self.batch):
            part = slice(start, min(start + self.batch, self.samples))
            yield part, self.call(index, layer, self.hidden[part])

    def call(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """One forward of `layer` on `hidden`, a batch or a single window."""
        call = self._call(index, hidden.shape[0])
        out = layer(hidden.to(self.device), *call.args, **call.kwargs)
        output: Tensor = out[0] if isinstance(out, tuple) else out
        return output

    def copy(self) -> LayerInputs:
        """The same hidden states, to be advanced apart."""
        return LayerInputs(self.hidden.clone(), self._calls, self.batch, self.device)

    def advance(self, index: int, layer: nn.Module) -> None:
        """Replace every window's hidden states by the layer's output."""
        for part, output in self.run(index, layer):
            self.hidden[part].copy_(output)

    def _call(self, index: int, size: int) -> LayerCall:
        kept = self._on_device.get(size)
        if kept is None or kept[0] != index:
            kept = (index, _moved(self._calls[size][index], self.device))
            self._on_device[size] = kept
        return kept[1]


@torch.no_grad()
def embed(source: SourceModel, layers: str, input_ids: Tensor, device: torch.device, dtype: torch.dtype) -> LayerInputs:
    """What the first decoder layer gets for `input_ids [samples, seqlen]`. The embeddings are read, used and freed."""
    samples, seqlen = input_ids.shape
    batch = max(1, min(samples, _TOKENS_PER_FORWARD // seqlen))
    before = list(_parts_before(source, layers))
    cpu = torch.device("cpu")
    for name in before:
        source.fill(name, cpu, dtype)
    calls: dict[int, list[LayerCall]] = {}
    hidden: Tensor | None = None
    try:
        for start in range(0, samples, batch):
            ids = input_ids[start : start + batch]
            first, found = _probe(source.model, layers, ids)
            calls.setdefault(ids.shape[0], found)
            if hidden is None:
                shape = (samples, *first.shape[1:])
                place = device if _fits(shape, first.dtype, device) else cpu
                hidden = torch.empty(shape, dtype=first.dtype, device=place)
            hidden[start : start + batch].copy_(first)
        if 1 not in calls:
            calls[1] = _probe(source.model, layers, input_ids[:1])[1]
    finally:
        for name in before:
            source.empty(name)
    assert hidden is not None
    return LayerInputs(hidden, calls, batch, device)


def _parts_before(source: SourceModel, layers: str) -> Iterator[str]:
    """Modules with weights outside the decoder layers, the head apart."""
    head = source.model.get_output_embeddings()
    for name, module in source.model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and module is not head and not name.startswith(f"{layers}."):
            yield name


def _probe(model: PreTrainedModel, layers: str, input_ids: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """The hidden states that reach the first layer, and how each layer is called."""
    originals = list(model.get_submodule(layers).children())
    cause: Exception | None = None
    for as_tuple in (False, True):  # families differ in what a layer returns
        log: list[tuple[Tensor, LayerCall]] = []
        stubs = [
            _Stub(layer, log, as_tuple=as_tuple, last=index == len(originals) - 1)
            for index, layer in enumerate(originals)
        ]
        model.set_submodule(layers, nn.ModuleList(stubs))
        try:
            model(input_ids=input_ids, use_cache=False)
        except _Stop:
            pass
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            cause = error  # it took apart what it did not expect; the answer is below
            continue
        finally:
            model.set_submodule(layers, nn.ModuleList(originals))
        handed_on = len(log) == len(originals) and all(hidden is log[0][0] for hidden, _ in log)
        if handed_on and log[0][0].shape[:2] == input_ids.shape:
            return log[0][0], [call for _, call in log]
    raise ValueError(
        f"{type(model).__name__} does not hand hidden states from one decoder layer to the next unchanged, so its "
        "layers cannot be calibrated alone; methods rtn, int8 and fp8 need no calibration"
    ) from cause


def _fits(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the hidden states may stay on the device."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return math.prod(shape) * dtype.itemsize <= free * _SHARE_ON_DEVICE


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, LayerCall):
        return LayerCall(args=_moved(value.args, device), kwargs=_moved(value.kwargs, device))
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(one, device) for one in value)
    return value
