"""Capture steps as graphs and replay them: no Python and no launch cost per layer.

A graph is captured for a `StepBucket` the first time one is needed, or all of them when asked: a padded number of
decodes, a padded number of prompt tokens (0 in a step of decodes alone) and a bound on sequence length. Its inputs live
at a fixed address in the same packing that every step uses. Padding decodes have length 0, padding tokens are written
nowhere and attend to nothing. Sequence lengths, tables and slots are read from that buffer at replay, so a graph never
goes stale as sequences grow. The bound only sizes the launch: how many ways attention is split.

On a CPU, steps of decodes are captured where our kernels run them (`kernels/cpu_graph.py`). Prompts keep it busy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.config import EngineConfig
from hf_paged.kernels.cpu_graph import CpuGraph
from hf_paged.kernels.layer_chain import MAX_CHAIN_ROWS
from hf_paged.kernels.turn import turn
from hf_paged.model_inputs import InputBuilder, ModelInputs, StepPacking, StepShape, StepSizes
from hf_paged.request import ScheduledRequest

logger = logging.getLogger(__name__)

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_CPU_BATCH_SIZES = (1, 4, 8, 16, 32, 48, 64, 80)  # as rows fill registers; larger products run on other kernels
# Beside prompt tokens a few more decodes cost nothing, so there are fewer sizes to capture.
_DECODES_BESIDE_PROMPTS = (0, 8, 32, 64, 128, 192, 256)
# A step of more prompt tokens keeps the device busy for longer than its launch takes.
_PROMPT_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_MAX_PROMPTS = 16  # sequences with more than one token in a captured step; room for one costs nothing
_SMALLEST_LENGTH = 1024  # length bounds grow from here by factors of 4


class StepBucket(NamedTuple):
    """The padded size of a captured step: single-token sequences first, then `_MAX_PROMPTS` with the prompt tokens."""

    num_decodes: int
    num_prompt_tokens: int
    max_seq_len: int

    @classmethod
    def of(cls, sizes: StepSizes, *, max_num_seqs: int, max_model_len: int) -> StepBucket | None:
        """The smallest bucket that holds a step; None when it is too large for any."""
        prompts, prompt_tokens = sizes.num_seqs - sizes.num_decodes, sizes.num_tokens - sizes.num_decodes
        if prompts > _MAX_PROMPTS or prompt_tokens > _PROMPT_TOKENS[-1]:
            return None
        return cls._padded(sizes.num_decodes, prompt_tokens, sizes.max_seq_len, max_num_seqs, max_model_len)

    @classmethod
    def on_cpu(cls, sizes: StepSizes, *, max_num_seqs: int, max_model_len: int) -> StepBucket | None:
        """The smallest bucket of a CPU that holds a step; None for a large one, and for prompts."""
        padded = next((size for size in _CPU_BATCH_SIZES if size >= sizes.num_seqs), None)
        if padded is None or sizes.num_tokens > sizes.num_decodes:
            return None
        bucket = cls.of(sizes, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        return None if bucket is None else bucket._replace(num_decodes=min(padded, max_num_seqs))

    @classmethod
    def _padded(
        cls, decodes: int, prompt_tokens: int, longest: int, max_num_seqs: int, max_model_len: int
    ) -> StepBucket:
        sizes = _DECODES_BESIDE_PROMPTS if prompt_tokens else _BATCH_SIZES
        padded = next((size for size in sizes if size >= decodes), -(-decodes // 64) * 64)
        bound = _SMALLEST_LENGTH
        while bound < longest:
            bound *= 4
        return cls(
            num_decodes=min(padded, max_num_seqs),
            num_prompt_tokens=next(size for size in (0, *_PROMPT_TOKENS) if size >= prompt_tokens),
            max_seq_len=min(bound, max_model_len),
        )

    @classmethod
    def all(cls, *, max_num_seqs: int, max_model_len: int) -> set[StepBucket]:
        """Every bucket that a step of up to so many sequences of up to so many tokens can get."""
        lengths = [_SMALLEST_LENGTH]
        while lengths[-1] < max_model_len:
            lengths.append(lengths[-1] * 4)
        return {
            cls._padded(decodes, prompt_tokens, length, max_num_seqs, max_model_len)
            for length in lengths
            for decodes in range(max_num_seqs + 1)
            for prompt_tokens in (0, *_PROMPT_TOKENS)
            if decodes or prompt_tokens
        }

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    @property
    def num_prompts(self) -> int:
        return _MAX_PROMPTS if self.num_prompt_tokens else 0

    def packing(self, block_size: int, num_groups: int, keeps_recent: bool = False) -> StepPacking:
        num_seqs = self.num_decodes + self.num_prompts
        return StepPacking(
            StepShape(
                num_tokens=self.num_tokens,
                num_decodes=self.num_decodes,
                num_seqs=num_seqs,
                num_logits=num_seqs,
                num_groups=num_groups,
                table_width=math.ceil(self.max_seq_len / block_size),
                keeps_recent=keeps_recent,
            )
        )


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What a step leaves on the device, a row for every token whose logits are wanted."""

    logits: Tensor  # [num_logits, vocab]
    greedy: Tensor | None  # [num_logits] int64, the likeliest tokens, where the step looked for them
    rows: Tensor  # [num_logits] int64
    next_positions: Tensor  # [num_logits] int64

    @classmethod
    def of(cls, inputs: ModelInputs, logits: Tensor, greedy: Tensor | None = None) -> StepTensors:
        return cls(logits=logits, greedy=greedy, rows=inputs.logits_rows, next_positions=inputs.next_positions)

    def first(self, n: int) -> StepTensors:
        """Those of the first `n` rows, without padding."""
        if n == len(self.rows):
            return self
        greedy = None if self.greedy is None else self.greedy[:n]
        return StepTensors(
            logits=self.logits[:n], greedy=greedy, rows=self.rows[:n], next_positions=self.next_positions[:n]
        )


