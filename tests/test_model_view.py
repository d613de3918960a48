"""Views: the user's model is never touched, and a changed model never runs with stale structure."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from hf_paged.model_view import ModelFingerprint, ViewRegistry, build_view
from hf_paged.packed_model import PackedModel


def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config).eval()


def test_a_view_shares_every_tensor_and_leaves_the_config_alone() -> None:
    model = tiny()
    view = build_view(model)
    assert model.config._attn_implementation == "sdpa"
    assert view.config._attn_implementation == "hf_paged"
    pairs = zip(model.named_parameters(), view.named_parameters(), strict=True)
    assert all(a is b and name == other for (name, a), (other, b) in pairs)
    assert all(a is b for a, b in zip(model.buffers(), view.buffers(), strict=True))


def test_tied_weights_stay_tied() -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         vocab_size=64, tie_word_embeddings=True)  # fmt: skip
    view = build_view(LlamaForCausalLM(config))
    assert view.lm_head.weight is view.model.embed_tokens.weight


def test_a_forward_of_a_view_without_pages_is_the_dense_forward() -> None:
    """Left padding and softcap must survive when somebody calls a model under our attention name directly."""
    model = tiny()
    ids = torch.randint(0, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        dense = model(ids, attention_mask=mask).logits[mask.bool()]
        paged = build_view(model)(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(paged, dense)


def test_probe_reports_what_attention_is_given() -> None:
    specs = PackedModel(build_view(tiny())).specs
    assert [(s.layer_idx, s.num_heads, s.kv_heads, s.head_dim, s.window) for s in specs] == [
        (0, 4, 2, 8, None),
        (1, 4, 2, 8, None),
    ]


def test_an_encoder_decoder_model_is_refused_by_name() -> None:
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        PackedModel(build_view(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.resize_token_embeddings(70),
        lambda m: setattr(m.model.layers[0], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
        lambda m: setattr(m.model.layers[1].mlp, "merged_adapters", ["a"]),
        lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
        lambda m: m.train(),
        lambda m: setattr(m.model.layers[0].mlp.up_proj, "weight", nn.Parameter(torch.zeros(64, 32))),
    ],
    ids=["dtype", "resize", "module", "adapter", "config", "train", "parameter"],
)
def test_a_changed_structure_gets_a_new_view(change: object) -> None:
    model, registry = tiny(), ViewRegistry()
    view = registry.get(model)
    assert registry.get(model) is view
    change(model)  # type: ignore[operator]  # the parametrization holds functions
    assert registry.get(model) is not view


def test_weights_written_in_place_keep_the_view_and_change_the_version() -> None:
    model = tiny()
    before = ModelFingerprint(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    after = ModelFingerprint(model)
    assert after.structure == before.structure and after.versions != before.versions


def test_weights_that_move_in_memory_keep_the_view_that_shares_them() -> None:
    """Fusion moves weights when an engine is made: the next call must not pay for a view and a probe of it again."""
    model, registry = tiny(), ViewRegistry()
    before, view = ModelFingerprint(model), registry.get(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert ModelFingerprint(model).structure != before.structure
    assert registry.get(model) is view
    assert view.model.layers[0].mlp.up_proj.weight.data_ptr() == weight.data_ptr()


def test_a_view_goes_with_its_model() -> None:
    model, registry = tiny(), ViewRegistry()
    registry.get(model)
    del model
    gc.collect()
    assert len(registry._views) == 0
