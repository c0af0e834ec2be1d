"""What every part must be true to, whatever its kind: each rule measures one number and compares it with its limit.

Where a part does not offer what a rule asks of it, the rule says what is missing, and is undecided.

Legend: B rows, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keyhole.testing.subject import Subject, inside

LIMIT = 1e-10
"""How far two forms of one function may differ in float64, relative to their size where that is above 1."""


@dataclass(frozen=True)
class Measured:
    """What a rule found: how wrong at worst, where, and what kept it from saying anything (if something did)."""

    worst: float
    where: str = ""
    missing: str = ""
    limit: float = LIMIT


@dataclass(frozen=True)
class Rule:
    """One thing that must be true, in words, how it is measured, and what to do where it is false."""

    name: str
    statement: str
    measure: Callable[[Subject], Measured]
    why: str
    remedy: str


class Worst:
    """The worst of many differences, and where it was."""

    def __init__(self) -> None:
        self.value, self.where = 0.0, ""

    def see(self, found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        """Compare two tensors; a NaN is as wrong as can be."""
        if found.shape != expected.shape:
            self.note(float("inf"), f"{where}: shape {tuple(found.shape)} for {tuple(expected.shape)}")
        elif found.numel():
            found, expected = found.detach(), expected.detach()
            size = max(1.0, float(expected.abs().max()))
            self.note(float((found - expected).abs().max()) / size, where)

    def note(self, value: float, where: str) -> None:
        """Take note of one number."""
        if not value <= self.value:  # NaN is not <= anything
            self.value, self.where = (float("inf") if value != value else value), where

    def measured(self, limit: float = LIMIT) -> Measured:
        """What a rule returns."""
        return Measured(self.value, self.where, limit=limit)


def summing_weights(value: torch.Tensor) -> torch.Tensor:
    """What a result is weighted by where one number is wanted of it."""
    return torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(7))


def gradients(value: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a weighted sum, zero where an input plays no part."""
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad((value * summing_weights(value)).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


@torch.no_grad()
def shapes(tested: Subject) -> Measured:
    """1 where a result has another shape or type than its input, or is not finite."""
    part, worst = tested.make(), Worst()
    for tokens in tested.lengths:
        for batch in (1, 3):
            x = tested.input(tokens, batch)
            y = inside(part)(x.clone())  # the guard around a user's part would mend its type
            kept = y.shape == x.shape and y.dtype == x.dtype and bool(y.isfinite().all())
            worst.note(float(not kept), f"batch {batch}, {tokens} tokens: {_what(y)} for {_what(x)}")
            given = tested.input(tokens, batch)
            part(given)
            worst.note(float(not torch.equal(given, x)), f"batch {batch}, {tokens} tokens: it changes its input")
    for scale in (0.0, 1e3):
        finite = bool(part(tested.input(9) * scale).isfinite().all())
        worst.note(float(not finite), f"inputs of size {scale:g}")
    return worst.measured(0.0)


def _what(x: torch.Tensor) -> str:
    finite = "" if bool(x.isfinite().all()) else " with NaN or infinity"
    return f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}{finite}"


