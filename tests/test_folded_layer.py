"""Decoder layers of few tokens whose small kernels are ends of their packed products."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fusion import assert_same_logits, fused_view, step_logits
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged import LLM, CompletionOutput, SamplingParams, folded_layer, joined_linear
from hf_paged.eval import bench_models
from hf_paged.folded_layer import FoldedLayer
from hf_paged.kernels import folded_linear, layer_chain
from hf_paged.kernels.interleaved_rows import InterleavedRows
from hf_paged.kernels.layer_chain import LayerChain
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.reference_fused import RMSNorm
from hf_paged.quant.joined_packed import JoinedPackedLinear
from hf_paged.quant.linear import PackedLinear

CALLS_OF_A_LAYER = 4


def packed_model(device: str, *, act_order: bool = False, mlp: int = 704) -> PreTrainedModel:
    config = bench_models._llama(3, 256, mlp, 4, 2, 64, vocab_size=300)
    model = bench_models._random_model(config, torch.bfloat16, device, 4).eval()
    if act_order:
        for layer in model.model.layers:
            for group in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
                linears = [module for name, module in layer.named_modules() if name.split(".")[-1][:-5] in group]
                order = torch.randperm(linears[0].in_features, device=device).to(torch.int32)
                for linear in linears:
                    linear.perm = nn.Parameter(order, requires_grad=False)
    return model


class Definitions:
    """Stands for the kernels and counts their calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.exchanges: list[Tensor] = []  # of the chains

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, locks: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        return folded_linear.folded_linear_reference(x, weight, bias, **options)

    def sum(
        self,
        x: Tensor | InterleavedRows,
        weight: PackedWeight,
        bias: Tensor | None,
        locks: Tensor,
        residual: Tensor,
        norm: RMSNorm,
    ) -> tuple[Tensor, folded_linear.OpenNorm | None]:
        self.calls += 1
        assert weight.perm is None or isinstance(x, InterleavedRows), "left to a gather of 2 bytes from each row"
        return folded_linear.folded_sum_reference(x, weight, bias, residual, norm)

    def chain(self, x: Tensor, residual: Tensor, chain: LayerChain, exchange: Tensor) -> tuple[Tensor, Tensor]:
        assert exchange.numel() >= chain.exchange_words(x.shape[0])
        self.exchanges.append(exchange)
        return layer_chain.layer_chain_reference(x, residual, chain)


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> Definitions:
    """Layers fold on a CPU, by the definitions."""

    def join(modules: Sequence[nn.Module], shared: set[int], beside: nn.Module | None = None) -> tuple[object, None]:
        packed = [module for module in modules if isinstance(module, PackedLinear)]
        return JoinedPackedLinear(packed, joined_linear.join_parameters), None

    made = Definitions()
    monkeypatch.setattr("hf_paged.fusion_patterns.join", join)
    monkeypatch.setattr(folded_layer, "can_fold", lambda x, weight: x.shape[0] <= 16)
    monkeypatch.setattr(folded_layer, "folded_linear", made.linear)
    monkeypatch.setattr(folded_layer, "folded_sum", made.sum)
    monkeypatch.setattr(folded_layer, "layer_chain", made.chain)
    return made


@pytest.mark.parametrize("act_order", [False, True])
def test_a_step_of_few_tokens_folds_every_layer_and_gives_the_same_logits(
    act_order: bool, definitions: Definitions
) -> None:
    model = packed_model("cpu", act_order=act_order)
    view, _ = fused_view(model)
    folded = step_logits(view, tokens=9)
    assert definitions.calls == 3 * CALLS_OF_A_LAYER
    definitions.calls = 0
    assert_same_logits(folded, step_logits(fused_view(model)[0], tokens=21)[:9])
    assert definitions.calls == 0


