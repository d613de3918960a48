"""Mixture-of-experts weights: one packed stack per projection, in place of Transformers' fused 3-D experts.

A checkpoint holds every expert's projections apart (`experts.3.w1.qweight`); Transformers 5 holds them fused and, left
alone, would start from random experts without an error. Each projection becomes one stack `[experts, ...]`, so a decode
step runs one launch per projection with no host synchronisation. Longer inputs go expert by expert, which reads each
expert once but asks the host which experts were hit; while a CUDA graph is captured the launch per row is used always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_paged.kernels.fp8_linear import fp8_linear
from hf_paged.kernels.packed_linear import expert_rows_linear, lock_count, packed_linear
from hf_paged.kernels.packed_weight import PackedWeight, field_bits, packed_shape
from hf_paged.quant import formats
from hf_paged.quant.fixed_dtypes import FixedDtypes
from hf_paged.quant.fp8 import Fp8Layout, check_fp8, fp8_weight
from hf_paged.quant.header import torch_dtype
from hf_paged.quant.layout import Layout
from hf_paged.quant.linear import packed_parameters
from hf_paged.quant.pack import unpack

PROJECTIONS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))  # gate, up, down as files call them
_MAX_EXPERT_ROWS = 256  # token-expert pairs up to which one launch per row beats expert by expert


def is_fused_experts(module: nn.Module | None) -> bool:
    """Transformers' fused experts: 3-D `gate_up_proj` and `down_proj`, a gate function and its activation."""
    if module is None:
        return False
    fused = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    three = all(isinstance(value, Tensor) and value.dim() == 3 for value in fused)
    return three and hasattr(module, "act_fn") and hasattr(type(module), "_apply_gate")


def copy_settings(fused: nn.Module, module: nn.Module) -> None:
    """Give `module` what a family's own gate function reads of itself: limit, alpha, ..."""
    for name, value in vars(fused).items():
        if not name.startswith("_") and isinstance(value, int | float | str) and not hasattr(module, name):
            setattr(module, name, value)


