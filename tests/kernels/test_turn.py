"""Kernels whose programs wait for each other take turns."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.turn import turn

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_a_turn_on_another_stream_begins_when_the_one_before_it_has_ended() -> None:
    """Side by side two kernels that need every multiprocessor would wait for each other's places for ever."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    matrix, done = torch.randn(4096, 4096, device=DEVICE), torch.zeros(1, device=DEVICE)
    out = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize()
    with torch.cuda.stream(first), turn(DEVICE):
        for _ in range(20):
            torch.mm(matrix, matrix, out=out)
        done.fill_(1)
    with torch.cuda.stream(second), turn(DEVICE):
        seen = done.clone()
    with torch.cuda.stream(first), turn(DEVICE):
        done.fill_(2)
    torch.cuda.synchronize()
    assert seen.item() == 1


def test_what_was_launched_in_a_turn_that_failed_is_waited_for() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    matrix, done = torch.randn(4096, 4096, device=DEVICE), torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()

    def launch_and_fail() -> None:
        with torch.cuda.stream(first), turn(DEVICE):
            for _ in range(20):
                torch.mm(matrix, matrix)
            done.fill_(1)
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        launch_and_fail()
    with torch.cuda.stream(second), turn(DEVICE):
        seen = done.clone()
    torch.cuda.synchronize()
    assert seen.item() == 1
