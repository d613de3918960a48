"""`hf-paged generate`: prompts in, texts out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_paged import cli_support as cli
from hf_paged.cli_eval_support import KVErrorBudget, KVScales
from hf_paged.config import EngineConfig
from hf_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hf_paged.llm import LLM
    from hf_paged.outputs import RequestOutput

Conversation = list[dict[str, str]]

_MAX_TOKENS = 512  # an answer of a chat model ends by itself; this ends one that does not


_Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Default: standard input, one per line.")]
_File = Annotated[
    Path | None,
    typer.Option(
        help='Prompts from a text file, one per line, or from .jsonl: "text", {"prompt"} or {"messages"}.',
        exists=True,
        dir_okay=False,
    ),
]
_Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 = greedy. Default of this and the next three: the model's generation_config. If that does not "
        "sample: 0, but 1 where -n, --seed or one of the next three is given."
    ),
]
_RecentBlock = Annotated[
    bool, typer.Option("--kv-recent-block", help="Keep each sequence's current block in 16 bits beside its codes.")
]
_MemoryShare = Annotated[float, typer.Option(help="Share of the GPU's memory for weights, activations and KV blocks.")]
_Graphs = Annotated[
    bool | None,
    typer.Option(help="Replay captured decode steps, CUDA graphs on a GPU; default: where they can be captured."),
]


def generate(
    model: cli.Model,
    prompts: _Prompts = None,
    file: _File = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of every chat.")] = None,
    json_output: cli.JSONOutput = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt, at most.")] = _MAX_TOKENS,
    min_tokens: Annotated[int, typer.Option(help="Tokens before a stop may end it.")] = SamplingParams.min_tokens,
    temperature: _Temperature = None,
    top_p: Annotated[float | None, typer.Option(help="Likeliest tokens that make up this share; 1 = off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 = off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Of the likeliest token's probability; 0 = off.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="1 = off.")] = SamplingParams.repetition_penalty,
    presence_penalty: Annotated[float, typer.Option(help="0 = off.")] = SamplingParams.presence_penalty,
    frequency_penalty: Annotated[float, typer.Option(help="0 = off.")] = SamplingParams.frequency_penalty,
    n: Annotated[int, typer.Option("-n", help="Sequences per prompt.")] = SamplingParams.n,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a sequence; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = SamplingParams.seed,
    kv_cache_dtype: cli.KVCacheDType = EngineConfig.kv_cache_dtype,
    skip_layers: cli.SkipLayers = None,
    kv_scales: KVScales = EngineConfig.kv_scales,
    kv_error_budget: KVErrorBudget = "auto",
    kv_recent_block: _RecentBlock = EngineConfig.kv_recent_block,
    block_size: cli.BlockSize = EngineConfig.block_size,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks; default: what fits.")] = EngineConfig.num_blocks,
    gpu_memory_utilization: _MemoryShare = EngineConfig.gpu_memory_utilization,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = EngineConfig.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = EngineConfig.max_num_batched_tokens,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt + output; default: the model's.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share blocks of equal prompt beginnings.")] = True,
    swap_space: Annotated[float, typer.Option(help="GiB of CPU memory for preempted requests.")] = 0.0,
    fuse: Annotated[bool | None, typer.Option(help="Join small operations into fused ones; default: yes.")] = None,
    cuda_graphs: _Graphs = None,
    dtype: cli.WeightDType = cli.DType.auto,
    device: cli.Device = None,
) -> None:
    """Complete prompts; a single one is written as it grows. With a chat template, each prompt is a user's message."""
    options = dict(locals())
    engine_options = cli.engine_options(options | {"seed": None, "enable_prefix_caching": prefix_caching})
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    cli.checked(SamplingParams, given)
    if raw and system is not None:
        raise typer.BadParameter("--system is of a chat template, which --raw leaves out; allowed: one of them")
    wanted = list(read_prompts(prompts or [], file))
    if not wanted:
        raise typer.BadParameter("no prompt: give PROMPT, --file, or text on standard input")
    llm = load(model, dtype, device, engine_options)
    sample = n > 1 or not given.keys().isdisjoint({"seed", "top_p", "top_k", "min_p"})
    params = SamplingParams(**(own_sampling(llm.model, sample=sample) | given))
    inputs = render(llm, wanted, raw=raw, system=system)
    if len(inputs) == 1 and not json_output and n == 1:
        failed = _stream(llm, inputs[0], params)
    else:
        outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty())
        failed = sum(_write(i, output, json_output=json_output) for i, output in enumerate(outputs)) > 0
    if failed:
        raise typer.Exit(1)


