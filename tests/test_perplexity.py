"""Perplexity is a figure of the stored pages: a path around them, or one that depends on chunking, would lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import prompts, tiny_model
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hf_paged import PagedCache, cache_pages, model_runner
from hf_paged.eval.perplexity import measure_perplexity
from hf_paged.eval.row_tiles import ROWS, RowTiles
from hf_paged.eval.scoring import ScoringEngine, target_logprobs
from hf_paged.eval.texts import read_text, token_ids_of, windows_of
from hf_paged.kernels.layout import UINT4, LayerKV
from hf_paged.kernels.reference import dequantize, dequantize_groups, quantize_groups, quantize_rows
from hf_paged.kv_cache import LayerFormat
from hf_paged.private_transformers import forget_attention

WINDOW = 64
TEXT = prompts((3 * WINDOW + 10,), seed=3)[0].tolist()
FORMATS = ["auto", "int8", "fp8", "int4", "k=int8,v=int4"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def perplexity(model: PreTrainedModel, kv_cache_dtype: str = "auto", **options: Any) -> float:
    return measure_perplexity(model, TEXT, window=WINDOW, kv_cache_dtype=kv_cache_dtype, **options).perplexity


def test_auto_pages_give_the_perplexity_of_the_dense_model(model: PreTrainedModel) -> None:
    windows = torch.tensor(TEXT[: 3 * WINDOW]).view(3, WINDOW)
    loss = model(input_ids=windows, labels=windows).loss.item()  # mean over the 3 x 63 tokens
    result = measure_perplexity(model, TEXT, window=WINDOW)
    assert math.log(result.perplexity) == pytest.approx(loss, abs=1e-5)
    assert (result.num_tokens, result.num_windows, result.stride) == (3 * (WINDOW - 1), 3, WINDOW)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_perplexity_does_not_depend_on_how_windows_are_chunked(kv_cache_dtype: str) -> None:
    """A chunk that attends to its own unquantized keys would make large chunks look better. In fp32 no sum is taken in
    another order either; one would tip codes over to their neighbours, by which these differ in the fourth digit.
    """
    model = biased_model()
    small, medium, whole = (perplexity(model, kv_cache_dtype, chunk=chunk) for chunk in (16, 25, 256))
    assert small == pytest.approx(whole, rel=1e-6)
    assert medium == pytest.approx(whole, rel=1e-6)


class AskedRows(TorchFunctionMode):
    """How many rows BLAS is asked for, one entry per product."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_rows_are_summed_alike_however_many_there_are() -> None:
    """BLAS is asked for one number of rows only, for which it takes one kernel."""
    x, layer = torch.randn(1, 2 * ROWS + 3, 48), nn.Linear(48, 40)
    with AskedRows() as asked, RowTiles(), torch.no_grad():
        whole = layer(x)
        for part in (slice(0, 1), slice(5, ROWS + 44), slice(ROWS + 244, None)):
            assert torch.equal(layer(x[:, part]), whole[:, part])
        assert asked.counts == [ROWS] * (3 + 1 + 2 + 1)
        layer.double()(x[0].double())  # there codes are not that close to an edge
        assert asked.counts[-1] == 2 * ROWS + 3
    torch.testing.assert_close(whole[0].double(), layer(x[0].double()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(48,), (0, 48), (3, 48), (2, 1, 48)])
