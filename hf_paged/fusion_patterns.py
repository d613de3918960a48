"""Recognise what a traced call computes, and build the fused forward of its module.

Names decide nothing. A pattern is recognised by data flow (whose output is whose input) and by values: what the module
was seen to compute must equal the pattern computed on the same tensors. What differs is `NotFused`, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_paged.forward_trace import TracedCall, same_tensor
from hf_paged.fused_layer import FusedLayer
from hf_paged.fused_modules import FusedAttention, FusedMLP, FusedRotary, first_output, own_forward
from hf_paged.joined_linear import Projections, SplitLinear, join, wrapped
from hf_paged.kernels import reference_fused
from hf_paged.kernels.reference_fused import ACTIVATIONS, RMSNorm, Rope
from hf_paged.quant.joined_packed import input_order, inverse

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_SIZE = 32768  # `rms_norm.MAX_SIZE`, which needs Triton
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
_ACTIVATION_ERROR = 1e-5  # fp32; the two gelus differ by 5e-4


class NotFused(Exception):
    """A module keeps its own forward; the message is the reason."""


def differs(actual: Tensor, expected: Tensor) -> str | None:
    """Why two results of the same mathematics are not equal up to rounding, or None.

    A fused forward rounds at other places, a few times per element: each costs at most half a step of the dtype,
    relative to the largest element that entered. So the error's root mean square may reach 2 steps relative to that of
    the result and a single error 8 steps of the largest element. fp32 sums of thousands of products in another order
    count as 2^-16, and TF32 products as their 10 bits.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    step = torch.finfo(expected.dtype).eps
    if expected.dtype == torch.float32:
        step = 2.0**-10 if expected.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 2.0**-16
    error, expected = (actual.double() - expected.double()).abs(), expected.double().abs()
    rms, largest = (error.square().mean().sqrt().item(), error.max().item())
    rms_bound, largest_bound = (2 * step * expected.square().mean().sqrt().item(), 8 * step * expected.max().item())
    if rms <= rms_bound and largest <= largest_bound:  # a NaN is not
        return None
    return f"error rms {rms:.2g} (allowed {rms_bound:.2g}), largest {largest:.2g} (allowed {largest_bound:.2g})"


def check_unwrapped(*modules: nn.Module) -> None:
    for module in modules:
        if why := wrapped(module):
            raise NotFused(why)


def is_norm_candidate(module: nn.Module) -> bool:
    """A leaf whose only tensor is a vector called weight: an RMSNorm, or something that looks like one."""
    parameters = list(module.named_parameters())
    return (
        [name for name, _ in parameters] == ["weight"]
        and parameters[0][1].dim() == 1
        and not any(True for _ in module.children())
        and not any(True for _ in module.buffers())
    )


def recognise_norm(module: nn.Module) -> RMSNorm:
    """The RMSNorm that `module` computes: which form of the weight, and where the result is rounded.

    A copy with random weights is tried, on rows large and small enough for eps to matter.
    """
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    check_unwrapped(module)
    if weight.dtype not in _DTYPES or weight.numel() > _MAX_SIZE:
        raise NotFused(f"{weight.numel()} channels of {weight.dtype}")
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None:
        raise NotFused(f"{type(module).__name__} states no eps")
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4, weight.numel(), generator=generator).to(weight)
    twin = copy.deepcopy(module, {id(weight): nn.Parameter(random[0])})
    x = random[1:] * torch.tensor([[1.0], [eps**0.5], [30.0]]).to(weight)
    expected = twin(x)
    for offset, cast_first in ((0.0, True), (0.0, False), (1.0, False), (1.0, True)):
        norm = RMSNorm(weight=random[0], eps=eps, offset=offset, cast_first=cast_first)
        actual = reference_fused.rms_norm(x, norm)
        if type(expected) is Tensor and expected.dtype == x.dtype and torch.equal(actual, expected):
            return RMSNorm(weight=weight, eps=eps, offset=offset, cast_first=cast_first)
    raise NotFused(f"{type(module).__name__} does not compute an RMSNorm")