class PackedStack(FixedDtypes):
    """One projection of all experts, packed. All experts share layout and shape; each has its own channel order."""

    zeros: Tensor | None
    perm: Tensor | None
    locks: Tensor

    def __init__(self, layout: Layout, experts: int, scales_dtype: torch.dtype) -> None:
        super().__init__()
        self.layout, self.experts = layout, experts
        k, n = layout.in_features, layout.out_features
        self.packed = _empty((experts, *packed_shape(k, n, field_bits(layout.bits))), torch.int32)
        self.scales = _empty((experts, layout.groups, n), scales_dtype)
        self.zeros = _empty((experts, layout.groups, n), torch.uint8)
        self.perm = _empty((experts, k), torch.int32)
        self.register_buffer("locks", torch.zeros(lock_count(n), dtype=torch.int32), persistent=False)

    def read(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor | None]:
        """The parameters from the experts' file tensors, given by suffix in expert order."""
        stacks: dict[str, list[Tensor | None]] = {"packed": [], "scales": [], "zeros": [], "perm": []}
        for expert in range(self.experts):
            one = {suffix: values[expert] for suffix, values in tensors.items()}
            for key, value in packed_parameters(formats.read(f"{name}[{expert}]", self.layout, one)).items():
                stacks[key].append(value)
        identity = torch.arange(self.layout.in_features, dtype=torch.int32)
        shape = (self.layout.groups, self.layout.out_features)
        middle = torch.full(shape, 2 ** (self.layout.bits - 1), dtype=torch.uint8)
        defaults = {"zeros": middle, "perm": identity}
        return {key: _stack(values, defaults.get(key)) for key, values in stacks.items()}

    def file_tensors(self) -> list[dict[str, Tensor]]:
        """The tensors of each expert as its file had them."""
        return [formats.write(self.layout, unpack(self.weight(expert))) for expert in range(self.experts)]

    def weight(self, expert: int | None = None) -> PackedWeight:
        """All experts stacked, or one of them."""
        layout = self.layout

        def part(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or expert is None else tensor[expert]

        return PackedWeight(
            packed=self.packed if expert is None else self.packed[expert],
            scales=self.scales if expert is None else self.scales[expert],
            zeros=part(self.zeros),
            perm=part(self.perm),
            field_bits=field_bits(layout.bits),
            code_bits=layout.bits,
            group_size=layout.group_size,
            in_features=layout.in_features,
            out_features=layout.out_features,
        )

    def one(self, x: Tensor, expert: int) -> Tensor:
        """`[rows, K]` through one expert."""
        return packed_linear(x, self.weight(expert), None, self.locks)

    def rows(self, x: Tensor, expert_ids: Tensor, top_k: int) -> Tensor | None:
        """`[rows / top_k, K]` with one expert per row, or None where only expert by expert works."""
        return expert_rows_linear(x, self.weight(), expert_ids, top_k)


class Fp8Stack(FixedDtypes):
    """One projection of all experts in FP8."""

    weight: Tensor
    locks: Tensor

    def __init__(self, layout: Fp8Layout, experts: int) -> None:
        super().__init__()
        self.layout, self.experts = layout, experts
        for suffix, spec in layout.tensors.items():
            setattr(self, suffix, _empty((experts, *spec.shape), torch_dtype(spec.dtype)))
        self.register_buffer("locks", torch.zeros(lock_count(layout.out_features), dtype=torch.int32), persistent=False)

    def read(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor | None]:
        for expert in range(self.experts):
            check_fp8(f"{name}[{expert}]", {suffix: values[expert] for suffix, values in tensors.items()})
        return {suffix: _stack(list(values), None) for suffix, values in tensors.items()}

    def file_tensors(self) -> list[dict[str, Tensor]]:
        return [{s: getattr(self, s)[expert] for s in self.layout.tensors} for expert in range(self.experts)]

    def one(self, x: Tensor, expert: int) -> Tensor:
        scale = getattr(self, self.layout.scale_name)[expert]
        static = None if self.layout.static_name is None else getattr(self, self.layout.static_name)[expert]
        return fp8_linear(x, fp8_weight(self.layout, self.weight[expert], scale, static), None, self.locks)

    def rows(self, x: Tensor, expert_ids: Tensor, top_k: int) -> Tensor | None:
        return None


class PackedExperts(nn.Module):
    """All experts of one layer; called as Transformers calls its own: `(hidden_states, top_k_index, top_k_weights)`."""

    def __init__(self, original: nn.Module, stacks: Mapping[str, PackedStack | Fp8Stack]) -> None:
        super().__init__()
        self.gate_name, self.up_name, self.down_name = names = tuple(stacks)
        for name in names:
            self.add_module(name, stacks[name])
        self.num_experts = stacks[self.gate_name].experts
        self.act_fn = original.act_fn
        gate: Callable[[nn.Module, Tensor], Tensor] = vars(type(original))["_apply_gate"]
        self.apply_gate = gate
        copy_settings(original, self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shape = hidden_states.shape
        flat = hidden_states.reshape(-1, shape[-1])
        top_k_index = top_k_index.reshape(flat.shape[0], -1)
        weights = top_k_weights.reshape(top_k_index.shape)
        capturing = flat.is_cuda and torch.cuda.is_current_stream_capturing()
        out = self._by_row(flat, top_k_index, weights) if capturing or top_k_index.numel() <= _MAX_EXPERT_ROWS else None
        if out is None:
            if capturing:
                raise RuntimeError(  # as every other failure of a capture: "auto" goes on without graphs
                    "these experts cannot run in a CUDA graph: their projections have no one-launch path; "
                    "use cuda_graphs=False"
                )
            out = self._by_expert(flat, top_k_index, weights)
        return out.view(shape)

    def _stacks(self) -> list[PackedStack | Fp8Stack]:
        """Gate, up and down."""
        found = []
        for name in (self.gate_name, self.up_name, self.down_name):
            stack = self.get_submodule(name)
            assert isinstance(stack, (PackedStack, Fp8Stack)), name
            found.append(stack)
        return found

    def _by_row(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
        gate, up, down = self._stacks()
        expert_ids, top_k = index.reshape(-1), index.shape[1]
        halves = [stack.rows(x, expert_ids, top_k) for stack in (gate, up)]
        present = [half for half in halves if half is not None]
        if len(present) < 2:
            return None
        hidden = self.apply_gate(self, torch.cat(present, dim=-1))
        rows = down.rows(hidden, expert_ids, 1)
        if rows is None:
            return None
        mixed = rows.view(*index.shape, -1).float() * weights[..., None].float()
        return mixed.sum(dim=1).to(x.dtype)

    def _by_expert(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate, up, down = self._stacks()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(index).tolist():
            if expert >= self.num_experts:  # expert parallelism marks tokens of other ranks so
                continue
            token, slot = torch.where(index == expert)
            rows = x[token]
            hidden = self.apply_gate(self, torch.cat([gate.one(rows, expert), up.one(rows, expert)], dim=-1))
            out.index_add_(0, token, down.one(hidden, expert).float() * weights[token, slot, None].float())
        return out.to(x.dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _stack(values: Sequence[Tensor | None], default: Tensor | None) -> Tensor | None:
    """One tensor for all experts; an expert without one takes the default, and None if no expert has one."""
    present = next((value for value in values if value is not None), None)
    if present is None:
        return None
    filler = present if default is None else default.to(present.device)
    return torch.stack([filler if value is None else value for value in values])
