"""A model that runs packed tokens with an attention context of ours: the one way in which the engine calls a model.

All tokens of a step form one row `[1, num_tokens]`; the context knows which belong together. It reaches attention as a
keyword of the forward where the model hands keywords on, and otherwise (StableLM) as a tag on the keys that a cache
returns. Models that expand keys after storing them (latent attention) can be reached by the keyword only.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel

from hf_paged.attention import CONTEXT_KEYWORD, CONTEXT_TAG, AttentionContext, no_mask
from hf_paged.layer_probe import LayerProbe, LayerSpec, check_supported

# Transformers 5.24 renamed the keyword of every forward; older releases know the first name only.
CACHE_NAMES = ("past_key_values", "cache")
CACHE_KEYWORD = CACHE_NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]


class ContextCache(Cache):
    """Stores nothing; hands a context to attention as a tag on the keys, as `PagedCache` hands over its pages."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(layers=[])
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        setattr(key_states, CONTEXT_TAG, self._context)
        return key_states, value_states


class PackedModel:
    """A view (see `model_view.py`) and what one token run through it showed of its attention layers.

    Raises:
        ValueError: the model is refused by `check_supported`, or a layer does not use the attention interface.
    """

    def __init__(self, view: PreTrainedModel) -> None:
        check_supported(view)
        self.view = view
        embeddings: Any = view.get_input_embeddings()
        self.device: torch.device = embeddings.weight.device
        self.vocab_size = int(view.config.get_text_config(decoder=True).vocab_size)
        self._through_cache = False
        probe = self._probe()
        self.specs: tuple[LayerSpec, ...] = tuple(probe.specs[i] for i in sorted(probe.specs))
        self.probed_keys = probe.keys
        assert probe.first is not None
        self.probed: Tensor = probe.first  # [n], one token's keys and values in the first layer: tells models apart

    @property
    def takes_keywords(self) -> bool:
        """Whether a keyword of the forward reaches attention."""
        return not self._through_cache

    def __call__(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext, logits_index: Tensor | None = None
    ) -> Tensor:
        """One forward: logits `[num_logits, vocab]` of the tokens in `logits_index` (None = all).

        Args:
            input_ids, positions: [num_tokens] int64.
            context: told by every layer what to attend to.
            logits_index: [num_logits] int64.
        """
        keywords: dict[str, Any] = {CONTEXT_KEYWORD: context}
        if self._through_cache:
            keywords = {CACHE_KEYWORD: ContextCache(context)}
        output = self.view(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=no_mask(input_ids.device),
            use_cache=self._through_cache,
            logits_to_keep=0 if logits_index is None else logits_index,
            **keywords,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.no_grad()
    def _probe(self) -> LayerProbe:
        token = torch.full((1,), self.vocab_size // 2, device=self.device)  # 0 may be padding, a row of zeros
        position = torch.zeros_like(token)
        expected = self.view.config.get_text_config(decoder=True).num_hidden_layers
        for self._through_cache in (False, True):
            probe = LayerProbe()
            self(token, position, probe)
            if len(probe.specs) == expected:
                return probe
        if "forward" in vars(self.view):
            raise ValueError(
                f"{type(self.view).__name__}.forward was replaced on this model, and what replaced it runs the model "
                "itself, not its pages; use model.compile() instead of compiling forward, or a forward hook"
            )
        raise ValueError(
            f"{type(self.view).__name__}: {len(probe.specs)} of {expected} layers use Transformers' attention "
            "interface; paged attention needs all of them"
        )
