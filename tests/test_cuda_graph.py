"""Steps padded to the bucket of a captured graph: the inputs that a replay reads, run without a graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_engine import llm, tiny_llama, tiny_mistral
from transformers import PreTrainedModel

from hf_paged import cuda_graph
from hf_paged.cuda_graph import CapturedStep, GraphMemory, StepBucket, StepGraphs, StepTensors
from hf_paged.model_inputs import ModelInputs, StepSizes
from hf_paged.request import Request, ScheduledRequest
from hf_paged.sampling_params import SamplingParams

LIMITS = {"max_num_seqs": 48, "max_model_len": 3000}


def planned(*lengths: int) -> StepSizes:
    requests = (Request(str(i), list(range(1, 200)), SamplingParams()) for i in range(len(lengths)))
    return StepSizes.of(
        [
            ScheduledRequest(request, length, 100 if length == 1 else 0, True)
            for request, length in zip(requests, lengths, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        ([1, 1, 1], (4, 0, 1024)),
        ([1] * 45, (48, 0, 1024)),
        ([1, 1, 30], (8, 32, 1024)),
        ([1] * 40 + [500, 12], (48, 512, 1024)),
        ([90], (0, 96, 1024)),
        ([1800], (0, 2048, 3000)),
    ],
)
def test_a_step_gets_the_smallest_bucket_that_holds_it(lengths: list[int], bucket: tuple[int, int, int]) -> None:
    found = StepBucket.of(planned(*lengths), **LIMITS)
    assert found is not None
    assert (found.num_decodes, found.num_prompt_tokens, found.max_seq_len) == bucket


def test_all_buckets_are_those_that_steps_get_and_no_more() -> None:
    """A step whose bucket is missed would be captured while a request waits for it."""
    found = StepBucket.all(**LIMITS)
    lengths = [[1] * decodes + prompts for decodes in range(49) for prompts in ([], [2], [40], [900, 900])]
    assert {StepBucket.of(planned(*step), **LIMITS) for step in lengths if step} <= found
    assert len(found) == (7 + 4 * 16) * 2  # batch sizes, decodes beside prompts x prompt tokens, length bounds


@pytest.mark.parametrize("lengths", [[2049], [1, 1500, 700], [2] * 17])
def test_a_step_that_keeps_the_device_busy_by_itself_is_not_captured(lengths: list[int]) -> None:
    assert StepBucket.of(planned(*lengths), **LIMITS) is None


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_llama, {}),
        (tiny_mistral, {}),
        (tiny_llama, {"kv_cache_dtype": "int4", "kv_recent_block": True, "kv_scales": "off"}),
    ],
    ids=["llama", "window", "recent blocks"],
)
def test_padding_changes_no_logits_and_writes_nowhere(make: type[PreTrainedModel], options: dict[str, object]) -> None:
    """Two decodes and two prompts beside six decodes, fourteen sequences and many tokens that are only padding."""
    engine = llm(make(), num_blocks=40, max_num_seqs=8, max_model_len=64, **options).engine
    recent = [kept for layer in engine.kv_cache.layers.values() if (kept := layer.recent) is not None]
    slots = [*engine.kv_cache._slots, *(pages.tensor for kept in recent for pages in (kept.k, kept.v))]
    for slot in slots:
        slot.zero_()  # what nobody writes must compare
    for i, length in enumerate((9, 20)):
        engine.add_request(str(i), range(1, length + 1), SamplingParams(max_tokens=9, temperature=0.0))
    engine.step()
    for i, length in enumerate((7, 13)):
        engine.add_request(str(i + 2), range(2, length + 2), SamplingParams(max_tokens=9, temperature=0.0))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [item.num_scheduled_tokens for item in plan.scheduled] == [1, 1, 7, 13]
    runner, before = engine.runner, [slot.clone() for slot in slots]
    with torch.inference_mode():
        expected = runner.forward(plan)
        assert expected is not None
        after = [slot.clone() for slot in slots]
        for slot, old in zip(slots, before, strict=True):
            slot.copy_(old)
        sizes = StepSizes.of(plan.scheduled)
        bucket = StepBucket.of(sizes, max_num_seqs=8, max_model_len=64)
        assert bucket == StepBucket(num_decodes=8, num_prompt_tokens=32, max_seq_len=64)
        packing = bucket.packing(engine.config.block_size, runner.builder.num_groups, bool(recent))
        buffer = torch.full((packing.num_bytes,), 77, dtype=torch.uint8)
        index = torch.tensor([0, 1, 8, 21]).numpy()
        runner.builder.build(plan.scheduled, sizes, index, packing, buffer)
        inputs = ModelInputs.from_parts(packing.on_device(buffer), num_decodes=8, max_seqlen_q=32, max_seq_len=64)
        tensors = runner._run_captured(inputs)
    got = tensors.logits[:4]
    assert torch.equal(got.argmax(-1), expected.logits.argmax(-1))
    torch.testing.assert_close(got, expected.logits, rtol=1e-5, atol=1e-5)
    rows = [item.request.row for item in plan.scheduled]
    assert tensors.rows.tolist() == rows + [runner.builder.no_row] * 20
    assert tensors.next_positions[:4].tolist() == expected.positions.tolist()
    assert tensors.greedy is not None
    assert runner.last_token[rows].tolist() == tensors.greedy[:4].tolist() == got.argmax(-1).tolist()
    for slot, written in zip(slots, after, strict=True):
        if slot.dtype == torch.uint8 and recent:
            assert torch.equal(slot, written)  # codes
        else:
            assert torch.allclose(slot.view(torch.float32), written.view(torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_without_the_memory_for_its_capture_runs_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    """Memory that requests need is not owed to a graph; who asked for graphs by name is told."""

    def no_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("hf_paged.cuda_graph.CapturedStep", no_memory)
    engine = llm(tiny_llama(), max_num_seqs=8, max_model_len=64).engine
    config = replace(engine.config, cuda_graphs=True if strict else "auto")
    graphs = StepGraphs(engine.runner.builder, config, max_model_len=64, device=torch.device("cpu"))
    if strict:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.get(planned(1, 1), no_memory)  # type: ignore[arg-type]  # never called
        return
    for _ in range(2):
        assert graphs.get(planned(1, 1), no_memory) is None  # type: ignore[arg-type]  # never called
    assert caplog.text.count("no memory to capture") == 1


class Captures:
    """Stands for `torch.cuda` while steps are captured; tensors stay on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_invalid: bool = True) -> None:
        self.ends_invalid = ends_invalid  # as newer torch
        self.stream = "the caller's"
        self.begun: list[tuple[int | None, str]] = []
        self.underway: set[int | None] = set()  # as the allocator sees it, by pool
        self.is_valid = True
        pools = itertools.count(1)
        for name, stand_in in {
            "cuda.CUDAGraph": object,
            "cuda.current_device": lambda: 1,
            "cuda.current_stream": lambda device: self.stream,
            "cuda.device": nullcontext,
            "cuda.graph": self.graph,
            "cuda.graph_pool_handle": lambda: next(pools),
            "cuda.stream": self.on_stream,
            "_C._cuda_endAllocateToPool": self.end,
            "_C._cuda_releasePool": lambda index, pool: None,
            "zeros": lambda *args, device, zeros=torch.zeros, **options: zeros(*args, **options),
        }.items():
            monkeypatch.setattr(f"torch.{name}", stand_in)
        monkeypatch.setattr("hf_paged.cuda_graph._capture_stream", "stream of {}".format)

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph: object, pool: int | None = None, stream: str = "torch's own") -> Iterator[None]:
        """As torch: the end of an invalid capture raises before the stream is left."""
        assert not self.underway, "no cache can be emptied"
        self.begun.append((pool, stream))
        self.underway.add(pool)
        before, self.stream, self.is_valid = self.stream, stream, True
        try:
            yield
        finally:
            if self.is_valid or self.ends_invalid:
                self.underway.remove(pool)
            if not self.is_valid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.stream = before

    def end(self, index: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)


