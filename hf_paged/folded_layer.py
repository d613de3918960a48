"""The forward of a decoder layer of few tokens whose norms, residual adds and activation are ends of its products.

Of packed 4-bit weights on Hopper (`kernels/folded_linear.py`). Of one token the products between two attentions are
one kernel (`kernels/layer_chain.py`), and a step has four kernels a layer instead of ten.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_paged.fused_modules import FusedAttention, FusedMLP, Projected, RotaryContext
from hf_paged.kernels.folded_linear import OpenNorm, can_fold, folded_linear, folded_sum
from hf_paged.kernels.fused_ops import interleave
from hf_paged.kernels.layer_chain import LayerChain, layer_chain, new_exchange
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.reference_fused import RMSNorm
from hf_paged.quant.joined_packed import JoinedPackedLinear
from hf_paged.quant.linear import PackedLinear

_CHAINS_AT_ONCE = 32  # whose memory is made ready together


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
        if any(norm is not None and norm.weight.dtype != hidden.dtype for norm in norms):
            return None
        if fused_mlp.activation != "silu" or not fused_mlp.gate_first:
            return None
        if any(map(_watched, (attention, mlp, fused.output, fused_mlp.down))):
            return None
        weights = [_weight(part) for part in (fused.projections, fused.output, fused_mlp.projections, fused_mlp.down)]
        if not all(weight is not None and can_fold(hidden[0], weight) for weight in weights):
            return None
        if input_norm.order is not fused.projections.order or mlp_norm.order is not fused_mlp.projections.order:
            return None
        folded = cls(fused, fused_mlp, mlp_norm, next_norm)
        return folded if folded._gate_up.bias is None and folded._gate_up.weight.out_features % 128 == 0 else None

    def chain(self, following: FoldedLayer) -> LayerChain | None:
        """Its products behind attention, and that before attention of the layer that follows."""
        if self._mlp_norm is None or self._next_norm is None:
            return None
        parts = (self._output.operands, self._gate_up.operands, self._down.operands, following._qkv.operands)
        weights, biases = [weight for weight, _, _ in parts], [bias for _, bias, _ in parts]
        return LayerChain.of(weights, biases, (self._mlp_norm, self._next_norm))

    def __call__(
        self,
        hidden: Tensor,
        normed: Tensor | OpenNorm | Projected,
        context: RotaryContext,
        kwargs: dict[str, Any],
        chain: LayerChain | None = None,
    ) -> Tensor:
        """Hidden states `[1, T, hidden_size]` after the layer; the context carries their norm for the next one, or with
        a chain the product of it.
        """
        if isinstance(normed, Projected):
            qkv = normed.qkv
        else:
            qkv = folded_linear(normed if isinstance(normed, OpenNorm) else normed[0], *self._qkv.operands)
        heads = self._attention.split(self._qkv.split(qkv))
        attended = self._attention.attend(heads, context, kwargs).flatten(1)
        if chain is not None:
            total, qkv = layer_chain(attended, hidden[0], chain, _exchange(context, chain, hidden.shape[1]))
            context.carried = (total.unsqueeze(0), Projected(qkv=qkv))
            return context.carried[0]
        places = self._attention.output_places
        interleaved = attended if places is None else interleave(attended, places)
        total, open_norm = folded_sum(interleaved, *self._output.operands, hidden[0], self._mlp_norm)
        assert open_norm is not None
        gated = folded_linear(open_norm, *self._gate_up.operands, gated=True, places=self._down_places)
        total, open_norm = folded_sum(gated, *self._down.operands, total, self._next_norm)
        result = total.unsqueeze(0)
        if open_norm is not None:
            context.carried = (result, open_norm)
        return result


def _exchange(context: RotaryContext, chain: LayerChain, rows: int) -> Tensor:
    """Memory that no other chain of the step uses; a layer may have a larger MLP than the one before it."""
    exchange = None if context.exchanges is None else next(context.exchanges, None)
    if exchange is None or exchange.numel() < chain.exchange_words(rows):
        context.exchanges = iter(new_exchange(chain, rows, _CHAINS_AT_ONCE).unbind())
        exchange = next(context.exchanges)
    return exchange


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _weight(part: Any) -> PackedWeight | None:
    if isinstance(part, JoinedPackedLinear):
        return part.weight
    if type(part) is PackedLinear and "forward" not in vars(part):
        return part.packed_weight
    return None
