"""The fusion pass: give the modules of a view forwards that need fewer kernels, where that is provably the same model.

One forward of a few random tokens is watched (`forward_trace.py`), patterns are recognised in it
(`fusion_patterns.py`), and every fused forward is run once on what the module was seen to read: its result must be the
module's own up to rounding. What is unknown, wrapped, hooked or different stays as it is: slower, never wrong. The
report says what and why.

Weights are shared with the user's model, so joining them re-points its parameters (`joined_linear.py`); nothing else of
it is touched. A view is rebuilt, and fused again, when the model's fingerprint changes.

Residual adds ride in the norm kernel, not in the epilogue of the product before them (`addmm`): the number of kernels
is the same, but it serves packed weights too, rounds where the model does, and writes over no tensor somebody may hold.
Steps of few tokens through 4-bit weights have both, and the norms, in the products themselves (`folded_layer.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.attention import CONTEXT_KEYWORD, AttentionCall
from hf_paged.forward_trace import TracedCall, amplified, same_tensor, trace_forward
from hf_paged.fused_layer import FusedLayer
from hf_paged.fused_linear import FusedLinear
from hf_paged.fused_modules import FusedAttention, FusedEmbedding, FusedNorm, RotaryCall, RotaryContext, first_output
from hf_paged.fusion_patterns import (
    NotFused,
    check_unwrapped,
    children_of,
    differs,
    is_norm_candidate,
    is_rotary_candidate,
    recognise_attention,
    recognise_layer,
    recognise_mlp,
    recognise_norm,
    recognise_rotary,
)
from hf_paged.kernels.fused_ops import rope_write
from hf_paged.kernels.layout import LayerKV, PlainPages
from hf_paged.kernels.reference_fused import RMSNorm

# Inner results that a clamp meant for rare values would cut: published limits are 6 to 30 for Q, K, V and 7 in MLPs.
_LOUD_ATTENTION = 500.0
_LOUD_MLP = 60.0

COMPONENTS = (
    "embedding",
    "RMSNorm",
    "rotary tables",
    "MLP",
    "attention",
    "decoder layer",
    "joined projections",
    "linear",
)


@dataclass(frozen=True, kw_only=True)
class ComponentReport:
    """How many modules of one kind were fused, and how many were not, by reason."""

    name: str  # one of COMPONENTS
    fused: int
    kept: Mapping[str, int]

    def __str__(self) -> str:
        kept = "".join(f"; {count} not: {reason}" for reason, count in self.kept.items())
        return f"{self.name}: {self.fused} fused{kept}"


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """What the pass did to a view; components that the model does not have are absent."""

    components: tuple[ComponentReport, ...]
    off: str | None = None  # why the pass did not run at all

    def component(self, name: str) -> ComponentReport:
        empty = ComponentReport(name=name, fused=0, kept={})
        return next((component for component in self.components if component.name == name), empty)

    def __str__(self) -> str:
        return self.off or "\n".join(str(component) for component in self.components)


def not_fused(reason: str) -> FusionReport:
    return FusionReport(components=(), off=f"not fused: {reason}")


def fuse(view: PreTrainedModel) -> FusionReport:
    """Fuse what can be fused in `view` (see `build_view`), in place."""
    if any(parameter.is_meta for parameter in view.parameters()):
        return not_fused("the weights are on the meta device, there is nothing to compare")
    if view.training:
        return not_fused("the model is in training mode; call model.eval() first")
    with torch.inference_mode(False), torch.no_grad():  # joined weights must be ordinary tensors
        return _Pass(view).run()


class _Pass:
    """One run over one view."""

    def __init__(self, view: PreTrainedModel) -> None:
        self._view = view
        self._norms: dict[nn.Module, RMSNorm] = {}
        self._forms: dict[tuple[Any, ...], RMSNorm | str] = {}  # what was found out about a kind of norm
        self._fused: Counter[str] = Counter()
        self._kept: dict[str, Counter[str]] = {name: Counter() for name in COMPONENTS}
        self._layers: list[tuple[TracedCall, FusedLayer]] = []
        uses = Counter(id(p) for module in view.modules() for p in module._parameters.values() if p is not None)
        self._shared = {key for key, count in uses.items() if count > 1}

    def run(self) -> FusionReport:
        calls = {call.module: call for call in trace_forward(self._view).walk()}  # the last call of each module
        sub_layers = {
            child.module for call in calls.values() if _has_attention(call) for child in children_of(call)
        }  # fmt: skip
        for call in calls.values():
            if type(call.module) is nn.Embedding:
                self._try("embedding", call, self._embedding)
            elif is_norm_candidate(call.module):
                self._try("RMSNorm", call, self._norm)
            elif is_rotary_candidate(call.module):
                self._try("rotary tables", call, self._rotary)
        for call in calls.values():
            if call.attention is not None:
                self._try("attention", call, self._attention)
            elif _has_attention(call):
                self._try("decoder layer", call, self._layer)
            elif call.children and not is_norm_candidate(call.module):
                self._try("MLP", call, self._mlp, quiet=call.module not in sub_layers)
        for call in calls.values():  # last: a linear that somebody hangs on is not joined
            if type(call.module) is nn.Linear:
                self._try("linear", call, self._linear)
        self._hand_norms_on()
        self._mark_last(calls)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the joined weights left behind is for the KV cache
        return FusionReport(
            components=tuple(
                ComponentReport(name=name, fused=self._fused[name], kept=dict(self._kept[name]))
                for name in COMPONENTS
                if self._fused[name] or self._kept[name]
            )
        )

    def _try(
        self, component: str, call: TracedCall, fuse_one: Callable[[TracedCall], None], quiet: bool = False
    ) -> None:
        try:
            check_unwrapped(call.module)
            if call.writes_input:
                raise NotFused("it writes its input in place")
            fuse_one(call)
        except NotFused as reason:
            if not quiet:
                self._kept[component][str(reason)] += 1
        else:
            self._fused[component] += 1

    def _embedding(self, call: TracedCall) -> None:
        module = call.module
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            raise NotFused("it writes its weight")
        self._replace(call, FusedEmbedding(weight=module.weight), call.kwargs)

    def _norm(self, call: TracedCall) -> None:
        module, weight = call.module, call.module.weight
        assert isinstance(weight, nn.Parameter)
        scalars = tuple(value for value in vars(module).values() if isinstance(value, bool | int | float | str))
        kind = (type(module), scalars, weight.dtype, weight.device, weight.shape)
        if kind not in self._forms:
            try:
                self._forms[kind] = recognise_norm(module)
            except NotFused as reason:
                self._forms[kind] = str(reason)
        form = self._forms[kind]
        if isinstance(form, str):
            raise NotFused(form)
        norm = RMSNorm(weight=weight, eps=form.eps, offset=form.offset, cast_first=form.cast_first)
        self._replace(call, FusedNorm(norm=norm), call.kwargs)
        self._norms[module] = norm

    def _rotary(self, call: TracedCall) -> None:
        fused = recognise_rotary(call)
        if not (isinstance(call.output, tuple) and len(call.output) == 2):
            raise NotFused("it gives no pair of tables")
        for actual, expected in zip(fused(*call.args, **call.kwargs), call.output, strict=True):
            if error := differs(actual, expected):
                raise NotFused(f"the fused tables differ: {error}")
        call.module.forward = fused

    def _linear(self, call: TracedCall) -> None:
        module = call.module
        assert isinstance(module, nn.Linear)
        if type(module.weight.data) is not Tensor:
            raise NotFused(f"its weight is a {type(module.weight.data).__name__}")
        self._replace(call, FusedLinear(weight=module.weight, bias=module.bias), call.kwargs)

    def _mlp(self, call: TracedCall) -> None:
        fused, reason = recognise_mlp(call, self._shared)
        loud = amplified(call, _LOUD_MLP)
        self._check(loud, fused, loud.kwargs)
        self._replace(call, fused, call.kwargs)
        self._note_join(reason)

    def _attention(self, call: TracedCall) -> None:
        fused, reason = recognise_attention(call, self._norms, self._shared)
        replay, loud = _Replay(call), amplified(call, _LOUD_ATTENTION)
        self._check(loud, fused, {**loud.kwargs, CONTEXT_KEYWORD: _Replay(loud)})
        self._replace(call, fused, {**call.kwargs, CONTEXT_KEYWORD: replay})
        assert replay.rotated, "the fused attention did not take its own path"
        self._note_join(reason)

    def _layer(self, call: TracedCall) -> None:
        fused = recognise_layer(call, self._norms)
        answers = {child.module: _Recorded(child) for child in call.children}
        attention = next(child for child in call.children if child.attention is not None)
        isolated = replace(fused, attention=answers[fused.attention], mlp=answers[fused.mlp])
        self._check(call, isolated, {**call.kwargs, CONTEXT_KEYWORD: _Replay(attention)})
        call.module.forward = fused
        self._layers.append((call, fused))

    def _replace(self, call: TracedCall, fused: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """Install a fused forward if it gives what the module gave."""
        self._check(call, fused, kwargs)
        call.module.forward = fused

    def _check(self, call: TracedCall, fused: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        if error := differs(first_output(fused(*call.args, **kwargs)), first_output(call.output)):
            raise NotFused(f"the fused result differs: {error}")

    def _note_join(self, reason: str | None) -> None:
        if reason is None:
            self._fused["joined projections"] += 1
        else:
            self._kept["joined projections"][reason] += 1

    def _hand_norms_on(self) -> None:
        """Let each fused layer compute the input norm of the one that reads its output."""
        for _, fused in self._layers:
            fused.order_norms()
        for (call, fused), (following, next_fused) in zip(self._layers, self._layers[1:], strict=False):
            unwritten = call.version_left == following.version_read
            if same_tensor(call.output, following.input) and unwritten:
                fused.next_norm, fused.following = next_fused.input_norm, next_fused

    def _mark_last(self, calls: Mapping[nn.Module, TracedCall]) -> None:
        """Let the last layer leave tokens out, if after it comes a norm and after that the head, and nothing else."""
        head = calls.get(self._view.get_output_embeddings())
        if not self._layers or head is None:
            return
        call, layer = self._layers[-1]
        attention = vars(layer.attention).get("forward")
        readers = [other for other in calls.values() if same_tensor(other.input, call.output)]
        if len(readers) != 1 or not isinstance(attention, FusedAttention):
            return
        norm = readers[0]
        unwritten = call.version_left == norm.version_read and norm.version_left == head.version_read
        if is_norm_candidate(norm.module) and same_tensor(norm.output, head.input) and unwritten:
            layer.attention.forward = replace(attention, is_last=True)
            layer.is_last = True


def _has_attention(call: TracedCall) -> bool:
    return any(child.attention is not None for child in call.children)


class _Recorded(nn.Module):
    """Stands for a sub-layer while its layer is checked: a rounding may lead a mixture of experts to other experts."""

    def __init__(self, traced: TracedCall) -> None:
        super().__init__()
        self._traced = traced

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if error := differs(hidden_states, self._traced.input):
            raise NotFused(f"the input of its {type(self._traced.module).__name__} differs: {error}")
        return self._traced.output


class _Replay(RotaryContext):
    """Answers as attention did in the trace, after checking that it is asked the same."""

    def __init__(self, traced: TracedCall) -> None:
        assert traced.attention is not None and traced.attended is not None
        self._asked, self._attended = traced.attention, traced.attended
        self.rotated = False

    def attend(self, call: AttentionCall) -> Tensor:
        return self._attended

    def attend_rotary(self, call: RotaryCall) -> Tensor:
        layer, slots = _small_pages(call)
        query = rope_write(
            call.query, call.key, call.value, call.cos, call.sin, layer, slots,
            rope=call.rope, q_norm=call.q_norm, k_norm=call.k_norm,
        )  # fmt: skip
        stored = [pages.tensor[1, :, : len(slots)] for pages in (layer.k, layer.v)]
        results = (query.transpose(0, 1), *stored)
        asked = (self._asked.query[0], self._asked.key[0], self._asked.value[0])
        for name, actual, expected in zip("QKV", results, asked, strict=True):
            if error := differs(actual, expected):
                raise NotFused(f"fused {name} differs: {error}")
        self.rotated = True
        return self._attended[0]


def _small_pages(call: RotaryCall) -> tuple[LayerKV, Tensor]:
    """Pages of one block in the model's dtype, and slots for the call's tokens."""
    block_size = 16
    assert call.key.shape[0] <= block_size

    def pages(x: Tensor) -> PlainPages:
        return PlainPages(data=x.new_zeros(2, x.shape[1], block_size, x.shape[2]))

    slots = torch.arange(block_size, block_size + call.key.shape[0], device=call.key.device)
    return LayerKV(k=pages(call.key), v=pages(call.value)), slots
