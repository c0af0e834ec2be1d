"""No mixing: y = 0, so that a block is its feed alone. What a model of single tokens can do, and no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import State, check_impl


class NoMixer(nn.Module):
    """Nothing is read from any other token; the block is its feed alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, width // heads

    def forward(self, x_BTW: torch.Tensor, mask_BT: Any = None, impl: Any = None) -> torch.Tensor:  # noqa: ARG002
        """Add nothing to the stream."""
        check_impl(impl)
        return torch.zeros_like(x_BTW)

    def begin(self, batch: int, like: torch.Tensor) -> State:  # noqa: ARG002
        """Nothing to remember."""
        return State(())

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Add nothing to the stream."""
        return torch.zeros_like(x_BTW), State((), state.length + x_BTW.shape[1])

    def look(self, x_BTW: torch.Tensor, mask_BT: Any = None) -> Look:  # noqa: ARG002
        """No weight anywhere, and heads that wrote nothing."""
        B, T, _ = x_BTW.shape
        return Look(x_BTW.new_zeros(B, self.heads, T, T), x_BTW.new_zeros(B, T, self.heads, self.channels))

    def cost(self, tokens: int) -> Cost:  # noqa: ARG002
        """Nothing."""
        return Cost(0, 0, 0)