SECOND = torch.device("cuda:1")


def test_steps_are_captured_on_the_device_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own capture stream is one a process: a model on another device would run beside an empty graph."""
    runner, captures = llm(tiny_llama(), max_num_seqs=8, max_model_len=64).engine.runner, Captures(monkeypatch)
    entered: list[object] = []
    monkeypatch.setattr("torch.cuda.device", lambda device: entered.append(device) or nullcontext())
    bucket = StepBucket(num_decodes=8, num_prompt_tokens=0, max_seq_len=64)
    memory = GraphMemory(SECOND)
    with torch.inference_mode():
        CapturedStep(runner._run_captured, runner.builder, bucket, block_size=16, device=SECOND, memory=memory)
    assert entered == [SECOND] and captures.begun == [(1, f"stream of {SECOND}")]


@pytest.mark.parametrize("ends_invalid", [True, False], ids=["newer torch", "older torch"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("a wait"), "this model cannot be captured (a wait)"),
        (torch.OutOfMemoryError("4 GiB"), "no memory to capture"),
        (None, "this model cannot be captured (operation failed due to a previous error"),
    ],
    ids=str,
)
def test_an_invalid_capture_is_left_and_what_made_it_invalid_is_told(
    error: RuntimeError | None,
    told: str,
    ends_invalid: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else every later step runs on the stream of the capture, one without memory is taken for a broken model, and
    nothing in the process can be captured any more."""
    engine, captures = llm(tiny_llama(), max_num_seqs=8, max_model_len=64).engine, Captures(monkeypatch, ends_invalid)
    config = replace(engine.config, cuda_graphs="auto")
    graphs = StepGraphs(engine.runner.builder, config, max_model_len=64, device=SECOND)

    def run(inputs: ModelInputs) -> StepTensors:
        tensors = engine.runner._run_captured(inputs)
        if captures.underway and len(inputs.input_ids) > 8:
            captures.is_valid = False
            if error is not None:
                raise error
        return tensors

    with torch.inference_mode():
        assert graphs.get(planned(1, 30), run) is None
        assert captures.stream == "the caller's" and not captures.underway
        assert told in caplog.text
        assert graphs.get(planned(1, 1), run) is not None
    assert captures.begun[-1] == (2, f"stream of {SECOND}"), "the first may be taken for one that is captured into"
    assert len(captures.begun) == (2 if ends_invalid else 3), "the random generator leaves a capture with the next"


