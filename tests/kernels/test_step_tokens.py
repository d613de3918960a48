"""Tokens that go into a step and that come out of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from hf_paged.kernels import fused_ops, sample_reference
from hf_paged.kernels.step_tokens import embedding, input_tokens, likeliest_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_token_that_only_the_device_knows_is_taken_from_its_row() -> None:
    ids = torch.arange(300, device=DEVICE)
    ids[::3] = -1
    rows = torch.arange(300, device=DEVICE).flip(0)
    last = torch.arange(1000, 1300, device=DEVICE)
    assert torch.equal(input_tokens(ids, rows, last), torch.where(ids >= 0, ids, last[rows]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0,)])
@pytest.mark.parametrize("channels", [48, 1100])
def test_a_token_gets_its_own_row(channels: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(40, channels).to(DEVICE, torch.bfloat16)
    ids = torch.randint(40, shape, device=DEVICE)
    assert torch.equal(embedding(ids, weight), torch.nn.functional.embedding(ids, weight))


def test_ids_of_32_bits_are_left_to_torch() -> None:
    """Offsets as wide as they are would overflow in a table of 2 ** 31 numbers."""
    weight, ids = torch.randn(40, 48, device=DEVICE), torch.randint(40, (3,), device=DEVICE)
    with pytest.raises(AssertionError, match="int32"):
        embedding(ids.int(), weight)
    assert torch.equal(fused_ops.embedding(ids.int(), weight), weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 8192, 20000])
def test_the_likeliest_token_is_the_lowest_of_equal_ones_and_its_row_keeps_it(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """Greedy tokens must not depend on whether a captured step or the sampler finds them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-9, 9, (5, vocab_size + 3), generator=generator).to(DEVICE, dtype)[:, :vocab_size]
    logits[1] = float("-inf")
    rows, last = torch.tensor([4, 0, 7, 5, 2], device=DEVICE), torch.full((9,), -1, device=DEVICE)
    tokens = likeliest_tokens(logits, rows, last)
    lowest = [row.index(max(row)) for row in logits.tolist()]
    assert tokens.tolist() == lowest
    assert [last[row].item() for row in rows] == lowest and (last == -1).sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_that_is_no_number_is_not_the_likeliest(dtype: torch.dtype) -> None:
    """On no device, in a captured step or elsewhere; torch's `max` and `argmax` take NaN for the largest number."""
    nan, inf = float("nan"), float("inf")
    rows = [[0, nan, 1, 1], [2, nan, -inf, 1], [nan] * 4, [-inf, -inf, nan, -inf], [1, inf, nan, inf]]
    logits, lowest = torch.tensor(rows, device=DEVICE).to(dtype), [2, 0, 0, 0, 1]
    places, last = torch.arange(5, device=DEVICE), torch.zeros(5, dtype=torch.long, device=DEVICE)
    assert likeliest_tokens(logits, places, last).tolist() == lowest == last.tolist()
    assert sample_reference.likeliest(logits).tolist() == lowest
    assert fused_ops.likeliest_tokens(logits.cpu(), places.cpu(), last.cpu()).tolist() == lowest


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32000, 49152, 128256])
@pytest.mark.parametrize("rows", [1, 128])
def test_real_sizes_on_the_gpu(rows: int, vocab_size: int) -> None:
    """Rows that end within a block: what lies behind them must not be likelier than a row of very small logits."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=generator, device="cuda").to(torch.bfloat16) - 40
    places, last = torch.arange(rows, device="cuda").flip(0), torch.zeros(rows, dtype=torch.long, device="cuda")
    tokens = likeliest_tokens(logits, places, last)
    equal = logits == logits.amax(-1, keepdim=True)
    lowest = torch.where(equal, torch.arange(vocab_size, device="cuda"), vocab_size).amin(-1)
    assert torch.equal(tokens, lowest)
    assert torch.equal(last, tokens.flip(0))