class GraphMemory:
    """Memory of the captured steps of an engine: they share it, since one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """`torch.cuda.graph`, which does not leave a capture that became invalid, as that cannot be ended: it stays on
        its stream, and raises that in place of the error which says why."""
        cause: BaseException | None = None
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=_capture_stream(self._device)):
                    try:
                        yield
                    except BaseException as error:
                        cause = error
                        raise
            except RuntimeError as error:
                if error is not cause:
                    self._abandon()
                raise
            finally:
                if cause is not None:
                    raise cause

    def _abandon(self) -> None:
        """Take the next pool, and end the capture where torch does not (2.11). Else its allocator could not empty its
        cache, nor its random generator draw; the latter is freed by another capture that ends."""
        index, pool = torch.cuda.current_device(), self._pool
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):  # of torch that did it
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_capture_stream(self._device)):
                torch.zeros(1, device=self._device)


class CapturedStep:
    """One step of a bucket, replayable.

    Raises:
        RuntimeError: the model did something that cannot be captured.
    """

    def __init__(
        self,
        run: Callable[[ModelInputs], StepTensors],
        builder: InputBuilder,
        bucket: StepBucket,
        *,
        block_size: int,
        device: torch.device,
        memory: GraphMemory | None,
    ) -> None:
        self._builder = builder
        self._packing = bucket.packing(block_size, builder.num_groups, builder.keeps_recent)
        self._buffer = torch.zeros(self._packing.num_bytes, dtype=torch.uint8, device=device)
        parts = self._packing.on_device(self._buffer)
        for name in ("slot_mapping", "recent_mapping"):
            if name in parts:
                parts[name].fill_(-1)
        decodes = bucket.num_decodes
        parts["cu_seqlens_q"].fill_(decodes)
        parts["cu_seqlens_q"][: decodes + 1].copy_(torch.arange(decodes + 1))
        parts["logits_rows"].fill_(builder.no_row)
        self._inputs = ModelInputs.from_parts(
            parts,
            num_decodes=decodes,
            max_seqlen_q=max(bucket.num_prompt_tokens, 1),
            max_seq_len=bucket.max_seq_len,
        )
        self._graph: torch.cuda.CUDAGraph | CpuGraph
        # so small a step may have kernels whose programs wait for each other
        self._takes_turn = memory is not None and bucket.num_tokens <= MAX_CHAIN_ROWS
        self._device = device
        # Compiles kernels and fills caches, which a capture must not do. On the current stream: every stream that ever
        # multiplied keeps a 32 MiB cuBLAS workspace.
        run(self._inputs)
        if memory is None:
            self._graph = CpuGraph()
            with self._graph.capture():
                self._tensors = run(self._inputs)
            return
        self._graph = torch.cuda.CUDAGraph()
        with memory.capture(self._graph):
            self._tensors = run(self._inputs)

    def replay(self, scheduled: Sequence[ScheduledRequest], sizes: StepSizes, index: np.ndarray) -> StepTensors:
        """Run the step on `scheduled`; its tensors are valid until the next replay of any that shares its memory."""
        self._builder.build(scheduled, sizes, index, self._packing, self._buffer)
        with turn(self._device) if self._takes_turn else nullcontext():
            self._graph.replay()
        return self._tensors


class StepGraphs:
    """Captured steps by bucket.

    With `cuda_graphs="auto"` a model that cannot be captured runs without graphs and the reason is logged once; with
    `cuda_graphs=True` the error is raised.
    """

    def __init__(
        self, builder: InputBuilder, config: EngineConfig, *, max_model_len: int, device: torch.device
    ) -> None:
        self._builder = builder
        self._config = config
        self._max_model_len = max_model_len
        self._device = device
        self._steps: dict[StepBucket, CapturedStep] = {}
        self._memory = GraphMemory(device) if device.type == "cuda" else None
        self._broken: set[str] = set()
        self._too_large: set[StepBucket] = set()
        self.num_captured = 0

    def get(self, sizes: StepSizes, run: Callable[[ModelInputs], StepTensors]) -> CapturedStep | None:
        """The captured step for these sizes; None where they are too large, or the model cannot be captured.

        `run` is the forward to capture. It is not kept: through a cycle with the runner, the pages of a dropped engine
        would stay until the next garbage collection.
        """
        bucket_of = StepBucket.on_cpu if self._device.type == "cpu" else StepBucket.of
        bucket = bucket_of(sizes, max_num_seqs=self._config.max_num_seqs, max_model_len=self._max_model_len)
        if bucket is None or bucket in self._too_large or _kind(bucket) in self._broken:
            return None
        return self._steps.get(bucket) or self._capture(bucket, run)

    def capture_all(self, run: Callable[[ModelInputs], StepTensors]) -> None:
        """Capture what is not captured yet, large steps first: their memory serves the small ones.

        Nothing on a CPU, where a capture takes as long as a step.
        """
        if self._device.type == "cpu":
            return
        buckets = StepBucket.all(max_num_seqs=self._config.max_num_seqs, max_model_len=self._max_model_len)
        for bucket in sorted(buckets - self._steps.keys(), key=lambda bucket: -bucket.num_tokens):
            if _kind(bucket) not in self._broken:
                self._capture(bucket, run)

    def forget(self) -> None:
        """Drop what was captured: it reads memory that is not in use any more."""
        self._steps.clear()

    def _capture(self, bucket: StepBucket, run: Callable[[ModelInputs], StepTensors]) -> CapturedStep | None:
        try:
            step = CapturedStep(
                run, self._builder, bucket, block_size=self._config.block_size, device=self._device, memory=self._memory
            )
        except RuntimeError as error:
            if self._config.cuda_graphs is True:
                raise
            if isinstance(error, torch.OutOfMemoryError):  # says nothing about the model
                logger.warning("no memory to capture %s; such steps run without a graph", bucket)
                self._too_large.add(bucket)
                return None
            level = logging.WARNING if self._device.type == "cuda" else logging.INFO
            logger.log(level, "%s run without graphs: this model cannot be captured (%s)", _kind(bucket), error)
            self._broken.add(_kind(bucket))
            return None
        self._steps[bucket] = step
        self.num_captured += 1
        return step


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device, as torch does without it but for one device a process: that of the first capture."""
    return torch.cuda.Stream(device)


def _kind(bucket: StepBucket) -> str:
    return "steps with prompts" if bucket.num_prompt_tokens else "decodes"
