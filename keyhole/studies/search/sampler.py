"""Which point of a space to try next: a pure function of the plan, what was tried so far, and the trial's number.

No sampler keeps a state. A search that was stopped goes on as if nothing had happened, and several processes may ask.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from keyhole.core.errors import InputError
from keyhole.core.seeds import derive, stream
from keyhole.studies.search.space import MOST_POINTS, Axis, Choice, Range, Settings, Space, name_of

State = Literal["running", "complete", "pruned", "failed"]
TRIES = 200
"""How often a point that was tried already, or does not fit together, is drawn anew."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the space and what came of it."""

    number: int
    state: State
    settings: Settings
    value: float | None = None
    """The mean of the objective over the repeats; inf where training diverged."""
    values: tuple[float, ...] = ()
    """The objective of each repeat."""
    reports: dict[int, float] = field(default_factory=dict)
    """Step -> what was measured on the way."""
    failure: str = ""
    """Why it failed, or how it diverged."""
    attempts: int = 1
    """How often it was begun: once more for each time that the search was killed meanwhile."""

    @property
    def diverged(self) -> bool:
        """Whether it was trained, and came to no value."""
        return self.state == "complete" and self.value is not None and not math.isfinite(self.value)


def load_optuna() -> Any:
    """Optuna, silent: what it has to say, Keyhole says."""
    try:
        import optuna
    except ImportError:
        raise InputError("a search needs optuna; install it with: pip install 'keyhole[study]'") from None
    logging.getLogger("optuna").setLevel(logging.ERROR)
    return optuna


@dataclass(frozen=True)
class Sampler:
    """How points are chosen."""

    name: Literal["grid", "random", "tpe"]
    space: Space
    seed: int = 0
    direction: Literal["minimize", "maximize"] = "minimize"

    def propose(self, tried: Sequence[Trial], number: int, fits: Callable[[Settings], str]) -> Settings | None:
        """The settings of a trial, or None when the space has nothing new; `fits` says what is wrong with a point."""
        seen = {point_name(trial.settings) for trial in tried}
        reason = ""
        for point in self._candidates(tried, number):
            if point_name(point) in seen:
                continue
            reason = fits(point)
            if not reason:
                return point
            seen.add(point_name(point))
        if reason and not tried:
            raise InputError(f"no combination of this space makes a recipe; the last one tried: {reason}")
        return None

    def _candidates(self, tried: Sequence[Trial], number: int) -> Iterator[Settings]:
        """Points to try, the best first."""
        space = self.space
        if self.name == "grid":
            yield from space.grid()
            return
        # A model of nothing is no better than chance: the first points are random.
        measured = sum(trial.state in ("complete", "pruned") for trial in tried)
        if self.name == "tpe" and measured >= 4 + len(space.axes):
            yield from self._modelled(tried, number)
        random = stream(self.seed, "search", "random", number)
        yield from (space.draw(random) for _ in range(TRIES))
        if space.size is not None and space.size <= MOST_POINTS:
            # Few points are left and chance keeps missing them: walk through all, from a random place.
            points = list(_every(space))
            random.shuffle(points)  # type: ignore[arg-type]
            yield from points

    def _modelled(self, tried: Sequence[Trial], number: int) -> Iterator[Settings]:
        """Optuna's tree-structured Parzen estimator over all that was tried; trials still running count as poor ones."""
        optuna = load_optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its experimental options are our choice, not the user's concern
            sampler = optuna.samplers.TPESampler(
                seed=derive(self.seed, "search", "tpe", number) % 2**32,
                n_startup_trials=0,
                multivariate=len(self.space.axes) > 1,
                constant_liar=True,
                warn_independent_sampling=False,
            )
            study = optuna.create_study(sampler=sampler, direction=self.direction)
            study.add_trials([frozen(self.space, trial) for trial in tried if trial.state != "failed"])
            ranges = {axis.key: distribution(axis) for axis in self.space.axes}
            for _ in range(TRIES // 10):
                asked = study.ask(ranges)
                yield {axis.key: decode(axis, asked.params[axis.key]) for axis in self.space.axes}
                study.tell(asked, state=optuna.trial.TrialState.FAIL)


def point_name(settings: Settings) -> str:
    """A point as text: equal for equal points."""
    return ", ".join(f"{key}={name_of(value)}" for key, value in sorted(settings.items()))


def _every(space: Space) -> Iterator[Settings]:
    """All points of a finite space: every whole number, however few a grid would take."""
    whole = [replace(axis, points=None) if isinstance(axis, Range) else axis for axis in space.axes]
    return Space(tuple(whole)).grid()


def frozen(space: Space, trial: Trial, **more: Any) -> Any:
    """A trial as Optuna keeps it."""
    optuna = load_optuna()
    states = optuna.trial.TrialState
    state = {"running": states.RUNNING, "complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
    return optuna.trial.create_trial(
        state=state[trial.state],
        value=trial.value if trial.state in ("complete", "pruned") else None,
        params={axis.key: encode(axis, trial.settings[axis.key]) for axis in space.axes},
        distributions={axis.key: distribution(axis) for axis in space.axes},
        intermediate_values=trial.reports,
        **more,
    )


def distribution(axis: Axis) -> Any:
    """An axis as Optuna knows it."""
    known = load_optuna().distributions
    if isinstance(axis, Choice):
        return known.CategoricalDistribution([name_of(option) for option in axis.options])
    if axis.whole:
        return known.IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=axis.step)
    return known.FloatDistribution(axis.low, axis.high, log=axis.log)


def encode(axis: Axis, value: Any) -> Any:
    """A value as Optuna keeps it: choices by name."""
    return name_of(value) if isinstance(axis, Choice) else value


def decode(axis: Axis, kept: Any) -> Any:
    """The value behind what Optuna keeps."""
    if isinstance(axis, Range):
        return kept
    return next(option for option in axis.options if name_of(option) == kept)