def is_rotary_candidate(module: nn.Module) -> bool:
    """A module without parameters or children that holds frequencies, as Transformers' rotary embeddings do."""
    return isinstance(getattr(module, "inv_freq", None), Tensor) and not any(True for _ in module.parameters())


def recognise_rotary(call: TracedCall) -> FusedRotary:
    """Tables whose frequencies are the same at every position; where they change, the trace need not show it."""
    module = call.module
    if getattr(module, "rope_type", None) not in _FIXED_ROPES:
        raise NotFused(f"{type(module).__name__} may change its frequencies with the length of a sequence")
    scale, frequencies = getattr(module, "attention_scaling", 1.0), module.inv_freq
    if not (isinstance(scale, int | float) and isinstance(frequencies, Tensor) and frequencies.dtype == torch.float32):
        raise NotFused(f"{type(module).__name__} has no fp32 frequencies and one scale")
    if len(call.args) + len(call.kwargs) != 2 or not set(call.kwargs) <= {"position_ids"}:
        raise NotFused("it reads more than positions")
    return FusedRotary(frequencies=frequencies, scale=float(scale))


def recognise_activation(module: nn.Module) -> str:
    """The key in `ACTIVATIONS` of what a module without parameters computes, told apart in fp32."""
    if any(True for _ in module.parameters()):
        raise NotFused(f"the activation {type(module).__name__} has parameters")
    x = torch.linspace(-8, 8, 1001)
    result = module(x)
    for kind, function in ACTIVATIONS.items():
        if type(result) is Tensor and (result - function(x)).abs().max() <= _ACTIVATION_ERROR:
            return kind
    raise NotFused(f"no kernel for the activation {type(module).__name__}")


def children_of(call: TracedCall) -> list[TracedCall]:
    """What a call called, without what does nothing in inference."""
    return [child for child in call.children if not isinstance(child.module, nn.Dropout | nn.Identity)]


def recognise_mlp(call: TracedCall, shared: set[int]) -> tuple[FusedMLP, str | None]:
    """down(act(gate(x)) * up(x)) with one or two projections before it; and why two were not joined."""
    children = children_of(call)
    inputs = [child for child in children if same_tensor(child.input, call.input)]
    rest = [child for child in children if child not in inputs]
    if len(inputs) not in (1, 2) or len(rest) != 2 or call.kwargs or len(call.args) != 1:
        raise NotFused("not a gated MLP")
    act, down = rest
    check_unwrapped(act.module)
    first = inputs[0].output
    parts = first.chunk(2, -1) if len(inputs) == 1 else (first, inputs[1].output)
    position = [i for i, part in enumerate(parts) if _same_start(act.input, part)]
    if not position or not same_tensor(down.output, call.output):
        raise NotFused("not a gated MLP")
    kind = recognise_activation(act.module)
    if differs(down.input, act.output * parts[1 - position[0]]):
        raise NotFused("the MLP does not multiply act(gate) by up")
    projections: Projections
    reason = None
    if len(inputs) == 1:
        projections = SplitLinear(inputs[0].module, [part.shape[-1] for part in parts])
    else:
        projections, reason = join([child.module for child in inputs], shared)
    order = None if wrapped(down.module) else input_order([down.module])
    fused = FusedMLP(
        projections=projections,
        gate_first=position[0] == 0,
        activation=kind,
        down=down.module,
        down_order=order,
        down_places=None if order is None else inverse(order),
    )
    return fused, reason


