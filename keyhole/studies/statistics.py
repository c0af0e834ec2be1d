"""Does an arm differ from the baseline, and how sure is that? Paired by seed, corrected over arms, told in one sentence.

Every arm is compared with one baseline. Both trained on the same data from the same seed, so their difference at a seed is
free of what the seed did to both. Holm's procedure holds the chance of any false verdict in the whole study at 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from keyhole.core.errors import InputError, nearest
from keyhole.studies.intervals import MOST_SEEDS, Bounds, Evidence, Method, judge, power, seeds_needed

__all__ = ["Difference", "Estimate", "Verdict", "compare", "estimate", "power", "seeds_needed"]

Verdict = Literal["better", "worse", "not distinguishable", "not comparable", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and the interval that holds the true one, at the level asked for."""

    mean: float
    low: float | None
    """None where n values say nothing of it: one value has no interval."""
    high: float | None
    sd: float | None
    n: int
    method: Method


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """The mean of independent values: Student's interval for few of them, a studentized bootstrap from 20 on."""
    given = [float(value) for value in values]
    if not given or not all(map(math.isfinite, given)):
        raise InputError(f"an estimate takes one finite number or more, not {given}; leave diverged runs out and say so")
    evidence, method = judge(given)
    if evidence is None:
        return Estimate(mean=given[0], low=None, high=None, sd=None, n=1, method="none")
    if method == "sign":
        # Equal values: an interval of no width is all they say.
        return Estimate(mean=given[0], low=given[0], high=given[0], sd=0.0, n=len(given), method="none")
    low, high = evidence.interval(_alpha(level))
    return Estimate(mean=_mean(given), low=low, high=high, sd=_sd(given), n=len(given), method=method)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm against the baseline: arm - baseline, over the seeds that both have."""

    arm: str
    baseline: str
    n: int
    """Pairs of seeds."""
    dropped: int
    """Seeds that only one of the two has."""
    mean: float | None
    low: float | None
    """The plain interval, as if this arm were the only one."""
    high: float | None
    sd: float | None
    p: float | None
    p_holm: float | None
    """Corrected for the other arms; the verdict is whether it is at most 1 - level."""
    low_holm: float | None
    """The corrected interval, at the level at which Holm's procedure judged this arm: it always agrees with the verdict."""
    high_holm: float | None
    arms: int
    """How many arms the correction is for."""
    method: Method
    verdict: Verdict
    seeds_to_decide: int | None
    """Paired seeds that would find a difference of this size in four of five studies; None beyond 1,000."""
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain JSON types."""
        return asdict(self)


class _Pairs(NamedTuple):
    """An arm's differences, or why there are none to judge."""

    arm: str
    given: list[float]
    dropped: int
    evidence: Evidence | None
    method: Method
    verdict: Verdict = "undecided"
    reason: str = ""

    @property
    def mean(self) -> float | None:
        return self.evidence.mean if self.evidence else _mean(self.given)


class _Step(NamedTuple):
    """What Holm's procedure says of one arm."""

    p: float
    alpha: float
    """The level of the step at which the arm was judged."""


def compare(
    baseline: str,
    losses: Mapping[str, Mapping[int, float]],
    *,
    level: float = 0.95,
    lower_is_better: bool = True,
    honest: Mapping[str, bool] | None = None,
    unpaired: Collection[str] = (),
    unit: str = "nats",
) -> dict[str, Difference]:
    """Each arm against the baseline: `losses[arm][seed]`, nan or inf where a run diverged, absent where none was made.

    `honest` says of every arm whether its audit held, `unpaired` names those that did not read what the baseline read;
    neither are compared, and they cost the others nothing.
    """
    alpha = _alpha(level)
    _check(baseline, losses, honest)
    pairs = [_pair(arm, baseline, losses, honest, arm in unpaired) for arm in losses if arm != baseline]
    steps = _holm({pair.arm: pair.evidence.p for pair in pairs if pair.evidence is not None}, alpha)
    wording = _Wording(unit, lower_is_better, len(steps))
    return {pair.arm: _difference(pair, baseline, alpha, steps.get(pair.arm), wording) for pair in pairs}