@torch.no_grad()
def test_tiles_take_what_a_linear_takes(shape: tuple[int, ...]) -> None:
    """One row without a batch, none, arguments by name."""
    x, weight, bias = torch.randn(shape), torch.randn(40, 48), torch.randn(40)
    expected = linear(x.double(), weight.double(), bias.double())
    with RowTiles():
        results = [linear(x, weight, bias), linear(input=x, weight=weight, bias=bias), linear(x, weight) + bias]
    for result in results:
        assert result.shape == expected.shape
        magnitude = linear(x.abs(), weight.abs(), bias.abs())  # 48 products and a bias are summed
        assert ((result - expected).abs() <= 50 * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4"])
def test_chunks_change_nothing_but_the_rounding_of_sums(kv_cache_dtype: str) -> None:
    """In fp32 a sum in another order tips a code over to its neighbour now and then; in fp64 none is that close."""
    model = biased_model().double()
    small, whole = (perplexity(model, kv_cache_dtype, chunk=chunk) for chunk in (16, 256))
    assert small == pytest.approx(whole, rel=1e-12)


@pytest.fixture
def fake_quantized() -> Iterator[dict[int, LayerFormat]]:
    """Attention named "fake_quant": plain softmax over what keys and values become in pages of these formats."""
    formats: dict[int, LayerFormat] = {}

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        fmt = formats[module.layer_idx]
        k, v = key.transpose(1, 2), value.transpose(1, 2)  # [batch, tokens, heads, head_dim]
        if fmt.transform is None:
            k, v = rounded(k, fmt.k_codes), rounded(v, fmt.v_codes)
        else:
            k = fmt.transform.key(rounded(fmt.transform.stored_key(k), fmt.k_codes))
            v = fmt.transform.value(rounded(fmt.transform.stored_value(v), fmt.v_codes))
        groups = query.shape[1] // key.shape[1]
        k, v = (x.transpose(1, 2).repeat_interleave(groups, 1).to(query.dtype) for x in (k, v))
        scores = query @ k.transpose(-1, -2) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("fake_quant", attention)
    yield formats
    forget_attention("fake_quant")


def rounded(x: Tensor, codes: torch.dtype | None) -> Tensor:
    if codes is None:
        return x
    return dequantize_groups(*quantize_groups(x)) if codes == UINT4 else dequantize(*quantize_rows(x, codes))


def biased_model() -> PreTrainedModel:
    """A Qwen2 with a large bias on one key channel of its first layer: what smoothing is for."""
    model = tiny_model("qwen2")
    model.model.layers[0].self_attn.k_proj.bias.data[3::16] += 40.0
    return model


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4", "k=int8,v=int4"])
@pytest.mark.parametrize("kv_scales", ["off", "auto"])
def test_scores_are_those_of_plain_attention_over_dequantized_keys_and_values(
    fake_quantized: dict[int, LayerFormat], kv_cache_dtype: str, kv_scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, norms too: Transformers takes them in fp32, where one rounding tips a code over to its neighbour."""

    def norm(self: Qwen2RMSNorm, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm)
    model = biased_model().double()
    options = {"kv_scales": kv_scales, "kv_error_budget": "off"}
    paged = perplexity(model, kv_cache_dtype, **options)
    unquantized = perplexity(model)
    formats = ScoringEngine(model, max_tokens=2, kv_cache_dtype=kv_cache_dtype, **options).kv_plan.formats
    fake_quantized.update(formats)
    assert (kv_scales == "auto") == any(fmt.transform is not None for fmt in formats.values())
    model.set_attn_implementation("fake_quant")
    windows = torch.tensor(TEXT[: 3 * WINDOW]).view(3, WINDOW)
    plain = math.exp(model(input_ids=windows, labels=windows).loss.item())
    assert paged == pytest.approx(plain, rel=1e-6)
    assert abs(plain / unquantized - 1) > 1e-3, "the two could not be told apart"


def store_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every write, of engines and of caches, leaves its channels in the wrong order."""

    def spoil(layer: LayerKV, slot_mapping: Tensor) -> None:
        blocks = slot_mapping.div(layer.block_size, rounding_mode="floor").unique()
        for pages in (layer.k, layer.v):
            stored = pages.tensor.view(torch.uint8) if pages.tensor.itemsize == 1 else pages.tensor
            stored[blocks] = stored[blocks].flip(-1)

    def write(original: Any, layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor, derived: Any) -> None:
        original(layer, key, value, slot_mapping, derived)
        spoil(layer, slot_mapping)

    def rope_write(*operands: Any, original: Any = model_runner.rope_write, **options: Any) -> Tensor:
        query: Tensor = original(*operands, **options)
        spoil(*operands[5:7])
        return query

    for module in (model_runner, cache_pages):
        monkeypatch.setattr(module, "write_kv", partial(write, module.write_kv))
    monkeypatch.setattr(model_runner, "rope_write", rope_write)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("chunk", [16, WINDOW])
@pytest.mark.parametrize("fuse", [False, True])
def test_garbage_in_the_pages_changes_the_perplexity(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, chunk: int, fuse: bool
) -> None:
    """Any path that scored with the keys and values it computed, not with those stored, would not notice."""
    model = biased_model()
    honest = perplexity(model, kv_cache_dtype, chunk=chunk, fuse=fuse)
    store_garbage(monkeypatch)
    assert abs(perplexity(model, kv_cache_dtype, chunk=chunk, fuse=fuse) / honest - 1) > 0.01


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("attention", ["hf_paged", "sdpa"])
def test_garbage_in_a_cache_changes_the_logits_of_the_forward_that_wrote_it(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, attention: str
) -> None:
    """The loops of `generate`, whether attention reads the pages or is given what they hold."""
    model = biased_model()
    model.set_attn_implementation(attention)

    def logits() -> Tensor:
        with torch.no_grad():
            cache = PagedCache(model, kv_cache_dtype=kv_cache_dtype)
            found: Tensor = model(torch.tensor([TEXT[:WINDOW]]), past_key_values=cache).logits
        return found

    honest = logits()
    store_garbage(monkeypatch)
    assert (logits() - honest).abs().mean() > 0.1 * honest.std()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_garbage_in_the_pages_reaches_prompts_through_a_workspace(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    """Long prompts on coded pages attend over a dequantized copy; one of what was computed would flatter."""
    from hf_paged.kernels import prefill_workspace

    model = biased_model().half().cuda()
    taken = []
    wanted = prefill_workspace.wanted
    monkeypatch.setattr(prefill_workspace, "wanted", lambda *step: taken.append(wanted(*step)) or taken[-1])
    honest = measure_perplexity(model, TEXT, window=200, kv_cache_dtype=kv_cache_dtype).perplexity
    assert any(taken) == (kv_cache_dtype != "auto")
    store_garbage(monkeypatch)
    spoilt = measure_perplexity(model, TEXT, window=200, kv_cache_dtype=kv_cache_dtype).perplexity
    assert abs(spoilt / honest - 1) > 0.01


def test_a_stride_scores_every_token_once_with_more_context(model: PreTrainedModel) -> None:
    windows = windows_of(range(100), 40, 16)
    scored = [i for w in windows for i in w.token_ids[w.num_context :]]
    assert scored == list(range(1, 88)), "40, then 16 at a time; 12 are left over"
    assert all(len(w.token_ids) == 40 for w in windows)
    result = measure_perplexity(model, TEXT, window=WINDOW, stride=16)
    assert result.num_tokens == WINDOW - 1 + 16 * 8
    logits = model(input_ids=torch.tensor([TEXT[16 : 16 + WINDOW]])).logits[0, -17:-1]
    expected = target_logprobs(logits, torch.tensor(TEXT[WINDOW : WINDOW + 16]))
    torch.testing.assert_close(result.logprobs[WINDOW - 1 :][:16].float(), expected, atol=1e-4, rtol=0)


def test_a_change_has_the_error_bar_of_paired_tokens(model: PreTrainedModel) -> None:
    auto, int8 = (
        measure_perplexity(model, TEXT, window=WINDOW, kv_cache_dtype=name, chunk=16) for name in ("auto", "int8")
    )
    change, stderr = int8.change_from(auto)
    assert change == pytest.approx(int8.perplexity / auto.perplexity - 1, abs=1e-12)
    assert 0 < stderr < int8.stderr / int8.perplexity / 3
    assert int8.bytes_per_token < auto.bytes_per_token / 2
    with pytest.raises(ValueError, match="cannot be compared"):
        int8.change_from(measure_perplexity(model, TEXT, window=32))


def test_progress_counts_every_scored_token(model: PreTrainedModel) -> None:
    told: list[int] = []
    result = measure_perplexity(model, TEXT, window=WINDOW, stride=24, chunk=16, progress=told.append)
    assert sum(told) == result.num_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window=1"),
        ({"window": 300}, r"window=300 .*2\.\.256"),
        ({"window": 250}, "202 tokens"),
        ({"window": 64, "stride": 0}, "stride=0"),
        ({"window": 64, "stride": 65}, r"stride=65 .*1\.\.64"),
        ({"window": 64, "limit": 0}, "limit=0"),
        ({"window": 64, "kv_cache_dtype": "int3"}, "int3"),
        ({"window": 64, "frobnicate": 1}, "frobnicate"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_scored_is_named(model: PreTrainedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_perplexity(model, TEXT, **options)


def test_a_sequence_that_fails_is_an_error_not_a_missing_number(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScoringEngine(model, max_tokens=16)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no pages")

    with monkeypatch.context() as patch:
        for writes in ("write_kv", "rope_write"):  # of layers as they are, and fused
            patch.setattr(model_runner, writes, fail)
        with pytest.raises(RuntimeError, match=r"sequence 0 could not be scored.*no pages"):
            list(engine.score([TEXT[:16]]))
    scores = engine.score([TEXT[:16], TEXT[:9]])
    next(scores)
    scores.close()
    assert sum(len(logits) for _, _, logits in engine.score([TEXT[:16]])) == 16, "usable afterwards"


def test_the_trained_model_that_breaks_naive_caches_is_served_well(shared: Path) -> None:
    """Large key biases in two of its layers; the bars are those of docs/quality.md with room for a short text."""
    path = shared / "models" / "small-qwen2-kbias-15m"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = read_text(shared / "text" / "wikitext2-raw-test.txt")[:20_000]
    ids = token_ids_of(AutoTokenizer.from_pretrained(path), text)
    base, naive, int4, int8 = (
        measure_perplexity(model, ids, window=512, limit=2, **options)
        for options in (
            {},
            {"kv_cache_dtype": "int4", "kv_scales": "off"},
            {"kv_cache_dtype": "int4"},
            {"kv_cache_dtype": "int8"},
        )
    )
    assert naive.change_from(base)[0] > 0.1
    assert int4.change_from(base)[0] < 0.02
    assert int8.change_from(base)[0] < 0.002
    assert int4.bytes_per_token < int8.bytes_per_token < base.bytes_per_token


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    """Of an empty text a window is too long however short it is made."""
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
        read_text(tmp_path / "empty.txt")
