"""How the learning rate goes over a run: a factor between 0 and 1, a pure function of progress.

    constant     1
    cosine       from 1 to `floor` along half a cosine
    linear       from 1 to `floor` along a line
    trapezoid    1, then linearly to `floor` over the last `decay` of the run (warm-up, plateau, decay)

Each begins with a linear warm-up when `train.warmup` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest

SHAPES: dict[str, dict[str, float]] = {
    "constant": {},
    "cosine": {"floor": 0.1},
    "linear": {"floor": 0.0},
    "trapezoid": {"floor": 0.0, "decay": 0.4},
}


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate at a step, given how much of the budget is spent."""

    shape: Callable[[float], float]
    warmup: float

    def factor(self, step: int, progress: float) -> float:
        """`progress` in 0 .. 1 is the budget spent before this step; a warm-up below 1 is a fraction of the budget."""
        if self.warmup >= 1:
            rise = (step + 1) / self.warmup
        else:
            rise = max(progress, 1e-3) / self.warmup if self.warmup else 1.0
        return min(1.0, rise) * self.shape(min(progress, 1.0))


def build_schedule(spec: Spec, warmup: float) -> Schedule:
    """A schedule from its recipe entry."""
    if spec.name not in SHAPES:
        raise InputError(f"there is no schedule {spec.name!r}{nearest(spec.name, SHAPES)}")
    options = dict(SHAPES[spec.name])
    for key, value in spec.options.items():
        if key not in options:
            raise InputError(f"unknown option {key!r} of schedule {spec.name!r}{nearest(key, options)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"schedule {spec.name!r}: {key} = {value!r} is not valid; it is a fraction from 0 to 1")
        options[key] = float(value)
    return Schedule(_shape(spec.name, **options), warmup)


def _shape(name: str, floor: float = 1.0, decay: float = 1.0) -> Callable[[float], float]:
    if name == "constant":
        return lambda _: 1.0
    if name == "cosine":
        return lambda progress: floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    # A line is a trapezoid that falls all the way.
    return lambda progress: floor + (1 - floor) * min(1.0, (1 - progress) / decay) if decay else 1.0
