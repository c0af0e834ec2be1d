"""Positions: how a model knows which token came first.

Legend: B rows, T tokens, W width, H heads, D head width. `start` is the position of the first of the T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.parts.contract import parameter


class Learned(nn.Module):
    """A trained vector for each position, added to the embedding: x_t + p_t."""

    def __init__(self, width: int, block: int) -> None:
        super().__init__()
        self.weight = parameter(block, width, role="position")

    def add(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:
        """Add the vectors of positions start .. start+T-1."""
        return x_BTW + self.weight[start : start + x_BTW.shape[1]]


class Sinusoidal(nn.Module):
    """PE[t, 2m] = sin(t / base^(2m/W)), PE[t, 2m+1] = cos of the same angle, added to the embedding (Vaswani 2017)."""

    table_TW: torch.Tensor

    def __init__(self, width: int, block: int, base: float = 10000.0) -> None:
        super().__init__()
        angle = angles(block, width, base)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]
        self.register_buffer("table_TW", table.float(), persistent=False)

    def add(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:
        """Add the waves of positions start .. start+T-1."""
        return x_BTW + self.table_TW[start : start + x_BTW.shape[1]].to(x_BTW.dtype)


class Rope(nn.Module):
    """Turn pairs of query and key channels by an angle that grows with the position (Su et al. 2021).

    Channel pair i turns by t theta_i, theta_i = base^(-2i/D); the score q.k then depends on the distance alone.
    `pairs` says which channels form a pair: "halves" (i, i + D/2) or "interleaved" (2i, 2i + 1).
    The angles are computed in float64: half precision is off by .84 at position 30,000.
    """

    cos_TD: torch.Tensor
    sin_TD: torch.Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,
        base: float = 10000.0,
        pairs: Literal["halves", "interleaved"] = "halves",
    ) -> None:
        super().__init__()
        channels = width // heads
        if channels % 2:
            raise InputError(f"rope turns pairs of channels, but a head of width {channels} is odd; use width / heads even")
        if pairs not in ("halves", "interleaved"):
            raise InputError(f'rope pairs = {pairs!r} is not valid; it may be "halves" or "interleaved"')
        self.pairs = pairs
        angle = angles(block, channels, base)
        cos, sin = angle.cos(), angle.sin()
        if pairs == "halves":
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        else:
            cos = cos.repeat_interleave(2, -1)
            sin = torch.stack((-sin, sin), -1).flatten(1)
        self.register_buffer("cos_TD", cos.float(), persistent=False)
        self.register_buffer("sin_TD", sin.float(), persistent=False)

    def turn(self, x_BHTD: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate queries or keys at positions start .. start+T-1."""
        stop = start + x_BHTD.shape[-2]
        cos, sin = (table[start:stop].to(x_BHTD.dtype) for table in (self.cos_TD, self.sin_TD))
        return _Rotate.apply(x_BHTD, cos, sin, self.pairs)


class _Rotate(torch.autograd.Function):
    """x cos + partner(x) sin, where partner swaps the two channels of each pair. The gradient is the same turn backwards.

    Autograd's own form of this keeps four tensors and runs nine passes; this keeps none of x and runs three.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, pairs):
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return torch.addcmul(x * cos, _partner(x, pairs), sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, _partner(grad, ctx.pairs), sin, value=-1), None, None, None


def _partner(x: torch.Tensor, pairs: str) -> torch.Tensor:
    if pairs == "halves":
        return x.roll(x.shape[-1] // 2, -1)
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


class Alibi(nn.Module):
    """Subtract slope_h (t - s) from the score of query t and key s (Press et al. 2022); slopes 2^(-8 h / H), h = 1 .. H."""

    slope_H: torch.Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        slope = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        self.register_buffer("slope_H", slope.float(), persistent=False)

    def bias(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """What is added to the scores (H, Tq, Tk) of queries and keys at the given positions."""
        distance = (queries[:, None] - keys[None, :]).to(self.slope_H.dtype)
        return -self.slope_H[:, None, None] * distance


class NoPosition(nn.Module):
    """No positions: only the causal mask tells the order."""

    def add(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:  # noqa: ARG002
        """Leave the embedding as it is."""
        return x_BTW


def angles(block: int, channels: int, base: float) -> torch.Tensor:
    """t * base^(-2m/channels) for t < block and m < channels/2, in float64."""
    frequency = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.arange(block, dtype=torch.float64)[:, None] * frequency
