"""Watch one forward of a model: which module was called with what, what it called, and what came out.

The fusion pass reads structure off this record instead of off class names. Four random tokens are enough, spread over
all positions so that anything that depends on the position shows. Attention is plain and causal, without pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.attention import CONTEXT_KEYWORD, AttentionCall
from hf_paged.packed_model import PackedModel

_NUM_TOKENS = 4
_POSITIONS = 2048  # where the config states no limit
_LARGEST = 3e4  # half of fp16's range


@dataclass(eq=False)
class TracedCall:
    """One call of a module. Tensors are kept as passed, so equal address means equal tensor while the trace lives."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    children: list[TracedCall] = field(default_factory=list)
    output: Any = None
    attention: AttentionCall | None = None  # what the module itself asked of attention
    attended: Tensor | None = None  # [1, T, num_heads, v_head_dim], what attention answered
    version_read: int = -1  # of the input when the call began: writes in place count it up
    version_left: int = -1  # of the output when the call ended
    writes_input: bool = False

    @property
    def input(self) -> Any:
        """The first argument: hidden states, in every module that matters here."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def walk(self) -> Iterator[TracedCall]:
        """This call after all calls inside it."""
        for child in self.children:
            yield from child.walk()
        yield self


class _Recorder:
    """Keeps the stack of open calls; is the attention context of the watched forward."""

    def __init__(self, *, keyword_reaches_attention: bool) -> None:
        self._reached = keyword_reaches_attention  # else a fused attention would never meet its context
        self.stack: list[TracedCall] = []
        self.root: TracedCall | None = None

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = TracedCall(module, name, args, kwargs)
        call.version_read = _version(call.input)
        if self.stack:
            self.stack[-1].children.append(call)
        else:
            self.root = call
        self.stack.append(call)

    def leave(self, output: Any) -> None:
        call = self.stack.pop()
        call.output, call.version_left = output, _version(output)
        call.writes_input = _version(call.input) != call.version_read

    def attend(self, call: AttentionCall) -> Tensor:
        here = self.stack[-1]
        out = F.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=True
        )
        attended = out.transpose(1, 2).contiguous()
        if self._reached:
            here.attention, here.attended = call, attended
        return attended


@torch.no_grad()
def trace_forward(view: PreTrainedModel) -> TracedCall:
    """The record of one forward of a view whose attention implementation is hf_paged."""
    model = PackedModel(view)
    config = view.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (_NUM_TOKENS,), generator=generator)
    last = (getattr(config, "max_position_embeddings", None) or _POSITIONS) - 1
    positions = torch.linspace(0, last, _NUM_TOKENS).long()
    recorder = _Recorder(keyword_reaches_attention=model.takes_keywords)
    handles = []
    try:
        for name, module in view.named_modules():
            enter = _entering(recorder, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda module, args, output: recorder.leave(output)))
        model(ids.to(model.device), positions.to(model.device), recorder)
    finally:
        for handle in handles:
            handle.remove()
    assert recorder.root is not None
    return recorder.root


def amplified(call: TracedCall, target: float) -> TracedCall:
    """The module's own answer to the same hidden states, scaled until its first inner results reach about `target`.

    A clamp (`clip_qkv`, SwiGLU limits) does nothing to ordinary values and would go unseen.
    """
    hidden: Tensor = call.input
    inner = max(child.output.abs().max().item() for child in call.children if type(child.output) is Tensor)
    gain = min(target / max(inner, 1e-3), _LARGEST / max(hidden.abs().max().item(), 1e-3))
    louder = hidden * gain
    args = (louder, *call.args[1:]) if call.args else ()
    kwargs = call.kwargs if call.args else {**call.kwargs, "hidden_states": louder}
    recorder = _Recorder(keyword_reaches_attention=True)
    again = TracedCall(call.module, call.name, args, kwargs)
    recorder.stack.append(again)
    context = {CONTEXT_KEYWORD: recorder} if call.attention is not None else {}
    again.output = call.module(*args, **{**kwargs, **context})
    return again


def _entering(recorder: _Recorder, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(name, module, args, kwargs)

    return hook


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def same_tensor(a: Any, b: Any) -> bool:
    """Whether two recorded values are the same elements of the same storage, up to shape."""
    plain = type(a) in (Tensor, nn.Parameter) and type(b) in (Tensor, nn.Parameter)
    return plain and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
