"""Find the models whose keys an 8-bit cache would crush, before they serve anybody.

One scale per token and KV head is enough while the channels of a key are of one size. Some models (Qwen2 and Qwen2.5,
through the bias of their key projection) have a few channels hundreds of times larger than the rest, and then int8 and
fp8 alike lose the rest. A short forward over seeded random tokens shows the sizes that the pages will see.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from hf_paged.attention import AttentionCall
from hf_paged.kernels.layout import AttentionMetadata
from hf_paged.kv_cache import KVCache, LayerFormat, group_layers, layer_formats
from hf_paged.model_runner import StepContext
from hf_paged.packed_model import PackedModel

logger = logging.getLogger(__name__)

OUTLIER_RATIO = 50.0  # largest over median channel; trained models without a key bias stay below 20
_NUM_TOKENS = 64


class _KeySizes(StepContext):
    """Attention over pages that also notes the mean magnitude of each key channel: [kv_heads, head_dim] by layer."""

    def __init__(self, kv_cache: KVCache, metadata: tuple[AttentionMetadata, ...]) -> None:
        super().__init__(kv_cache, metadata)
        self.by_layer: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.by_layer[call.layer_idx] = call.key[0].float().abs().mean(1)
        return super().attend(call)


@torch.no_grad()
def uneven_key_layers(model: PackedModel) -> dict[int, float]:
    """Layers with a key channel over `OUTLIER_RATIO` times the median channel of its head, and that ratio.

    The model must not be fused: fused layers rotate and store their keys in one kernel, out of sight.
    """
    specs, device = model.specs, model.device
    num_groups = len(group_layers(specs))
    pages = KVCache(specs, layer_formats(specs, "auto"), num_blocks=1 + num_groups, block_size=_NUM_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (_NUM_TOKENS,), generator=generator).to(device)
    positions = torch.arange(_NUM_TOKENS, device=device)
    sizes = _KeySizes(pages, tuple(_one_block(1 + group, positions) for group in range(num_groups)))
    model(ids, positions, sizes, positions[-1:])
    ratios = {}
    for layer_idx, size in sizes.by_layer.items():
        median = size.median(-1).values.clamp(min=torch.finfo(torch.float32).tiny)
        ratio = float((size.amax(-1) / median).max())
        if ratio > OUTLIER_RATIO:
            ratios[layer_idx] = ratio
    return ratios


def _one_block(block: int, positions: Tensor) -> AttentionMetadata:
    """One sequence that fills `block`."""
    length = len(positions)
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=positions.device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=positions.device),
        block_tables=torch.tensor([[block]], dtype=torch.int32, device=positions.device),
        slot_mapping=block * length + positions,
        num_decodes=0,
        max_seqlen_q=length,
        max_seq_len=length,
    )


def warn_of_uneven_keys(model: PackedModel, formats: dict[int, LayerFormat]) -> dict[int, float]:
    """Warn once, by layer, where quantized keys will be poor; returns what `uneven_key_layers` found among them."""
    quantized = {i for i, fmt in formats.items() if fmt.k_codes is not None}
    if not quantized:
        return {}
    uneven = {i: ratio for i, ratio in uneven_key_layers(model).items() if i in quantized}
    if uneven:
        worst = max(uneven, key=lambda i: uneven[i])
        logger.warning(
            "%s: keys of layers %s have channels up to %.0f times their median (layer %d); an 8-bit cache loses the "
            'others. Remedy: skip_layers=%s keeps these layers in 16 bits, or kv_cache_dtype="k=auto,v=int8"',
            type(model.view).__name__,
            sorted(uneven),
            uneven[worst],
            worst,
            tuple(sorted(uneven)),
        )
    return uneven