def load(model: str, dtype: cli.DType, device: str | None, engine_options: dict[str, Any]) -> LLM:
    from hf_paged.llm import LLM  # --help and bad use do without

    cli.quiet_unless_terminal()
    if sys.stderr.isatty() and engine_options["kv_cache_dtype"] != "auto" and engine_options["kv_scales"] == "auto":
        cli.ERR.print("The KV cache is calibrated first; --kv-scales with a file of `hf-paged calibrate` saves this.")
    return LLM(cli.existing(model), dtype=dtype.value, device=cli.usable(device), **engine_options)


def own_sampling(model: Any, *, sample: bool) -> dict[str, Any]:
    """How the model's makers sample it, by its `generation_config`; greedily where that says nothing, or plainly if the
    user wants to `sample`.
    """
    config = getattr(model, "generation_config", None)
    if not getattr(config, "do_sample", False):
        return {"temperature": 1.0 if sample else 0.0}
    names = ("temperature", "top_p", "top_k", "min_p")
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def read_prompts(arguments: list[str], file: Path | None) -> Iterator[str | Conversation]:
    """Prompts of the command line and the file, else of standard input unless that is a terminal.

    Raises:
        ValueError: a line of a .jsonl file is not a prompt; the message names the line. Or bytes that are no text.
    """
    for argument in arguments:
        yield _checked_text(argument)
    if file is not None:
        with file.open(encoding="utf-8-sig") as lines:  # with or without a byte order mark
            try:
                yield from _parse_jsonl(lines, file.name) if file.suffix == ".jsonl" else _parse_text(lines)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file.name} is no UTF-8 text: {error}") from error
    elif not arguments and not sys.stdin.isatty():
        try:
            yield from map(_checked_text, _parse_text(sys.stdin))
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is no UTF-8 text: {error}") from error


def _checked_text(prompt: str) -> str:
    """Bytes that are no UTF-8 come as halves of surrogates, which no tokenizer takes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {prompt!a:.80} is no UTF-8 text") from error
    return prompt


def _parse_text(lines: Iterable[str]) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in lines if line.strip())


def _parse_jsonl(lines: Iterable[str], name: str) -> Iterator[str | Conversation]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: not JSON ({error})") from error
        if isinstance(value, dict) and len(value) == 1:
            value = value.get("prompt", value.get("messages"))
        if isinstance(value, str) or _is_conversation(value):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name}, line {number}: half a surrogate pair is no text ({error.reason})") from error
            yield value
        else:
            raise ValueError(
                f'{name}, line {number}: allowed are a string, {{"prompt": "..."}} and {{"messages": [{{"role": "...", '
                f'"content": "..."}}, ...]}}'
            )


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and turn.keys() == {"role", "content"} for turn in value)
    )


def render(llm: LLM, prompts: list[str | Conversation], *, raw: bool, system: str | None) -> list[Any]:
    """Apply the chat template to every prompt, or to none.

    Raises:
        ValueError: messages or a system text for a tokenizer without a chat template, or with --raw.
    """
    chat = not raw and getattr(llm.tokenizer, "chat_template", None) is not None
    if not chat:
        if system is not None or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("messages and --system need a tokenizer with a chat template, and no --raw")
        return list(prompts)
    first: Conversation = [] if system is None else [{"role": "system", "content": system}]
    return llm.render_chat([first + (_turns(prompt)) for prompt in prompts])


def _turns(prompt: str | Conversation) -> Conversation:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> bool:
    """Write one text as it grows; says whether it failed."""
    shown = 0
    failed = False
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        failed = _report_error(output)
    sys.stdout.write("\n")
    return failed


def _write(index: int, output: RequestOutput, *, json_output: bool) -> bool:
    """Write one finished output; says whether it failed."""
    if json_output:
        record = {
            "index": index,
            "prompt": output.prompt,
            "prompt_tokens": len(output.prompt_token_ids),
            "outputs": [
                {
                    "text": completion.text,
                    "tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                for completion in output.outputs
            ],
            "error": output.error,
        }
        escaped = not (sys.stdout.encoding or "").lower().startswith("utf")  # a pipe of another encoding takes it so
        print(json.dumps(record, ensure_ascii=escaped))
    else:
        for completion in output.outputs:
            print(f"[{index}] {completion.text.strip()}\n")
    return _report_error(output)


def _report_error(output: RequestOutput) -> bool:
    if output.error is not None:
        cli.ERR.print(f"error: {output.error}", style="red", markup=False, highlight=False)
    return output.error is not None
