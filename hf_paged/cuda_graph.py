"""Capture decode steps as CUDA graphs and replay them: no Python and no launch cost per layer.

A graph is captured for a padded batch size and a bound on sequence length, the first time it is needed. Its inputs
live at a fixed address in the same packing that every step uses; padding rows have length 0, write nothing and attend
to nothing. Sequence lengths, tables and slots are read from that buffer at replay, so a graph never goes stale as
sequences grow. The bound only sizes the launch: how many ways attention is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_paged.config import EngineConfig
from hf_paged.model_inputs import InputBuilder, ModelInputs, StepPacking, StepShape
from hf_paged.request import ScheduledRequest

logger = logging.getLogger(__name__)

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SMALLEST_LENGTH = 1024  # length bounds grow from here by factors of 4


class CapturedStep:
    """One decode step of `batch_size` sequences, replayable.

    Raises:
        RuntimeError: the model did something that cannot be captured.
    """

    def __init__(
        self,
        run: Callable[[ModelInputs], Tensor],
        builder: InputBuilder,
        *,
        batch_size: int,
        max_seq_len: int,
        block_size: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        self._builder = builder
        self._packing = StepPacking(
            StepShape(
                num_tokens=batch_size,
                num_seqs=batch_size,
                num_logits=batch_size,
                num_groups=builder.num_groups,
                table_width=math.ceil(max_seq_len / block_size),
            )
        )
        self._buffer = torch.zeros(self._packing.num_bytes, dtype=torch.uint8, device=device)
        parts = self._packing.on_device(self._buffer)
        parts["slot_mapping"].fill_(-1)
        parts["cu_seqlens_q"].copy_(torch.arange(batch_size + 1))
        parts["logits_index"].copy_(torch.arange(batch_size))
        self._inputs = ModelInputs.from_parts(parts, num_decodes=batch_size, max_seqlen_q=1, max_seq_len=max_seq_len)
        # Compiles kernels and fills caches, which a capture must not do. On the current stream: every stream that ever
        # multiplied keeps a 32 MiB cuBLAS workspace.
        run(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = run(self._inputs)

    def replay(self, scheduled: Sequence[ScheduledRequest], index: np.ndarray) -> tuple[ModelInputs, Tensor]:
        """Run the step on `scheduled`; the logits are valid until the next replay of any graph of the same pool."""
        self._builder.build(scheduled, index, packing=self._packing, buffer=self._buffer)
        self._graph.replay()
        return self._inputs, self._logits


class DecodeGraphs:
    """Captured decode steps by (padded batch size, length bound), captured when first needed.

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
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._broken = False
        self.num_captured = 0

    def get(self, scheduled: Sequence[ScheduledRequest], run: Callable[[ModelInputs], Tensor]) -> CapturedStep | None:
        """The captured step for these single-token sequences; None when the model cannot be captured.

        `run` is the forward to capture. It is not kept: through a cycle with the runner, the pages of a dropped engine
        would stay until the next garbage collection.
        """
        if self._broken:
            return None
        batch_size = self._padded_batch(len(scheduled))
        bound = self._length_bound(max(item.start for item in scheduled) + 1)
        step = self._steps.get((batch_size, bound))
        if step is None:
            step = self._capture(batch_size, bound, run)
        return step

    def _capture(self, batch_size: int, bound: int, run: Callable[[ModelInputs], Tensor]) -> CapturedStep | None:
        try:
            step = CapturedStep(
                run,
                self._builder,
                batch_size=batch_size,
                max_seq_len=bound,
                block_size=self._config.block_size,
                device=self._device,
                pool=self._pool,
            )
        except torch.OutOfMemoryError:
            raise  # says nothing about the model
        except RuntimeError as error:
            if self._config.cuda_graphs is True:
                raise
            logger.warning("decode runs without CUDA graphs: this model cannot be captured (%s)", error)
            self._broken = True
            return None
        self._steps[batch_size, bound] = step
        self.num_captured += 1
        return step

    def _padded_batch(self, n: int) -> int:
        size = next((size for size in _BATCH_SIZES if size >= n), -(-n // 64) * 64)
        return min(size, self._config.max_num_seqs)

    def _length_bound(self, length: int) -> int:
        bound = _SMALLEST_LENGTH
        while bound < length:
            bound *= 4
        return min(bound, self._max_model_len)
