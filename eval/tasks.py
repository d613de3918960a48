"""lm-eval's tasks through the pages: a model of the harness that is a pair of our engines.

Importing this module registers the model as "hf_paged" with lm-eval, so `simple_evaluate(model="hf_paged",
model_args="pretrained=PATH,kv_cache_dtype=int8", ...)` works too. Log-likelihoods come from `scoring.py`, texts from
`LLM`. Generation settings that we do not have are refused, not dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_paged.config import refuse
from hf_paged.eval.scoring import ScoringEngine, TokenScores, score_windows
from hf_paged.eval.texts import Window, context_of
from hf_paged.llm import LLM
from hf_paged.sampling_params import SamplingParams

MAX_LENGTH = 4096  # tokens, unless the model's context is shorter or the caller says otherwise
_NEW_TOKENS = 256  # lm-eval's own default
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@register_model("hf_paged")
class PagedLM(TemplateLM):
    """A model behind pages of one KV format.

    Args:
        pretrained: a folder or hub name, or a loaded model.
        tokenizer: for a loaded model; None = the one of the folder.
        dtype: of the weights when `pretrained` is a name.
        device: where to load; None = the first CUDA device, else the CPU.
        max_length: tokens of context and continuation together; a longer context loses its beginning.
        batch_size, max_batch_size: accepted as lm-eval passes them always, and refused unless they leave the choice
            to the engine (1, "auto" or None): its steps are batched by tokens.
        engine_options: fields of `EngineConfig`, e.g. `kv_cache_dtype="int8"`.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("None", "1", "auto") or max_batch_size is not None:
            refuse("batch_size", batch_size, '"auto": the engine batches by tokens')
        if isinstance(pretrained, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(pretrained)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            pretrained = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype, device_map=device)
        if tokenizer is None:
            raise ValueError("tokenizer=None is not allowed for a loaded model; allowed: its tokenizer")
        self.tokenizer = tokenizer
        self.max_length = max_length or min(context_of(pretrained.config) or MAX_LENGTH, MAX_LENGTH)
        self._model = pretrained.eval()
        self._device = pretrained.device
        self._options = engine_options
        # Contexts are short beside max_length: as many as the blocks of one long one hold run at a time.
        self._scorer = ScoringEngine(
            pretrained, max_tokens=self.max_length - 1, **{"max_num_seqs": 64, **engine_options}
        )
        self._llm: LLM | None = None  # made when a task generates: it takes the memory that is left

    @property
    def bytes_per_token(self) -> float:
        """Of KV cache."""
        return self._scorer.kv_cache.bytes_per_token

    @property
    def eot_token_id(self) -> int:
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:  # a chat template may have written the BOS already
            add_special_tokens = not (bos is not None and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for _, context, continuation in requests:
            if not 1 <= len(continuation) < self.max_length:
                refuse("continuation", f"{len(continuation)} tokens", f"1..{self.max_length - 1} tokens")
            ids = [*context, *continuation][-self.max_length :]
            windows.append(Window(token_ids=ids, num_context=len(ids) - len(continuation)))
        return [
            (float(score.logprobs.sum()), bool(score.is_top1.all())) for score in self._scores(windows, disable_tqdm)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append(Window(token_ids=[*context, *continuation], num_context=len(context)))
                owners.append(i)
        sums = [0.0] * len(requests)
        for owner, score in zip(owners, self._scores(windows, disable_tqdm), strict=True):
            sums[owner] += float(score.logprobs.sum())
        return sums

    def _scores(self, windows: Sequence[Window], disable_tqdm: bool) -> list[TokenScores]:
        total = sum(window.num_scored for window in windows)
        with tqdm(total=total, desc="tokens", disable=disable_tqdm) as bar:
            return score_windows(self._scorer, windows, bar.update)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        if self._llm is None:
            options = {"max_model_len": self.max_length, **self._options}
            self._llm = LLM(self._model, tokenizer=self.tokenizer, **options)
        prompts, params = [], []
        for request in requests:
            context, settings = request.args
            params.append(sampling_params_of(settings))
            room = self.max_length - (params[-1].max_tokens or 0)
            if room < 1:
                refuse("max_gen_toks", params[-1].max_tokens, f"less than {self.max_length}, max_length")
            prompts.append(self.tok_encode(context)[-room:])
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a prompt could not be completed: {output.error}")
        return [output.outputs[0].text for output in outputs]


def sampling_params_of(settings: Mapping[str, Any]) -> SamplingParams:
    """lm-eval's generation settings as ours.

    Raises:
        ValueError: a setting that we do not have.
    """
    left = dict(settings)
    until = left.pop("until", None) or ()
    new_tokens = [left.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in left]
    sampling = {name: left.pop(name) for name in _SAMPLING if name in left}
    if not left.pop("do_sample", sampling.get("temperature", 0) > 0):
        sampling = {"temperature": 0.0}
    if left:
        allowed = ", ".join(("until", "do_sample", "max_gen_toks", *_SAMPLING))
        raise ValueError(f"unknown generation setting {', '.join(sorted(left))}; allowed: {allowed}")
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    return SamplingParams(stop=stop, max_tokens=new_tokens[0] if new_tokens else _NEW_TOKENS, **sampling)
