"""Mixture-of-experts weights one linear at a time, in place of Transformers' fused 3-D experts, while quantizing.

Quantized files hold every expert's projections apart, and each needs statistics of the tokens that were sent to it. As
ordinary linears they need no code of their own anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.quant.experts import copy_settings, is_fused_experts


class UnfusedExperts(nn.Module):
    """Children "0", "1", ... of a gate, an up and a down linear; called as Transformers calls its own experts."""

    def __init__(self, fused: Any, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names, self.num_experts, self.act_fn = names, int(fused.num_experts), fused.act_fn
        gate: Callable[[nn.Module, Tensor], Tensor] = type(fused)._apply_gate
        self._apply_gate = gate
        copy_settings(fused, self)
        _, two_inner, hidden = fused.gate_up_proj.shape
        shapes = ((hidden, two_inner // 2), (hidden, two_inner // 2), (two_inner // 2, hidden))
        for expert in range(self.num_experts):
            linears = {
                name: nn.Linear(k, n, bias=False, dtype=fused.gate_up_proj.dtype)
                for name, (k, n) in zip(names, shapes, strict=True)
            }
            self.add_module(str(expert), nn.ModuleDict(linears))

    def first_linears(self) -> list[str]:
        """The names of those that read the mixture's input: every expert's gate and up."""
        return [f"{expert}.{name}" for expert in range(self.num_experts) for name in self.names[:2]]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(flat.shape[0], -1)
        weights = top_k_weights.reshape(index.shape)
        out = torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            if token.numel():
                gate, up, down = (self.get_submodule(f"{expert}.{name}") for name in self.names)
                rows = flat[token]
                hidden = self._apply_gate(self, torch.cat([gate(rows), up(rows)], dim=-1))
                out.index_add_(0, token, down(hidden).float() * weights[token, slot, None].float())
        return out.to(flat.dtype).view(hidden_states.shape)


def can_unfuse(module: nn.Module | None) -> bool:
    """Fused experts of the common form: `[experts, 2 * inner, hidden]` and `[experts, hidden, inner]`, no biases."""
    other = getattr(module, "is_transposed", False) or getattr(module, "has_bias", False)
    return is_fused_experts(module) and not other