def _check(baseline: str, losses: Mapping[str, Mapping[int, float]], honest: Mapping[str, bool] | None) -> None:
    if baseline not in losses:
        raise InputError(f"there is no arm {baseline!r} to compare with{nearest(baseline, losses)}")
    if honest is not None and set(honest) != set(losses):
        odd = sorted(set(honest) ^ set(losses))
        raise InputError(f"`honest` must say true or false of each arm of the study; it does not agree on {', '.join(odd)}")


def _pair(
    arm: str,
    baseline: str,
    losses: Mapping[str, Mapping[int, float]],
    honest: Mapping[str, bool] | None,
    unpaired: bool,
) -> _Pairs:
    """The differences of one arm, seed by seed, in the order of seeds."""
    mine, other = losses[arm], losses[baseline]
    seeds = sorted(mine.keys() & other.keys())
    dropped = len(mine.keys() | other.keys()) - len(seeds)
    given = [float(mine[seed]) - float(other[seed]) for seed in seeds]
    lost = [str(seed) for seed, value in zip(seeds, given, strict=True) if not math.isfinite(value)]
    verdict: Verdict = "undecided"
    reason = ""
    if honest is not None and not (honest[arm] and honest[baseline]):
        verdict = "not comparable"
        who = "it" if honest[baseline] else "the baseline"
        reason = f"{who} fails honesty, and a loss reached by reading the future says nothing"
    elif unpaired:
        verdict, reason = "not comparable", "it was not trained and measured on what the baseline was"
    elif lost:
        # Comparing over the seeds that are left would choose those at which all went well.
        reason = f"no finite difference at {_count(len(lost), 'seed')} ({', '.join(lost)})"
    elif len(given) < 2:
        reason = "one seed" if given else "no seed in common with the baseline"
    finite = [] if lost else given
    if reason:
        return _Pairs(arm, finite, dropped, None, "none", verdict, reason)
    # Losses are rounded, and so are their differences: below this they are equal.
    grain = 8 * np.finfo(float).eps * max(abs(float(side[seed])) for side in (mine, other) for seed in seeds)
    return _Pairs(arm, given, dropped, *judge(given, grain=grain))


def _holm(chances: Mapping[str, float], alpha: float) -> dict[str, _Step]:
    """Holm's corrected p of each arm, and the level of the step at which it was judged.

    From the smallest p on, the r-th of m is judged at alpha / (m - r + 1); the first that does not pass ends it, and its
    level is that of all that follow.
    """
    steps: dict[str, _Step] = {}
    corrected, last = 0.0, alpha
    for passed, arm in enumerate(sorted(chances, key=chances.__getitem__)):
        left = len(chances) - passed
        stopped = corrected > alpha
        corrected = max(corrected, min(1.0, left * chances[arm]))
        last = last if stopped else alpha / left
        steps[arm] = _Step(corrected, last)
    return steps