def _same_start(a: object, b: Tensor) -> bool:
    return type(a) is Tensor and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def recognise_attention(
    call: TracedCall, norms: dict[nn.Module, RMSNorm], shared: set[int]
) -> tuple[FusedAttention, str | None]:
    """Projections, optional per-head norms, rotation, attention, output projection; and why Q, K, V were not joined."""
    asked, attended = call.attention, call.attended
    assert asked is not None and attended is not None
    children = children_of(call)
    inputs = [child for child in children if same_tensor(child.input, call.input)]
    last = children[-1] if children else call
    if not same_tensor(last.input, attended) or not same_tensor(last.output, first_output(call.output)):
        raise NotFused("attention does not end in an output projection")
    if not (isinstance(call.output, tuple) and len(call.output) == 2 and call.output[1] is None):
        raise NotFused("attention returns more than its output")
    if asked.query.shape[0] != 1 or len(call.args) > 1:
        raise NotFused("attention has arguments by position")
    query, key, value = (x[0].transpose(0, 1) for x in (asked.query, asked.key, asked.value))  # [T, heads, dim]
    raw, interleaved_heads = _raw_heads(inputs, query, key, value)
    between = [child.module for child in children if child not in inputs and child is not last]
    q_norm, k_norm = _head_norms(between, norms, query.shape[-1])
    tables = call.kwargs.get("position_embeddings")
    rope = _recognise_rope(raw, query, key, tables, q_norm, k_norm)
    projections: Projections
    reason = None
    if len(inputs) == 3:
        projections, reason = join([child.module for child in inputs], shared, beside=last.module)
    elif interleaved_heads:
        projections = SplitLinear(inputs[0].module, [inputs[0].output.shape[-1]])
    else:
        projections = SplitLinear(inputs[0].module, [x[0].numel() for x in (query, key, value)])
    order = input_order([last.module])
    fused = FusedAttention(
        own=own_forward(call.module),
        layer_idx=asked.layer_idx,
        projections=projections,
        num_heads=query.shape[1],
        kv_heads=key.shape[1],
        interleaved_heads=interleaved_heads,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        scale=asked.scale,
        window=asked.window,
        softcap=asked.softcap,
        sinks=asked.sinks,
        output=last.module,
        output_places=None if order is None else inverse(order),
    )
    return fused, reason


def _raw_heads(
    inputs: list[TracedCall], query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """Q, K, V as projected, shaped as attention got them, and whether one projection interleaves them by head."""
    outputs = [child.output.flatten(0, -2) for child in inputs if type(child.output) is Tensor]
    sizes = [x[0].numel() for x in (query, key, value)]
    if len(outputs) == 1 and outputs[0].shape[-1] == sum(sizes):
        if sizes[0] == sizes[1] == sizes[2]:
            raw = outputs[0].unflatten(-1, (query.shape[1], 3, -1)).unbind(2)
            if torch.equal(raw[2], value):
                return raw, True
        outputs = list(outputs[0].split(sizes, -1))
    if [output.shape[-1] for output in outputs] != sizes:
        raise NotFused("Q, K and V are not plain projections of the hidden states")
    raw_q, raw_k, raw_v = (o.unflatten(-1, x.shape[1:]) for o, x in zip(outputs, (query, key, value), strict=True))
    if not torch.equal(raw_v, value):
        raise NotFused("V is not a plain projection of the hidden states")
    return (raw_q, raw_k, raw_v), False


def _head_norms(
    modules: list[nn.Module], norms: dict[nn.Module, RMSNorm], head_dim: int
) -> tuple[RMSNorm | None, RMSNorm | None]:
    if not modules:
        return None, None
    found = [norms[module] for module in modules if module in norms]
    if len(modules) != 2 or len(found) != 2:
        raise NotFused(f"attention calls {', '.join(type(module).__name__ for module in modules)}")
    q_norm, k_norm = found
    if not q_norm.weight.numel() == k_norm.weight.numel() == head_dim:
        raise NotFused("Q and K are normalised across heads")
    if (q_norm.offset, q_norm.cast_first) != (k_norm.offset, k_norm.cast_first):
        raise NotFused("Q and K are normalised differently")
    return q_norm, k_norm


def _recognise_rope(
    raw: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    tables: object,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
) -> Rope:
    """The rotation between the projections and what attention got, found by trying all that fit the tables."""
    cos, sin = _angle_tables(tables, query)
    raw_q, raw_k = raw[:2]
    if q_norm is not None and k_norm is not None:
        raw_q, raw_k = reference_fused.rms_norm(raw_q, q_norm), reference_fused.rms_norm(raw_k, k_norm)
    for rope in _ropes(cos.shape[-1], query.shape[-1]):
        rotated = (reference_fused.rotate(x, cos, sin, rope) for x in (raw_q, raw_k))
        if not any(differs(x, expected) for x, expected in zip(rotated, (query, key), strict=True)):
            return rope
    raise NotFused("Q and K are not what any known rotation gives")


def _angle_tables(tables: object, query: Tensor) -> tuple[Tensor, Tensor]:
    empty = query.new_empty(query.shape[0], 0)
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        return empty, empty
    cos, sin = tables
    if not (type(cos) is type(sin) is Tensor and cos.shape == sin.shape and cos.stride() == sin.stride()):
        return empty, empty
    if cos.numel() != query.shape[0] * cos.shape[-1]:
        return empty, empty
    return cos.flatten(0, -2), sin.flatten(0, -2)


def _ropes(columns: int, head_dim: int) -> Iterator[Rope]:
    yield Rope(rotary_dim=0)
    for interleaved in (False, True):
        if columns and columns <= head_dim and columns % 2 == 0:
            yield Rope(rotary_dim=columns, interleaved=interleaved)  # (angles, angles)
            if interleaved:
                yield Rope(rotary_dim=columns, interleaved=True, angle_step=2)  # every angle twice
        if columns and 2 * columns <= head_dim:
            yield Rope(rotary_dim=2 * columns, interleaved=interleaved)  # every angle once


def recognise_layer(call: TracedCall, norms: dict[nn.Module, RMSNorm]) -> FusedLayer:
    """Two sub-layers with residual adds, and RMSNorms before, after, or on both sides of each."""
    children = children_of(call)
    at = next(i for i, child in enumerate(children) if child.attention is not None)
    attention = children[at]
    others = [child for child in children[at + 1 :] if child.module not in norms]
    if len(others) != 1 or at > 1:
        found = dict.fromkeys(type(child.module).__name__ for child in children)
        raise NotFused(f"it is made of {', '.join(found)}, not of RMSNorms, attention and one more sub-layer")
    mlp = others[0]
    if any(len(c.args) != 1 for c in (call, mlp)) or mlp.kwargs or type(call.output) is not Tensor:
        raise NotFused("it passes more than hidden states from one sub-layer to the next")
    after_attention = children[at + 1 : children.index(mlp)]
    after_mlp = children[children.index(mlp) + 1 :]
    attention_out, mlp_out = first_output(attention.output), first_output(mlp.output)
    attention_post = [c for c in after_attention if same_tensor(c.input, attention_out)]
    mlp_norm = [c for c in after_attention if c not in attention_post]
    chains = (children[:at], attention_post, mlp_norm, after_mlp)
    if any(len(chain) > 1 for chain in chains):
        raise NotFused("more norms than a layer of two sub-layers has")
    unknown = [type(c.module).__name__ for chain in chains for c in chain if c.module not in norms]
    if unknown:
        raise NotFused(f"its {unknown[0]} is not a fused RMSNorm")
    input_norm, post, middle, mlp_post = (chain[0] if chain else None for chain in chains)
    hidden = call.input + (attention_out if post is None else post.output)
    flow = (
        (attention.input, call.input if input_norm is None else input_norm.output),
        (mlp.input, hidden if middle is None else middle.output),
        (hidden if middle is None else middle.input, hidden),
        (call.output, hidden + (mlp_out if mlp_post is None else mlp_post.output)),
    )
    if any(differs(actual, expected) for actual, expected in flow):
        raise NotFused("the residual stream is not a plain sum of the sub-layers' outputs")

    def norm_of(found: TracedCall | None) -> RMSNorm | None:
        return None if found is None else norms[found.module]

    return FusedLayer(
        own=own_forward(call.module),
        input_norm=norm_of(input_norm),
        attention=attention.module,
        attention_post=norm_of(post),
        mlp_norm=norm_of(middle),
        mlp=mlp.module,
        mlp_post=norm_of(mlp_post),
    )
