"""An activation whose output is divided by scales of a file: AutoAWQ folds their inverse into the linear behind it.

It does so where no weight before the activation can take them: Falcon, MPT, GPT-J, GPT-NeoX, Bloom, StarCoder. Without
them the linear reads its input too large or too small, channel by channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledActivation(nn.Module):
    """`act(x) / scales`, the quotient in the dtype of `x`."""

    scales: Tensor

    def __init__(self, act: nn.Module, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.act = act
        self.scales = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(x)
        return activated / self.scales.to(activated.dtype)