@torch.no_grad()
def causal(tested: Subject) -> Measured:
    """How much earlier results move when later tokens change or are left out. Also that later ones do move."""
    part, worst = tested.make(), Worst()
    moved, written = 0.0, 0.0
    for tokens in tested.lengths:
        x, other = tested.input(tokens, 1), tested.input(tokens, 1, seed=5) * 3
        y = part(x)
        size = max(1.0, float(y.abs().max()))
        written = max(written, float(y.abs().max()))
        for place in _places(tokens):
            # One row at a time: a part whose rows see each other breaks another rule.
            after = part(torch.cat((x[:, :place], other[:, place:]), 1))
            moved = max(moved, float((after[:, place:] - y[:, place:]).abs().max()))
            if place:
                change = float((after[:, :place] - y[:, :place]).abs().max())
                worst.note(change / size, f"{tokens} tokens, those from {place} on changed")
        for place in sorted({1, tokens // 2, tokens - 1} - {0}):
            # What knows how long the whole text is changes nothing when later tokens change, but when they are not there.
            worst.see(part(x[:, :place]), y[:, :place], f"{tokens} tokens, those from {place} on left out")
    still = moved == 0 and written > 0
    return Measured(1.0, "nothing moved at all: the part does not read its input") if still else worst.measured()


def _places(tokens: int) -> list[int]:
    """Where a change may begin: everywhere in a short text, at some places of a long one."""
    if tokens <= 65:
        return list(range(min(1, tokens - 1), tokens))
    return torch.linspace(1, tokens - 1, 31).long().unique().tolist()


@torch.no_grad()
def deterministic(tested: Subject) -> Measured:
    """How far apart two calls are, two instances, and a row alone from the same row among others."""
    part, twin, worst = tested.make(), tested.make(), Worst()
    for tokens in tested.lengths:
        x = tested.input(tokens, 3)
        y = part(x)
        worst.see(part(x), y, f"{tokens} tokens, called twice")
        worst.see(twin(x), y, f"{tokens} tokens, built twice")
        worst.see(part(x[1:2]), y[1:2], f"{tokens} tokens, a row alone")
    return worst.measured()


def differentiable(tested: Subject) -> Measured:
    """How far gradients are from finite differences, along random directions, relative to their size."""
    part, worst, step = tested.make(), Worst(), 1e-6
    inputs = [p for p in part.parameters() if p.requires_grad]
    for tokens in [n for n in tested.lengths if n <= 65][-2:]:
        x = tested.input(tokens, 1).requires_grad_()
        moved = [x, *inputs]
        slopes = gradients(part(x), moved)
        weight = summing_weights(x)
        for number, (tensor, slope) in enumerate(zip(moved, slopes, strict=True)):
            direction = tested.normal(*tensor.shape, seed=20 + number)
            ahead, behind = (_at(part, x, tensor, direction * sign * step, weight) for sign in (1, -1))
            expected = float((slope.conj() * direction).real.sum())
            error = abs((ahead - behind) / (2 * step) - expected) / max(1.0, abs(expected))
            worst.note(error, f"{tokens} tokens, {'input' if number == 0 else f'parameter {number}'}")
    return worst.measured(1e-5)


@torch.no_grad()
def _at(part: nn.Module, x: torch.Tensor, tensor: torch.Tensor, change: torch.Tensor, weight: torch.Tensor) -> float:
    tensor += change
    value = float((part(x) * weight).sum())
    tensor -= change
    return value


def stepwise(part: Any, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The results of stepping through pieces that end at the cuts."""
    state, parts, start = part.begin(len(x), x), [], 0
    for stop in cuts:
        y, state = part.step(x[:, start:stop], state)
        parts.append(y)
        start = stop
    return torch.cat(parts, 1)


COMMON = (
    Rule(
        "shapes",
        "keeps shape and type, and is finite, at every length and batch",
        shapes,
        "what reads it counts on it, and a NaN spreads to every weight in one step",
        "return a tensor of the input's shape and dtype; guard divisions and logarithms against zero",
    ),
    Rule(
        "causality",
        "no result depends on a later token",
        causal,
        "a part that reads the future has a low loss and writes nothing",
        "mask the future out; sums and norms over the sequence want their running form (cumsum instead of sum)",
    ),
    Rule(
        "determinism",
        "the same input gives the same result: called twice, built twice, in a batch or alone",
        deterministic,
        "a run that cannot be repeated proves nothing, and rows that see each other leak",
        "keep no state between calls, draw nothing at random in evaluation, sum over no batch",
    ),
    Rule(
        "gradients",
        "gradients are those of finite differences",
        differentiable,
        "training follows the gradient, whatever the result says",
        "compare a hand-written backward with autograd's on the reference",
    ),
)
