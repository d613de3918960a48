"""`LLM`: offline generation over a list of prompts, or one streamed."""

from __future__ import annotations

import itertools
import logging
import os
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_paged.config import EngineConfig, refuse
from hf_paged.engine import Engine
from hf_paged.model_view import ModelFingerprint
from hf_paged.outputs import CompletionOutput, RequestOutput
from hf_paged.quant.sidecar import check_label
from hf_paged.request import FinishReason
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Job:
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    error: str | None = None  # why it can never run


class LLM:
    """A model behind a paged, quantized KV cache with continuous batching.

    Calls of several threads are served one after the other; while a stream is open, other calls raise RuntimeError, on
    other threads too. Weights may be written in place between calls; cached prefixes are forgotten then. Writes
    through `.data` show only in bf16 weights on a CPU: after them, call `llm.engine.scheduler.reset_prefix_cache()`.
    Weights may move between calls, too (`model.to`, `parameter.data = x`). While a call runs or a stream is open they
    must not: captured steps and kernels with tensor maps read the old memory, freed or not, until the next call.

    Args:
        model: a folder or hub name, loaded with `AutoModelForCausalLM` (16-bit, AWQ, GPTQ, FP8, ...), or a loaded
            model, which is put into eval mode.
        tokenizer: a tokenizer, its folder or hub name; None = the model's own folder, or none for a loaded model.
        dtype: of the weights when `model` is a name; "auto" = as stored.
        device: where to load; None = the first CUDA device, else the CPU.
        engine_options: fields of `EngineConfig`, e.g. `kv_cache_dtype="int8"`.

    Raises:
        ValueError: an unknown option or impossible value, or a model that cannot be paged; nothing was loaded before
            the options were checked.
        OSError: there is no such model or tokenizer.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.parse(engine_options)
        if isinstance(model, str | os.PathLike):
            _check_folder("model", model)
            check_label(Path(model))
            if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
                refuse("dtype", dtype, '"auto", a dtype of torch or its name')
            tokenizer = tokenizer if tokenizer is not None else model
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            if str(device).startswith("cuda") and not torch.cuda.is_available():
                raise ValueError(f"device={device!r} is not allowed; allowed: 'cpu', PyTorch finds no CUDA device here")
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device)
        elif not isinstance(model, PreTrainedModel):
            refuse("model", model, "a model folder, a hub name or a loaded Transformers model")
        elif device is not None:
            raise ValueError(f"device={device!r} is for models loaded by name; this model is already on a device")
        if isinstance(tokenizer, str | os.PathLike):
            _check_folder("tokenizer", tokenizer)
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.model: PreTrainedModel = model.eval()
        self.tokenizer = tokenizer
        self._config = config
        self._ids = itertools.count()
        self._lock = threading.RLock()  # of the engine; reentrant, since a dropped stream may be closed anywhere
        self._start_engine()

    def _start_engine(self) -> None:
        vars(self).pop("engine", None)  # its blocks are free before the new ones are taken
        self.engine = Engine(self.model, self._config, tokenizer=self.tokenizer)
        self._fingerprint = ModelFingerprint(self.model)  # after fusion, which moves weights together

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched as memory allows.

        Args:
            prompts: texts, lists of token ids, or mappings with `prompt` or `prompt_token_ids`; one or many.
            sampling_params: for all prompts, or one per prompt; None = `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in order. A prompt that can never run (empty, ids out of range, too long) gives an
            output with `finish_reason == "error"` and the reason in `error`; the others are not affected.

        Raises:
            RuntimeError: a stream of this LLM is not finished.
            ValueError: a prompt of an unknown kind, or as many params as prompts were not given.
        """
        jobs = self._jobs(prompts, sampling_params)
        with self._lock:
            self._refresh()
            return self._run(jobs, use_tqdm)

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        names = [self._next_id() for _ in jobs]
        done: dict[str, RequestOutput] = {}
        try:
            for name, job in zip(names, jobs, strict=True):
                if (failed := self._add(name, job, stream=False)) is not None:
                    done[name] = failed
            with tqdm(total=len(jobs), initial=len(done), disable=not use_tqdm, desc="prompts") as bar:
                while self.engine.has_work:
                    for output in self.engine.step():
                        done[output.request_id] = output
                        bar.update()
        finally:
            for name in names:  # an interrupt leaves nothing running
                if name not in done:
                    self.engine.abort(name)
        return [done[name] for name in names]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield its output so far whenever it grew; the last one is finished.

        Raises:
            RuntimeError: another stream of this LLM is not finished.
        """
        (job,) = self._jobs([prompt], sampling_params)
        name = self._next_id()
        with self._lock:
            self._refresh()
            failed = self._add(name, job, stream=True)
        if failed is not None:
            yield failed
            return
        try:
            while True:
                with self._lock:
                    if not self.engine.has_work:  # somebody aborted the request
                        return
                    outputs = self.engine.step()
                yield from outputs
                if outputs and outputs[-1].finished:
                    return
        finally:
            with self._lock:
                self.engine.abort(name)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one conversation or many, each a list of `{"role": ..., "content": ...}`.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses a conversation.
        """
        return self.generate(self.render_chat(messages), sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, messages: Sequence[Any]) -> list[Prompt]:
        """The prompts that a chat template makes of one conversation or many."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template; use generate() with plain prompts")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return [{"prompt": self._render(i, conversation), "chat": True} for i, conversation in enumerate(conversations)]

    def _render(self, index: int, conversation: Any) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program and fails as it likes
            shown = textwrap.shorten(str(conversation), 200, placeholder=" ...")
            raise ValueError(f"the chat template refuses conversation {index}: {error}: {shown}") from error

    def _jobs(self, prompts: Any, sampling_params: Any) -> list[_Job]:
        if isinstance(prompts, torch.Tensor | np.ndarray):
            prompts = prompts.tolist()
        if not isinstance(prompts, Mapping | Sequence):
            raise ValueError(f"prompts are one prompt or a list of them, not {type(prompts).__name__}")
        if isinstance(prompts, str | bytes | bytearray | Mapping) or (prompts and _is_id(prompts[0])):
            prompts = [prompts]
        params = sampling_params if sampling_params is not None else SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"sampling_params={params!r} is not allowed; allowed: a SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one per prompt")
        return [_Job(**self._tokens_of(p), params=s) for p, s in zip(prompts, params, strict=True)]

    def _tokens_of(self, prompt: Any) -> dict[str, Any]:
        """`prompt` and `prompt_token_ids` of one prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids", "chat"}:
                raise ValueError(f"unknown prompt key {sorted(unknown)}; allowed: prompt, prompt_token_ids")
            if "prompt_token_ids" in prompt:
                return {"prompt": prompt.get("prompt"), "prompt_token_ids": _token_ids(prompt["prompt_token_ids"])}
            if not isinstance(prompt.get("prompt"), str):
                raise ValueError("a prompt mapping holds a text as `prompt`, or token ids as `prompt_token_ids`")
            return self._encoded(prompt["prompt"], special=not prompt.get("chat", False))
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        return {"prompt": None, "prompt_token_ids": _token_ids(prompt)}

    def _encoded(self, text: str, *, special: bool) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this LLM has none; give token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # what JSON's escapes can make; no tokenizer takes it
            return {"prompt": text, "prompt_token_ids": [], "error": f"the prompt is no Unicode text: {error}"}
        # not verbose: the engine says what is too long
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return {"prompt": text, "prompt_token_ids": ids}

    def _add(self, name: str, job: _Job, *, stream: bool) -> RequestOutput | None:
        """Give a job to the engine; a job that can never run gives its error output."""
        try:
            if job.error is not None:
                raise ValueError(job.error)
            self.engine.add_request(name, job.prompt_token_ids, job.params, prompt=job.prompt, stream=stream)
        except ValueError as error:
            return RequestOutput(
                request_id=name,
                prompt=job.prompt,
                prompt_token_ids=job.prompt_token_ids,
                outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason=FinishReason.ERROR.value)],
                finished=True,
                error=str(error),
            )
        return None

    def _refresh(self) -> None:
        """Follow a model that was changed since the engine was made: cached keys of old weights must not be found.

        Raises:
            RuntimeError: a stream is not finished. Its outputs would come out of this call's steps, and be lost.
        """
        engine = getattr(self, "engine", None)  # none after a rebuild that failed
        if engine is not None and engine.scheduler.has_work:
            raise RuntimeError("a stream of this LLM is not finished; exhaust it, or close() it")
        now = ModelFingerprint(self.model)
        if engine is None or now.structure != self._fingerprint.structure:
            logger.info("the model changed; its engine is rebuilt")
            self._start_engine()
        elif now.versions != self._fingerprint.versions:
            self.engine.scheduler.reset_prefix_cache()
            self._fingerprint = now
        self.engine.follow_weights()

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"


def _check_folder(name: str, value: str | os.PathLike[str]) -> None:
    """Transformers takes what is no folder for a hub name, and complains of the letters in it."""
    path = os.fspath(value)
    if not os.path.isdir(path) and (not path or path.startswith(("/", ".", "~")) or os.path.exists(path)):
        raise OSError(f"{name}={path!r}: there is no such folder")


def _token_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, torch.Tensor | np.ndarray) else prompt
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence) or not all(map(_is_id, ids)):
        raise ValueError(f"a prompt is a text, a list of token ids or a mapping, not {prompt!r:.80}")
    return [int(i) for i in ids]


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers, too
