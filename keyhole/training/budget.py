"""How long a run lasts, and when in it something is due. Progress is a number from 0 to 1, whatever is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.core.config import Train

DEFAULT_STEPS = 1000


@dataclass
class Spent:
    """What a run has used up so far. `seconds` counts training alone: not evaluation, not saving."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Budget:
    """Steps, tokens or seconds, and how many."""

    unit: str
    amount: float

    @classmethod
    def of(cls, train: Train) -> Budget:
        """The budget of a recipe."""
        for unit in ("steps", "tokens", "seconds"):
            if (amount := getattr(train, unit)) is not None:
                return cls(unit, amount)
        return cls("steps", DEFAULT_STEPS)

    def progress(self, spent: Spent) -> float:
        """The fraction that is used up."""
        used = {"steps": spent.step, "tokens": spent.tokens, "seconds": spent.seconds}[self.unit]
        return used / self.amount


def due(every: int, times: int, step: int, before: float, after: float) -> bool:
    """Whether a step from progress `before` to `after` completes an interval: `every` steps, or 1/`times` of the run."""
    if every:
        return after >= 1 or step % every == 0
    return _completed(after, times) > _completed(before, times)


def _completed(progress: float, times: int) -> int:
    """How many of the `times` intervals of a run are behind it. The last one ends with the run, never a step before."""
    if progress >= 1:
        return times
    # A hair is added so that rounding (100 steps of .01) cannot shift an interval's end.
    return min(math.floor(progress * times + 1e-9), times - 1)
