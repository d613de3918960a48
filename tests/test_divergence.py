"""Quality is measured through the pages: a path that scored with unquantized keys would show no difference at all."""

import pytest
from model_zoo import prompts, tiny_model

from hf_paged.eval.divergence import measure_divergence, windows_of


def test_formats_are_scored_through_what_the_pages_hold() -> None:
    model = tiny_model("llama")
    windows = [row.tolist() for row in prompts((60, 60), seed=3)]
    chunked = {"num_blocks": 20, "max_num_batched_tokens": 16, "max_model_len": 64}
    auto, int8, again = measure_divergence(model, windows, ["auto", "int8", "int8"], **chunked)
    # fp32 sums in another order: a hundred roundings of a log-probability near 10
    assert auto.top1_agreement == 1.0 and auto.mean_abs_delta < 1e-4
    assert auto.perplexity == pytest.approx(auto.dense_perplexity, rel=1e-4)
    assert int8.mean_abs_delta > 1e-3, "scored without quantization"
    assert int8 == again
    (whole,) = measure_divergence(model, windows, ["int8"], num_blocks=20, max_model_len=64)
    assert whole.mean_abs_delta == pytest.approx(int8.mean_abs_delta, abs=1e-4)
    assert int8.num_tokens == 2 * 59 and int8.bytes_per_token < auto.bytes_per_token / 2


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens"):
        windows_of(range(9), 10, 1)
    assert windows_of(range(25), 10, 9) == [list(range(10)), list(range(10, 20))]
