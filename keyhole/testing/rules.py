"""What a rule is, and those that every part must be true to beyond honesty: it runs, it repeats, its gradients are right.

Where a part does not offer what a rule asks of it, the rule says what is missing, and is undecided.

Legend: B rows, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from keyhole.core.errors import KeyholeError
from keyhole.testing.subject import Subject, inside

LIMIT = 1e-10
"""How far two forms of one function may differ in float64, relative to their size where that is above 1."""

Aspect = Literal["honesty", "faithfulness"]


@dataclass(frozen=True)
class Measured:
    """What a rule found: how wrong at worst, where, and what kept it from saying anything (if something did)."""

    worst: float
    where: str = ""
    missing: str = ""
    limit: float = LIMIT
    told: str = ""
    """What else was seen, in words: a diagnosis, or what a rule without a limit reports."""
    remedy: str = ""
    """What mends this very fault, where that is known; else the rule's own remedy stands."""
    code: str = ""
    """The remedy as code."""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One thing that must be true, in words, how it is measured, and what to do where it is false."""

    name: str
    statement: str
    measure: Callable[[Subject], Measured]
    why: str
    remedy: str
    aspect: Aspect = "faithfulness"


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
def deterministic(tested: Subject) -> Measured:
    """How far apart two calls are, and two instances."""
    part, twin, worst = tested.make(), tested.make(), Worst()
    for tokens in tested.lengths:
        x = tested.input(tokens, 3)
        y = part(x)
        worst.see(part(x), y, f"{tokens} tokens, called twice")
        worst.see(twin(x), y, f"{tokens} tokens, built twice")
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


@torch.no_grad()
def past_the_block(tested: Subject) -> Measured:
    """What becomes of a text that is longer than the block: told, never judged."""
    part, tokens = tested.make(), tested.block + 9
    x = tested.input(tokens, 1)
    try:
        y = part(x)
    except Exception as error:  # a refusal is as good an answer as any
        said = str(error) if isinstance(error, KeyholeError) else (str(error).splitlines() or [type(error).__name__])[0]
        return Measured(0, told=f"refuses {tokens} tokens: {said}", missing=f"it reads at most its block of {tested.block}")
    if not bool(y.isfinite().all()):
        return Measured(0, told=f"{tokens} tokens: not finite", missing="past its block its results are no numbers")
    before = part(x[:, : tested.block])
    change = float((y[:, : tested.block] - before).abs().max()) / max(1.0, float(before.abs().max()))
    size = float(y[:, tested.block :].square().mean().sqrt()) / max(float(before.square().mean().sqrt()), 1e-300)
    told = f"{tokens} tokens: finite, earlier results change by {change:.1g}, later ones are {size:.2g} times as large"
    return Measured(0, told=told, limit=float("inf"), evidence={"change": change, "size": size})


def stepwise(part: Any, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The results of stepping through pieces that end at the cuts."""
    state, parts, start = part.begin(len(x), x), [], 0
    for stop in cuts:
        y, state = part.step(x[:, start:stop], state)
        parts.append(y)
        start = stop
    return torch.cat(parts, 1)


SHAPES = Rule(
    "shapes",
    "keeps shape and type, and is finite, at every length and batch",
    shapes,
    "what reads it counts on it, and a NaN spreads to every weight in one step",
    "return a tensor of the input's shape and dtype; guard divisions and logarithms against zero",
)
COMMON = (
    SHAPES,
    Rule(
        "determinism",
        "the same input gives the same result: called twice, built twice",
        deterministic,
        "a run that cannot be repeated proves nothing",
        "keep no state between calls, draw nothing at random in evaluation",
    ),
    Rule(
        "gradients",
        "gradients are those of finite differences",
        differentiable,
        "training follows the gradient, whatever the result says",
        "compare a hand-written backward with autograd's on the reference",
    ),
    Rule(
        "past the block",
        "what it does with a text longer than its block (reported, not judged)",
        past_the_block,
        "models are asked to read further than they were trained",
        "a sentence that names the longest text is a good answer; numbers that are not finite are none",
    ),
)