@dataclass(frozen=True)
class _Wording:
    """How differences are told."""

    unit: str
    lower_is_better: bool
    arms: int

    def sentence(self, verdict: Verdict, pair: _Pairs, bounds: Bounds, needed: int | None) -> str:
        left_out = f"; {_count(pair.dropped, 'seed')} without a pair left out" if pair.dropped else ""
        if pair.reason:
            return f"{verdict}: {pair.reason}{left_out}"
        basis = _count(len(pair.given), "seed")
        if self.arms > 1:
            basis += f", corrected for {self.arms} arms"
        if pair.method == "sign":
            return self._constant(verdict, pair, basis, needed) + left_out
        mean, (low, high) = pair.mean or 0.0, bounds
        digits = _digits(mean, low, high)
        if verdict == "not distinguishable":
            shown = "no bounds" if low is None or high is None else f"{_number(low, digits)} to {_number(high, digits)}"
            told = f"{verdict}: {_number(mean, digits, '+')}{self._unit} ({shown}, {basis}){self._plan(needed)}"
        else:
            ends = sorted(abs(end) for end in bounds if end is not None)
            span = " to ".join(_number(end, digits) for end in ends) if len(ends) == 2 else "no bounds"
            told = f"{verdict} by {_number(abs(mean), digits)}{self._unit} ({span}, {basis})"
        return told + left_out

    def _constant(self, verdict: Verdict, pair: _Pairs, basis: str, needed: int | None) -> str:
        value = pair.mean
        if not value:
            return f"{verdict}: the same at every seed ({basis})"
        size = _number(value, _digits(value, None, None), "+")
        if verdict == "not distinguishable":
            return f"{verdict}: {size}{self._unit} at every seed, no spread to judge it by ({basis}){self._plan(needed)}"
        return f"{verdict} by {size.lstrip('+-')}{self._unit} at every seed ({basis})"

    def _plan(self, needed: int | None) -> str:
        if needed is None:
            return f"; more than {MOST_SEEDS:,} seeds would be needed to tell"
        return f"; a difference of this size would take about {needed} seeds"

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""


def _difference(pair: _Pairs, baseline: str, alpha: float, step: _Step | None, wording: _Wording) -> Difference:
    plain: Bounds = (None, None)
    corrected: Bounds = (None, None)
    verdict, needed = pair.verdict, None
    p = None
    mean, sd = pair.mean, 0.0 if pair.method == "sign" else _sd(pair.given)
    if pair.evidence is not None and mean is not None and sd is not None and step is not None:
        p = pair.evidence.p
        plain, corrected = pair.evidence.interval(alpha), pair.evidence.interval(step.alpha)
        verdict = "not distinguishable"
        if step.p <= alpha:
            verdict = "better" if (mean < 0) == wording.lower_is_better else "worse"
        elif p < 1:
            needed = seeds_needed(mean, sd, step.alpha)
            needed = needed and max(needed, len(pair.given) + 1)
    return Difference(
        arm=pair.arm,
        baseline=baseline,
        n=len(pair.given),
        dropped=pair.dropped,
        mean=mean,
        low=plain[0],
        high=plain[1],
        sd=sd,
        p=p,
        p_holm=step and step.p,
        low_holm=corrected[0],
        high_holm=corrected[1],
        arms=wording.arms,
        method=pair.method,
        verdict=verdict,
        seeds_to_decide=needed,
        sentence=wording.sentence(verdict, pair, corrected, needed),
    )


def _alpha(level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"a level of confidence lies between 0 and 1, for example .95, not {level}")
    return round(1 - level, 12)  # 1 - .95 is a little more than .05


def _mean(given: Sequence[float]) -> float | None:
    return float(np.mean(given)) if given else None


def _sd(given: Sequence[float]) -> float | None:
    return float(np.std(given, ddof=1)) if len(given) > 1 else None


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number:,} {word}s"


def _digits(mean: float, low: float | None, high: float | None) -> int:
    """As many decimals as the interval deserves, and enough that an end next to 0 does not look like 0."""
    size = abs(mean) / 5 if low is None or high is None else (high - low) / 2
    least = min((abs(end) for end in (mean, low, high) if end), default=1.0)
    wanted = [-math.floor(math.log10(value)) for value in (size / 5, least) if value > 0]
    return min(max([0, *wanted]), 9)


def _number(value: float, digits: int, sign: str = "") -> str:
    """.021, -.006 or 12.3: no zero before the point, as in all of Keyhole's tables."""
    text = f"{value:{sign},.{digits}f}"
    return text.replace("0.", ".", 1) if text.lstrip("+-").startswith("0.") else text
