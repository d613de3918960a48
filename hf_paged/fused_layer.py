"""The fused forward of a decoder layer: each residual add is one kernel with the norms around it.

Between two fused layers the residual add of one and the input norm of the next are one kernel: a layer leaves
(hidden states, their norm) in the context, and the next takes the norm if it is given those very hidden states. With
few tokens and packed weights these kernels are ends of products (`folded_layer.py`).

Of the last layer only the tokens that become logits are read. It stores the keys and values of all, and goes on with
those: of a model of 32 layers that saves 3% of a prompt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hf_paged.attention import CONTEXT_KEYWORD
from hf_paged.folded_layer import FoldedLayer
from hf_paged.fused_modules import FusedAttention, FusedMLP, Projected, RotaryContext, first_output, own_of
from hf_paged.kernels.folded_linear import OpenNorm
from hf_paged.kernels.fused_ops import add_rms_norm, rms_norm
from hf_paged.kernels.layer_chain import MAX_CHAIN_ROWS, LayerChain
from hf_paged.kernels.reference_fused import RMSNorm
from hf_paged.quant.joined_packed import inverse


@dataclass(kw_only=True, eq=False)
class FusedLayer:
    """The forward of a decoder layer: each residual add is one kernel with the norms around it.

    h = x + attention_post(attention(input_norm(x))), y = h + mlp_post(mlp(mlp_norm(h))), each norm optional.
    """

    own: weakref.WeakMethod[Callable[..., Any]]
    input_norm: RMSNorm | None
    attention: nn.Module
    attention_post: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp: nn.Module
    mlp_post: RMSNorm | None
    next_norm: RMSNorm | None = None  # the input norm of the fused layer that follows
    following: FusedLayer | None = None  # that layer
    is_last: bool = False  # what follows reads each token by itself, and in the end some of them only
    _made: LayerChain | None = None  # once asked for; where weights lie then, as captured steps know it
    _asked: bool = False

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.get(CONTEXT_KEYWORD)
        if args or not isinstance(context, RotaryContext):
            return own_of(self.own)(hidden_states, *args, **kwargs)
        normed: Tensor | OpenNorm | Projected | None = hidden_states
        if self.input_norm is not None:
            normed, folded = context.take_norm(hidden_states), self._folded(hidden_states, context)
            if normed is None or (folded is None and not isinstance(normed, Tensor)):
                normed = rms_norm(hidden_states, self.input_norm)
            if folded is not None:
                return folded(hidden_states, normed, context, kwargs, self._chain(folded, hidden_states, context))
        delta = self.attention(normed, **kwargs, **_ordered(self.input_norm))[0]
        if self.is_last and context.wanted is not None:
            hidden_states = hidden_states[:, context.wanted]
        hidden, normed = add_rms_norm(delta, hidden_states, self.mlp_norm, self.attention_post)
        delta = first_output(self.mlp(hidden if normed is None else normed, **_ordered(self.mlp_norm)))
        hidden, normed = add_rms_norm(delta, hidden, self.next_norm, self.mlp_post)
        if normed is not None:
            context.carried = (hidden, normed)
        return hidden

    def _folded(self, hidden: Tensor, context: RotaryContext) -> FoldedLayer | None:
        if context.wanted is not None or self.attention_post is not None or self.mlp_post is not None:
            return None
        return FoldedLayer.of(self.attention, self.mlp, (self.input_norm, self.mlp_norm, self.next_norm), hidden)

    def _chain(self, folded: FoldedLayer, hidden: Tensor, context: RotaryContext) -> LayerChain | None:
        """The products up to QKV of the layer that follows as one, if that one folds, too."""
        if self.following is None or hidden.shape[1] > MAX_CHAIN_ROWS:
            return None
        following = self.following._folded(hidden, context)
        if following is None:
            return None
        if not self._asked:
            self._made, self._asked = folded.chain(following), True
        return self._made

    def order_norms(self) -> None:
        """Let the norms write channels as the act-order weights behind them read them: nothing is left to gather."""
        attention, mlp = (vars(module).get("forward") for module in (self.attention, self.mlp))
        if self.input_norm is not None and isinstance(attention, FusedAttention):
            self.input_norm = _in_order(self.input_norm, attention.projections.order)
        if self.mlp_norm is not None and isinstance(mlp, FusedMLP):
            self.mlp_norm = _in_order(self.mlp_norm, mlp.projections.order)


def _in_order(norm: RMSNorm, order: Tensor | None) -> RMSNorm:
    return norm if order is None else replace(norm, order=order, places=inverse(order))


def _ordered(norm: RMSNorm | None) -> dict[str, bool]:
    """What a sub-layer is told that reads an ordered norm; others know no such argument."""
    return {"ordered": True} if norm is not None and norm.order is not None else {}