def test_a_capture_that_is_interrupted_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, memory = Captures(monkeypatch), GraphMemory(SECOND)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), memory.capture(torch.cuda.CUDAGraph()):
            raise KeyboardInterrupt
    assert captures.begun == [(1, f"stream of {SECOND}")] * 2 and captures.stream == "the caller's"


@pytest.mark.parametrize("takes_turn", [False, True])
def test_a_step_that_may_hold_a_chain_is_replayed_in_a_turn(takes_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on two streams would wait for each other's multiprocessors for ever."""
    seen: list[str] = []

    @contextmanager
    def turn(device: torch.device) -> Iterator[None]:
        seen.append("begins")
        yield
        seen.append("ends")

    monkeypatch.setattr(cuda_graph, "turn", turn)
    step = object.__new__(CapturedStep)
    vars(step).update(dict.fromkeys(("_packing", "_buffer", "_tensors", "_device")), _takes_turn=takes_turn)
    vars(step).update(
        _builder=SimpleNamespace(build=lambda *args: None),
        _graph=SimpleNamespace(replay=lambda: seen.append("replay")),
    )
    step.replay([], StepSizes(1, 1, 1, 1, 1), np.arange(1))
    assert seen == (["begins", "replay", "ends"] if takes_turn else ["replay"])