@pytest.mark.parametrize("act_order", [False, True])
def test_a_step_of_one_token_chains_each_layer_with_the_next_and_gives_the_same_logits(
    act_order: bool, definitions: Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's QKV and the last layer's products are left."""
    view, _ = fused_view(packed_model("cpu", act_order=act_order, mlp=768))
    chained = step_logits(view, tokens=1)
    assert len(definitions.exchanges) == 2 and definitions.calls == 1 + (CALLS_OF_A_LAYER - 1)
    first, second = definitions.exchanges
    assert first.data_ptr() != second.data_ptr() and (first == -1).all() and (second == -1).all()
    step_logits(view, tokens=1)
    assert len({exchange.data_ptr() for exchange in definitions.exchanges}) == 4
    definitions.exchanges.clear()
    monkeypatch.setattr("hf_paged.fused_layer.MAX_CHAIN_ROWS", 0)
    assert_same_logits(chained, step_logits(view, tokens=1))
    assert not definitions.exchanges


def test_a_layer_with_a_larger_mlp_than_the_one_before_it_gets_memory_of_its_size(definitions: Definitions) -> None:
    """Pruned models have such layers; memory for the chains of a step was of the first one's size."""
    model = packed_model("cpu", mlp=768)
    model.model.layers[0].mlp = packed_model("cpu", mlp=512).model.layers[0].mlp
    view, _ = fused_view(model)
    step_logits(view, tokens=1)
    first, second = definitions.exchanges
    assert second.numel() > first.numel() and (second == -1).all()


def test_norms_of_another_dtype_than_hidden_states_do_not_fold(definitions: Definitions) -> None:
    """The kernels read their weights as bf16; one in fp32, as some fine-tunings leave them, would be other numbers."""
    layer = vars(fused_view(packed_model("cpu"))[0].model.layers[0])["forward"]
    hidden, norms = torch.zeros(1, 1, 256, dtype=torch.bfloat16), (layer.input_norm, layer.mlp_norm, layer.next_norm)
    assert FoldedLayer.of(layer.attention, layer.mlp, norms, hidden) is not None
    for i, norm in enumerate(norms):
        others = [*norms]
        others[i] = replace(norm, weight=norm.weight.float())
        assert FoldedLayer.of(layer.attention, layer.mlp, tuple(others), hidden) is None, i


def test_a_layer_before_one_that_somebody_watches_is_no_chain(definitions: Definitions) -> None:
    """That one multiplies by itself, and another stream of hidden states is not the one that was multiplied."""
    view, _ = fused_view(packed_model("cpu", mlp=768))
    chained = step_logits(view, tokens=1)
    definitions.exchanges.clear()
    seen: list[Tensor] = []
    hook = view.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    assert_same_logits(step_logits(view, tokens=1), chained)
    assert not definitions.exchanges and seen
    hook.remove()
    view.model.layers[0].register_forward_hook(lambda module, args, output: output * 1)
    assert_same_logits(step_logits(view, tokens=1), chained)
    assert len(definitions.exchanges) == 2


def test_a_layer_that_somebody_watches_does_not_fold_and_still_gets_its_norm(definitions: Definitions) -> None:
    """The layer before it leaves a norm that only a folded one can read."""
    model = packed_model("cpu")
    view, _ = fused_view(model)
    folded = step_logits(view, tokens=9)
    seen: list[Tensor] = []
    view.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    definitions.calls = 0
    assert_same_logits(step_logits(view, tokens=9), folded)
    assert definitions.calls == 2 * CALLS_OF_A_LAYER and seen


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 7, 8, 13, 16])
@pytest.mark.parametrize("act_order", [False, True])
def test_folded_layers_give_the_logits_of_fused_ones_on_the_gpu(
    act_order: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("layers fold on Hopper only")
    model = packed_model("cuda", act_order=act_order)
    view, _ = fused_view(model)
    calls = []
    kernel = folded_layer.folded_linear
    monkeypatch.setattr(
        folded_layer, "folded_linear", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs)
    )
    folded = step_logits(view, tokens=tokens)
    assert len(calls) == 2 * 3
    monkeypatch.setattr(folded_layer, "can_fold", lambda x, weight: False)
    assert_same_logits(folded, step_logits(view, tokens=tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("act_order", [False, True])
def test_chained_layers_give_the_logits_of_fused_ones_on_the_gpu(
    act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("layers fold on Hopper only")
    view, _ = fused_view(packed_model("cuda", act_order=act_order, mlp=768))
    calls = []
    kernel = folded_layer.layer_chain
    monkeypatch.setattr(folded_layer, "layer_chain", lambda *args: calls.append(1) or kernel(*args))
    chained = step_logits(view, tokens=1)
    assert len(calls) == 2
    monkeypatch.setattr(folded_layer, "can_fold", lambda x, weight: False)
    assert_same_logits(chained, step_logits(view, tokens=1))


def outputs_in_turn(requests: Sequence[tuple[LLM, list[int]]], tokens: int) -> list[CompletionOutput]:
    """A step of each engine after one of the other."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    for llm, prompt in requests:
        llm.engine.add_request("a", prompt, params)
    outputs: list[CompletionOutput] = []
    while any(llm.engine.has_work for llm, _ in requests):
        outputs += [output.outputs[0] for llm, _ in requests for output in llm.engine.step()]
    return outputs


def assert_engines_chain(model: PreTrainedModel, tokens: int) -> None:
    """Their steps are replays of two captured graphs: memory that is not as new, or the other engine's, would show in
    what they think of their tokens, which differs from the model's as in `assert_same_logits`."""
    options = {"num_blocks": 20, "block_size": 16, "max_model_len": 128, "max_num_seqs": 2}
    requests = [(LLM(model, **options), list(range(i, 10))) for i in (3, 4)]  # type: ignore[arg-type]
    outputs = outputs_in_turn(requests, tokens)
    assert outputs == [outputs_in_turn([request], tokens)[0] for request in requests]
    for (_, prompt), output in zip(requests, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        told = torch.tensor([entry.logprob for step in output.logprobs or [] for entry in step.values()])
        error = (told - expected).square().mean().sqrt()
        assert error <= 8 * torch.finfo(torch.bfloat16).eps * logits.square().mean().sqrt()


@pytest.mark.parametrize("act_order", [False, True])
def test_captured_chains_of_two_engines_tell_what_the_model_does(act_order: bool, definitions: Definitions) -> None:
    assert_engines_chain(packed_model("cpu", act_order=act_order, mlp=768), tokens=20)
    assert len(definitions.exchanges) == 2 * 2 * 2  # engines, layers, a run before the capture and its own


@pytest.mark.gpu
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_captured_chains_of_two_engines_tell_what_the_model_does_on_the_gpu(
    device: str, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("layers fold on Hopper only")
    calls = []
    kernel = folded_layer.layer_chain
    monkeypatch.setattr(folded_layer, "layer_chain", lambda *args: calls.append(1) or kernel(*args))
    assert_engines_chain(packed_model(device, act_order=act_order, mlp=768), tokens=100)
    assert len(calls) == 2 * 2 * 2 and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_two_engines_decode_at_once_in_two_threads_on_two_streams() -> None:
    """Their chains each need every multiprocessor, so they take turns."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("layers fold on Hopper only")
    model = packed_model("cuda", mlp=768)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engines = [LLM(model, num_blocks=20, block_size=16, max_model_len=128, max_num_seqs=1) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in engines]

    def generate(side: int) -> list[list[int]]:
        with torch.cuda.stream(streams[side]):
            return [
                engines[side].generate([[3, 4, 5 + side]], params, use_tqdm=False)[0].outputs[0].token_ids
                for _ in range(5)
            ]

    expected = [generate(side) for side in range(2)]  # captured here: no other thread may use the GPU meanwhile
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected
