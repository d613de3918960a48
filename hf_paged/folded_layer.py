"""The forward of a decoder layer of few tokens whose norms, residual adds and activation are ends of its products.

Of packed 4-bit weights on Hopper (`kernels/folded_linear.py`); a step of one token then has seven kernels a layer
instead of ten.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_paged.fused_modules import FusedAttention, FusedMLP, RotaryContext
from hf_paged.kernels.folded_linear import OpenNorm, can_fold, folded_linear, folded_sum
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.reference_fused import RMSNorm
from hf_paged.quant.joined_packed import JoinedPackedLinear
from hf_paged.quant.linear import PackedLinear


class FoldedLayer:
    """The products of a fused layer, attention, and the norms between them; see `of`."""

    def __init__(
        self, attention: FusedAttention, mlp: FusedMLP, mlp_norm: RMSNorm | None, next_norm: RMSNorm | None
    ) -> None:
        assert isinstance(attention.projections, JoinedPackedLinear) and isinstance(attention.output, PackedLinear)
        assert isinstance(mlp.projections, JoinedPackedLinear) and isinstance(mlp.down, PackedLinear)
        self._attention = attention
        self._qkv, self._output = attention.projections, attention.output
        self._gate_up, self._down = mlp.projections, mlp.down
        self._mlp_norm, self._next_norm, self._down_places = mlp_norm, next_norm, mlp.down_places

    @classmethod
    def of(
        cls, attention: nn.Module, mlp: nn.Module, norms: tuple[RMSNorm | None, ...], hidden: Tensor
    ) -> FoldedLayer | None:
        """None where something does not fold for `hidden` `[1, T, hidden_size]`.

        `norms`: before attention, before the MLP, and of the next layer, if that reads one.
        """
        input_norm, mlp_norm, next_norm = norms
        fused, fused_mlp = vars(attention).get("forward"), vars(mlp).get("forward")
        if not (isinstance(fused, FusedAttention) and isinstance(fused_mlp, FusedMLP)):
            return None
        if input_norm is None or mlp_norm is None or fused.interleaved_heads:
            return None
        if fused_mlp.activation != "silu" or not fused_mlp.gate_first:
            return None
        if any(map(_watched, (attention, mlp, fused.output, fused_mlp.down))):
            return None
        weights = [_weight(part) for part in (fused.projections, fused.output, fused_mlp.projections, fused_mlp.down)]
        if not all(weight is not None and can_fold(hidden[0], weight) for weight in weights):
            return None
        orders = (input_norm.order, fused.output_order, mlp_norm.order, fused_mlp.down_order)
        if any(weight.perm is not order for weight, order in zip(weights, orders, strict=True) if weight is not None):
            return None
        folded = cls(fused, fused_mlp, mlp_norm, next_norm)
        return folded if folded._gate_up.bias is None and folded._gate_up.weight.out_features % 128 == 0 else None

    def __call__(
        self, hidden: Tensor, normed: Tensor | OpenNorm, context: RotaryContext, kwargs: dict[str, Any]
    ) -> Tensor:
        """Hidden states `[1, T, hidden_size]` after the layer; the context carries their norm for the next one."""
        rows = normed if isinstance(normed, OpenNorm) else normed[0]
        heads = self._attention.split(self._qkv.split(folded_linear(rows, *self._qkv.operands)))
        attended = self._attention.attend(heads, context, kwargs).flatten(1)
        total, open_norm = folded_sum(attended, *self._output.operands, hidden[0], self._mlp_norm)
        assert open_norm is not None
        gated = folded_linear(open_norm, *self._gate_up.operands, gated=True, places=self._down_places)
        total, open_norm = folded_sum(gated, *self._down.operands, total, self._next_norm)
        result = total.unsqueeze(0)
        if open_norm is not None:
            context.carried = (result, open_norm)
        return result


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _weight(part: Any) -> PackedWeight | None:
    if isinstance(part, JoinedPackedLinear):
        return part.weight
    if type(part) is PackedLinear and "forward" not in vars(part):
        return part.packed_weight
    return None
