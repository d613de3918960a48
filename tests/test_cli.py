"""The command line: what it accepts, what it writes where, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from command_line import CHAT, HEAD_DIM, KV_HEADS, LAYERS, run, save_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_paged import cli_generate
from hf_paged.cli import app
from hf_paged.cli_bench import bench
from hf_paged.cli_eval import evaluate
from hf_paged.outputs import CompletionOutput, RequestOutput
from hf_paged.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


class FakeLLM:
    """Answers every prompt with its own text; a prompt "bad" fails, a prompt "^C" is interrupted."""

    def __init__(self, chat_template: str | None = CHAT) -> None:
        self.tokenizer = self
        self.model = SimpleNamespace(generation_config=GenerationConfig())
        self.params: list[SamplingParams] = []
        self.chat_template = chat_template

    def render_chat(self, conversations: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
        return [
            {"prompt": "|".join(f"{t['role']}:{t['content']}" for t in chat), "chat": True} for chat in conversations
        ]

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        self.params.append(params)
        return [self._answer(prompt) for prompt in prompts]

    def stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        self.params.append(params)
        final = self._answer(prompt)
        for end in range(1, len(final.outputs[0].text) + 1):
            yield self._output(final.outputs[0].text[:end])
        yield final

    def _answer(self, prompt: Any) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        if text.endswith("^C"):
            raise KeyboardInterrupt
        return self._output(f"<{text}>", error="too long" if text.endswith("bad") else None)

    def _output(self, text: str, error: str | None = None) -> RequestOutput:
        completion = CompletionOutput(index=0, text=text, token_ids=[1, 2], finish_reason="error" if error else "stop")
        return RequestOutput(
            request_id="0", prompt=text, prompt_token_ids=[1], outputs=[completion], finished=True, error=error
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM()
    monkeypatch.setattr(cli_generate, "load", lambda *_: llm)
    return llm


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        pytest.fail("a model was loaded before the options were checked")

    monkeypatch.setattr(cli_generate, "load", load)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["hello", "--temperature", "-1"], "temperature=-1.0"),
        (["hello", "--top-p", "2"], "top_p=2.0"),
        (["hello", "--kv-cache-dtype", "int3"], "kv_cache_dtype='int3'"),
        (["hello", "--block-size", "48"], "block_size=48"),
        (["hello", "--frobnicate"], "--frobnicate"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["hello", "--kv-cache-dtype", "int8", "--kv-scales", "nowhere"], "there is no file nowhere"),
        ([], "no prompt"),
    ],
    ids=["temperature", "top-p", "kv-cache-dtype", "block-size", "unknown-option", "file", "kv-scales", "no-prompt"],
)
@pytest.mark.usefixtures("nothing_loads")
def test_bad_use_is_refused_before_a_model_is_loaded(options: list[str], message: str) -> None:
    result = run("generate", "model", *options, stdin="")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("source", ["arguments", "text", "jsonl", "stdin"])
def test_every_source_of_prompts_gives_one_output_per_prompt_in_order(source: str, tmp_path: Path) -> None:
    prompts = ["first", "sécond 日本", "third: a\\b"]
    arguments: list[object] = []
    if source == "arguments":
        arguments = list(prompts)
    elif source == "text":
        (tmp_path / "prompts.txt").write_text("\n\n".join(prompts), encoding="utf-8")
        arguments = ["--file", tmp_path / "prompts.txt"]
    elif source == "jsonl":
        lines = [json.dumps(prompts[0]), json.dumps({"prompt": prompts[1]}), "", json.dumps({"prompt": prompts[2]})]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        arguments = ["--file", tmp_path / "prompts.jsonl"]
    stdin = "\n".join(prompts) if source == "stdin" else None
    result = run("generate", "model", "--raw", "--json", *arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["outputs"][0]["text"] for record in records] == [f"<{prompt}>" for prompt in prompts]
    assert [record["index"] for record in records] == [0, 1, 2]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("line", ["{", "3", '{"promt": "x"}', '{"messages": []}', '{"messages": [{"role": "user"}]}'])
def test_a_broken_jsonl_line_is_named_instead_of_skipped(line: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'"fine"\n{line}\n')
    result = run("generate", "model", "--file", tmp_path / "prompts.jsonl")
    assert result.exit_code == 1
    assert "prompts.jsonl, line 2" in result.stderr


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("source", ["argument", "stdin", "jsonl"])
def test_bytes_that_are_no_text_are_named_in_one_line(source: str, tmp_path: Path) -> None:
    """No tokenizer takes half a surrogate pair, which such bytes and JSON's escapes become: 30 lines of traceback."""
    (tmp_path / "prompts.jsonl").write_text('"good"\n"\\ud800"')
    arguments = {"argument": ["caf\udce9"], "stdin": [], "jsonl": ["--file", str(tmp_path / "prompts.jsonl")]}[source]
    result = CliRunner().invoke(app, ["generate", "model", *arguments], input=b"caf\xe9\n" if source == "stdin" else "")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    told = {"argument": "no UTF-8 text", "stdin": "standard input is no UTF-8 text", "jsonl": "prompts.jsonl, line 2"}
    assert told[source] in result.stderr


