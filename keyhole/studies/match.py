"""Budgets: what was promised is made equal, what cannot be is said.

The promise is one of steps, tokens, seconds and FLOPs. FLOPs of training are three times those of the forward passes: the
backward passes multiply twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, KeyholeError
from keyhole.studies.plan import Arm

if TYPE_CHECKING:
    from keyhole.text import Dataset
    from keyhole.text.dataset import Ints

TRAINING_FLOPS = 3
SAMPLES = 256
"""How many of the first training samples stand for all of them."""


@dataclass(frozen=True)
class Size:
    """How large an arm is."""

    parameters: int
    flops_per_token: float | None
    """Of a forward pass, for each token that is read; None where a part does not declare its cost."""
    read_per_target: float
    """How many tokens are read, padding too, for each one that is foretold: 1 in text, more where only answers count."""


def read_per_target(targets: Ints) -> float:
    """The share of targets in a batch, turned over."""
    from keyhole.text import NO_TARGET

    return targets.size / max(1, int((targets != NO_TARGET).sum()))


def size_of(arm: Arm, text: Dataset) -> Size:
    """Build an arm's model once: it is counted, and what cannot be built is refused before anything trains."""
    from keyhole.model.count import count
    from keyhole.model.lm import build

    _, targets = text.batch(0, SAMPLES)
    time = targets.shape[1]
    try:
        counted = count(build(arm.recipe, text.vocab), time)
    except KeyholeError as error:
        raise InputError(f"arm {arm.name}: {error}") from error
    return Size(counted.total, None if counted.flops is None else counted.flops / time, read_per_target(targets))


def budgeted(arm: Arm, budget: tuple[str, float] | None, size: Size) -> Recipe:
    """The arm's recipe with the study's budget in it."""
    if budget is None:
        return arm.recipe
    unit, amount = budget
    if unit != "flops":
        return arm.recipe.replace({f"train.{unit}": amount if unit == "seconds" else int(amount)})
    if size.flops_per_token is None:
        raise InputError(
            f"arm {arm.name} has a part that declares no cost, so its FLOPs cannot be matched; "
            "give the part cost() (or flops()), or give the budget in steps, tokens or seconds"
        )
    each = TRAINING_FLOPS * size.flops_per_token * size.read_per_target
    return arm.recipe.replace({"train.tokens": max(1, round(amount / each))})


def unequal(rows: dict[str, dict[str, Any]], baseline: str) -> list[str]:
    """What differs between arms although the budget is one: a sentence for each quantity, with its range."""
    said = []
    for key, what in QUANTITIES.items():
        found = {arm: row[key] for arm, row in rows.items() if row.get(key)}
        if len(found) < 2 or baseline not in found:
            continue
        ratio = {arm: value / found[baseline] for arm, value in found.items()}
        low, high = min(ratio, key=ratio.__getitem__), max(ratio, key=ratio.__getitem__)
        if ratio[high] / ratio[low] > TOLERATED.get(key, 1.0):
            said.append(f"{what}: {ratio[low]:.2f} ({low}) to {ratio[high]:.2f} ({high}) times the baseline's")
    return said


QUANTITIES = {
    "parameters": "parameters",
    "flops": "FLOPs of training",
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "seconds of training",
}
TOLERATED = {"seconds": 1.05, "parameters": 1.005, "flops": 1.005}
"""Below these ratios quantities count as equal: no clock gives the same twice, a table of positions is no advantage."""
