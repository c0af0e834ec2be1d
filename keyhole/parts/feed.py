"""Feeds: what each token does on its own, between two mixings."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from keyhole.core.errors import InputError
from keyhole.parts.contract import Linear


class _Feed(nn.Module):
    """Up to a wider layer, through a nonlinearity, and back."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = Linear(width, hidden, role="in", bias=bias)
        self.down = Linear(hidden, width, role="out", bias=bias)

    def flops(self, tokens: int) -> int:
        """The matrix products; element-wise work is not counted."""
        return sum(child.flops(tokens) for child in self.children() if isinstance(child, Linear))


class Gelu(_Feed):
    """W2 gelu(W1 x). `approximate` is "none" (exact) or "tanh" (GPT-2's)."""

    def __init__(
        self, width: int, ratio: float = 4.0, bias: bool = False, approximate: Literal["none", "tanh"] = "none"
    ) -> None:
        super().__init__(width, round(ratio * width), bias=bias)
        if approximate not in ("none", "tanh"):
            raise InputError(f'gelu approximate = {approximate!r} is not valid; it may be "none" or "tanh"')
        self.approximate = approximate

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """Feed each token."""
        return self.down(nn.functional.gelu(self.up(x_BTW), approximate=self.approximate))


class ReluSquared(_Feed):
    """W2 max(W1 x, 0)^2 (So et al. 2021)."""

    def __init__(self, width: int, ratio: float = 4.0, bias: bool = False) -> None:
        super().__init__(width, round(ratio * width), bias=bias)

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """Feed each token."""
        return self.down.finish(_SquaredReluThenLinear.apply(self.up(x_BTW), self.down.weight))


class Swiglu(_Feed):
    """W2 (silu(W1 x) * W3 x) (Shazeer 2020). The hidden width is ratio * width, rounded up to a multiple of 8."""

    def __init__(self, width: int, ratio: float = 8 / 3, bias: bool = False) -> None:
        hidden = -8 * (-round(ratio * width) // 8)
        super().__init__(width, hidden, bias=bias)
        self.gate = Linear(width, hidden, role="in", bias=bias)

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """Feed each token."""
        return self.down(nn.functional.silu(self.up(x_BTW)) * self.gate(x_BTW))


class _SquaredReluThenLinear(torch.autograd.Function):
    """a^2 W^T with a = max(h, 0); dW = g^T a^2, dh = 2 a (g W).

    Keeps a alone and squares it again on the way back, where autograd's own form keeps h, a and a^2: a tenth of what a
    whole training step holds.
    """

    @staticmethod
    def forward(ctx, h, weight):
        a = torch.relu(h)
        ctx.save_for_backward(a, weight)
        return nn.functional.linear(a * a, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, weight = ctx.saved_tensors
        d_weight = grad.flatten(0, -2).mT @ (a * a).flatten(0, -2)
        return torch.mul(a, grad @ weight).mul_(2), d_weight