@pytest.mark.usefixtures("fake")
def test_json_into_a_pipe_of_another_encoding_is_escaped_and_not_lost() -> None:
    result = CliRunner(charset="ascii").invoke(app, ["generate", "model", "\u00dcn\u00ef", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["prompt"].count("\u00dcn\u00ef") == 1


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("prompts", [["\u00dcn"], ["\u00dcn", "two"]], ids=["stream", "batch"])
def test_text_into_a_pipe_of_another_encoding_is_not_lost(prompts: list[str]) -> None:
    result = CliRunner(charset="ascii").invoke(app, ["generate", "model", "--raw", *prompts])
    assert result.exit_code == 0, result.stderr
    assert "<\\xdcn>" in result.stdout


@pytest.mark.usefixtures("fake")
def test_prompts_become_chats_unless_raw_is_asked(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    assert run("generate", "model", "hi").stdout == "<user:hi>\n"
    assert run("generate", "model", "hi", "--system", "be brief").stdout == "<system:be brief|user:hi>\n"
    assert run("generate", "model", "--file", tmp_path / "chat.jsonl").stdout == "<user:a|assistant:b|user:c>\n"
    assert run("generate", "model", "hi", "--raw").stdout == "<hi>\n"
    assert run("generate", "model", "hi", "--raw", "--system", "be brief").exit_code == 2


@pytest.mark.parametrize(
    ("makers", "options", "expected"),
    [
        ({}, [], {"temperature": 0.0}),
        ({}, ["-n", "2"], {"temperature": 1.0}),
        ({}, ["--top-p", "0.9"], {"temperature": 1.0, "top_p": 0.9}),
        ({}, ["--top-p", "0.9", "--temperature", "0.3"], {"temperature": 0.3, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, [], {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, ["--temperature", "0"], {"temperature": 0.0}),
    ],
)
def test_a_model_is_sampled_as_its_makers_say_unless_the_user_says_otherwise(
    fake: FakeLLM, makers: dict[str, Any], options: list[str], expected: dict[str, Any]
) -> None:
    """Temperature 1 for every model turns small chat models into babblers, and 16 tokens cut every answer."""
    fake.model.generation_config = GenerationConfig(**makers)
    assert run("generate", "model", "hi", *options).exit_code == 0
    (params,) = fake.params
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.max_tokens == 512


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"hf-paged {importlib.metadata.version('hf-paged')}\n"


def test_a_list_of_commands_says_what_each_does_to_the_end_of_the_sentence() -> None:
    groups = [typer.main.get_group(part) for part in (app, bench, evaluate)]
    assert all(group.commands for group in groups)
    for command in (command for group in groups for command in group.commands.values()):
        assert not command.get_short_help_str(limit=100).endswith("..."), command.name  # 120 columns less the name


def test_layers_to_skip_are_numbers_with_commas_between(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(cli_generate, "load", lambda *arguments: seen.append(arguments[3]) or FakeLLM())
    assert run("generate", "model", "hi", "--skip-layers", "0,1").exit_code == 0
    assert seen[0]["skip_layers"] == (0, 1)
    result = run("generate", "model", "hi", "--skip-layers", "first")
    assert result.exit_code == 2 and "'first' is not allowed" in " ".join(result.stderr.split())


def test_a_model_without_chat_template_gets_the_prompt_as_it_is(fake: FakeLLM) -> None:
    fake.chat_template = None
    assert run("generate", "model", "hi").stdout == "<hi>\n"


@pytest.mark.usefixtures("fake")
def test_one_failed_prompt_fails_the_command_but_not_the_other_prompts() -> None:
    result = run("generate", "model", "--raw", "--json", "fine", "bad")
    assert result.exit_code == 1
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["error"], second["error"]) == (None, "too long")
    assert "too long" in result.stderr


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("prompts", [["^C"], ["one", "^C"]], ids=["stream", "batch"])
def test_ctrl_c_ends_with_130_and_no_traceback(prompts: list[str]) -> None:
    result = run("generate", "model", "--raw", *prompts)
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_single_prompt_streams_the_text_that_json_gives_whole(model_path: Path) -> None:
    common = ("generate", model_path, "Once upon", "--temperature", "0", "--max-tokens", "12", "--num-blocks", "16")
    streamed, whole = run(*common), run(*common, "--json")
    assert streamed.exit_code == whole.exit_code == 0, streamed.stderr + whole.stderr
    record = json.loads(whole.stdout)
    assert record["prompt"] == "<user>Once upon<assistant>"
    assert streamed.stdout == record["outputs"][0]["text"] + "\n"
    assert 1 <= record["outputs"][0]["tokens"] <= 12


def test_generate_writes_n_sequences_per_prompt_and_a_seed_repeats_them(model_path: Path) -> None:
    common = ("generate", model_path, "one", "two", "-n", "2", "--seed", "3", "--max-tokens", "8", "--json")
    first, second = run(*common, "--num-blocks", "32"), run(*common, "--num-blocks", "32")
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout
    records = [json.loads(line) for line in first.stdout.splitlines()]
    assert [len(record["outputs"]) for record in records] == [2, 2]
    assert records[0]["outputs"][0]["text"] != records[0]["outputs"][1]["text"]


def test_info_states_the_bytes_that_each_kv_format_costs(model_path: Path) -> None:
    result = run("info", model_path, "--json")
    assert result.exit_code == 0, result.stderr
    info = json.loads(result.stdout)
    assert info["layers"] == [
        {
            "num_layers": LAYERS,
            "num_heads": 4,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "v_head_dim": HEAD_DIM,
            "window": None,
            "softcap": None,
            "has_sinks": False,
        }
    ]
    per_head = {"auto": 4 * HEAD_DIM, "fp8": HEAD_DIM + 2, "int8": HEAD_DIM + 2}  # fp32; one byte per code, fp16 scale
    per_head["int4"] = HEAD_DIM // 2 + 4  # two codes per byte, fp16 scale and zero
    costs = {cost["kv_cache_dtype"]: cost["bytes_per_token"] for cost in info["kv_cache"]}
    assert costs == {name: LAYERS * 2 * KV_HEADS * size for name, size in per_head.items()}
    assert all(cost["tokens_that_fit"] > 0 for cost in info["kv_cache"])
    assert "Llama" in run("info", model_path).stdout


def test_info_of_a_head_size_that_int4_cannot_pack_says_so(tmp_path: Path) -> None:
    """It ended in an error, and told nothing of the formats that work."""
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=60, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=130, pad_token_id=0)
    ).save_pretrained(tmp_path)  # fmt: skip
    info = json.loads(run("info", str(tmp_path), "--json").stdout)
    assert [cost["kv_cache_dtype"] for cost in info["kv_cache"]] == ["auto", "fp8", "int8"]
    assert "head_dim 130" in info["refused"]["int4"]
    assert "int4: int4 keys and values of head_dim 130" in run("info", str(tmp_path)).stdout.replace("\n", " ")


def test_info_says_what_is_fused_or_why_nothing_is(model_path: Path) -> None:
    assert "--fusion" in json.loads(run("info", model_path, "--json").stdout)["fusion"]["off"]
    report = json.loads(run("info", model_path, "--json", "--fusion").stdout)["fusion"]
    fused = {component["name"]: component["fused"] for component in report["components"]}
    assert fused["MLP"] == LAYERS
    assert f"MLP: {LAYERS} fused" in run("info", model_path, "--fusion").stdout


def test_info_counts_parameters_without_loading_weights(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`info` on a 70B model must answer on a laptop."""
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("weights were read"))
    info = json.loads(run("info", model_path, "--json").stdout)
    assert info["num_parameters"] == LlamaForCausalLM(LlamaConfig.from_pretrained(model_path)).num_parameters()
    assert info["weight_bytes"] == (model_path / "model.safetensors").stat().st_size


def test_prompt_files_may_begin_with_a_byte_order_mark_and_must_be_text(tmp_path: Path) -> None:
    marked, binary = tmp_path / "marked.jsonl", tmp_path / "binary.txt"
    marked.write_text('"a"\n', encoding="utf-8-sig")
    binary.write_bytes(b"\xff\xfe\x00")
    assert list(cli_generate.read_prompts([], marked)) == ["a"]
    with pytest.raises(ValueError, match=r"binary\.txt is no UTF-8 text"):
        list(cli_generate.read_prompts([], binary))
