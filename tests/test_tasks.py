"""lm-eval's tasks run on our engines and give the numbers that lm-eval's own model gives for the dense one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_zoo import VOCAB, tiny_model
from test_cli_eval import run
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedModel

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is an extra: pip install hf_paged[tasks]")

from hf_paged.eval.tasks import PagedLM, sampling_params_of  # noqa: E402  # needs lm-eval

ROWS = [
    {"question": "Which!", "choices": ["alpha", "be", "gamma"], "answer": 1, "text": "abcdefghij" * 9},
    {"question": "And#which?", "choices": ["x", "yy", "zzz"], "answer": 0, "text": "Once$upon%a&time"},
    {"question": "W", "choices": ["left", "right", "up"], "answer": 2, "text": "!"},
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
""",
    "tiny_write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["~"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on three rows, a tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(head + body)
    _model().save_pretrained(folder / "model")
    tiny_tokenizer(VOCAB).save_pretrained(folder / "model")
    return folder


def _model() -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=64, eos_token_id=2)


def evaluate(model: Any, folder: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    return {
        name: [(sample["filtered_resps"], sample["doc_id"]) for sample in samples]
        for name, samples in found["samples"].items()
    }


@pytest.mark.parametrize("chunk", [16, 8192])
def test_tasks_over_auto_pages_answer_as_lm_evals_own_model(folder: Path, chunk: int) -> None:
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = _model(), tiny_tokenizer(VOCAB)
    theirs = evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, max_length=63), folder
    )
    ours = evaluate(PagedLM(model, tokenizer, max_length=64, max_num_batched_tokens=chunk), folder)
    assert ours["tiny_write"] == theirs["tiny_write"]
    for name in ("tiny_choice", "tiny_text"):
        flat = [[x for resps, _ in side[name] for x in _numbers(resps)] for side in (ours, theirs)]
        assert flat[0] == pytest.approx(flat[1], abs=1e-3)  # fp32, sums of up to 90 log-probabilities
        assert len(flat[0]) >= 3


def _numbers(value: Any) -> list[float]:
    return [x for item in value for x in _numbers(item)] if isinstance(value, list | tuple) else [float(value)]


def test_quantized_pages_move_likelihoods(folder: Path) -> None:
    auto, int8 = (
        evaluate(PagedLM(_model(), tiny_tokenizer(VOCAB), kv_cache_dtype=name), folder) for name in ("auto", "int8")
    )
    flat = [[x for resps, _ in side["tiny_text"] for x in _numbers(resps)] for side in (auto, int8)]
    assert flat[0] != flat[1]
    assert flat[0] == pytest.approx(flat[1], rel=0.05)


def test_the_model_is_registered_with_lm_eval(folder: Path) -> None:
    from lm_eval.api.registry import get_model

    assert get_model("hf_paged") is PagedLM
    arguments = f"pretrained={folder / 'model'},kv_cache_dtype=int8,device=cpu"
    made = PagedLM.create_from_arg_string(arguments, {"batch_size": "auto", "max_batch_size": None})
    assert made.bytes_per_token == 3 * 2 * 2 * (16 + 2), "layers x (K, V) x heads x (codes and a scale)"


def test_a_long_context_loses_its_beginning_not_its_continuation() -> None:
    model = PagedLM(_model(), tiny_tokenizer(VOCAB), max_length=16)
    long = [5, 6, 7] * 20
    ((whole, _),) = model._loglikelihood_tokens([(None, long, [8, 9])], disable_tqdm=True)
    ((cut, _),) = model._loglikelihood_tokens([(None, long[-14:], [8, 9])], disable_tqdm=True)
    assert whole == cut
    with pytest.raises(ValueError, match=r"16 tokens.*1\.\.15"):
        model._loglikelihood_tokens([(None, [5], [6] * 16)])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"until": ["a", ""], "do_sample": False, "temperature": 0.7, "max_gen_toks": 5}, (("a",), 0.0, 5)),
        ({"until": "b", "do_sample": True, "temperature": 0.7}, (("b",), 0.7, 256)),
        ({"temperature": 0.0}, ((), 0.0, 256)),
        ({"temperature": 0.5, "max_new_tokens": 3}, ((), 0.5, 3)),
    ],
    ids=["greedy", "sampled", "zero", "implied"],
)
def test_generation_settings_mean_what_lm_eval_means(settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    params = sampling_params_of(settings)
    assert (params.stop, params.temperature, params.max_tokens) == expected


def test_what_the_engine_does_not_do_is_refused_not_dropped() -> None:
    with pytest.raises(ValueError, match="unknown generation setting num_beams"):
        sampling_params_of({"num_beams": 4})
    with pytest.raises(ValueError, match="batch_size=8"):
        PagedLM(_model(), tiny_tokenizer(VOCAB), batch_size=8)
    with pytest.raises(ValueError, match="frobnicate"):
        PagedLM(_model(), tiny_tokenizer(VOCAB), frobnicate=1)


def test_the_command_prints_every_metric_of_every_format(folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    options = ("--tasks", "tiny_choice,tiny_write", "--include-path", folder, "--kv-cache-dtype", "auto,int8")
    result = run("tasks", folder / "model", *options, "--json", "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "<svg" in plot.read_text()
    rows = json.loads(result.stdout.splitlines()[-1])["results"]
    metrics = [(row["kv_cache"], row["task"], row["metric"]) for row in rows]
    expected = [("tiny_choice", "acc"), ("tiny_choice", "acc_norm"), ("tiny_write", "exact_match")]
    assert metrics == [(name, *pair) for name in ("auto", "int8") for pair in expected]
    assert "acc_norm" in run("tasks", folder / "model", *options, "--limit", 2).stdout
    unknown = run("tasks", folder / "model", "--tasks", "tiny_choice,nope", "--include-path", folder)
    assert unknown.exit_code == 1
    assert "nope" in unknown.stderr
