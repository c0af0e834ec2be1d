"""What a few numbers say of their mean: a p value and intervals that always agree with it.

Each way to judge numbers answers two questions, the second the inverse of the first: `p`, how surprising they would be if
their true mean were 0, and `interval(alpha)`, every true mean at which they would not be surprising at the level alpha.
So the interval holds 0 exactly when p > alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np

from keyhole.audits.interval import special
from keyhole.core.seeds import stream

Method = Literal["student", "bootstrap", "sign", "none"]
Bounds = tuple[float | None, float | None]
"""The two ends of an interval; None where it has no end."""

ENOUGH, PLENTY = 20, 2000
"""From ENOUGH numbers on their own distribution is used; beyond PLENTY it makes no difference any more."""
RESAMPLES = 19_999
MOST_SEEDS = 1000
"""A plan for more seeds than this is no plan."""


class Evidence(Protocol):
    """One way to judge a mean."""

    @property
    def mean(self) -> float:
        """The mean itself."""
        ...

    @property
    def p(self) -> float:
        """How often numbers with the true mean 0 would be as far from it as these, in either direction."""
        ...

    def interval(self, alpha: float) -> Bounds:
        """The true means that these numbers do not speak against at the level alpha."""
        ...


@dataclass(frozen=True)
class Student:
    """Few numbers: their mean over its standard error follows Student's t."""

    mean: float
    error: float
    freedom: int

    @property
    def p(self) -> float:
        """Both tails beyond the observed t."""
        return float(2 * special().stdtr(self.freedom, -abs(self.mean) / self.error))

    def interval(self, alpha: float) -> tuple[float, float]:
        """mean -+ t * error."""
        reach = -float(special().stdtrit(self.freedom, alpha / 2)) * self.error
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Bootstrap:
    """Many numbers: how (mean - true mean) / error varies is read off resamples of them, and Student's t must agree.

    Resamples allow for skewness, where Student's interval is too short on one side; with heavy tails they are too sure, and
    Student's t is not. So a mean counts as surprising when both say so, and the interval holds both intervals
    (docs/statistics.md has the measured rates). p counts the observation itself among the resamples and is never 0; where
    the level asks for a rarer event than they can show, the interval has no end.
    """

    student: Student
    pivots: np.ndarray
    """(resample's mean - mean) / resample's error."""

    @property
    def mean(self) -> float:
        """The mean itself."""
        return self.student.mean

    @cached_property
    def p(self) -> float:
        """Twice the share of the smaller tail, or Student's p where that is larger."""
        observed = self.mean / self.student.error
        above, below = np.count_nonzero(self.pivots >= observed), np.count_nonzero(self.pivots <= observed)
        return min(1.0, max(self.student.p, 2 * (1 + min(above, below)) / (len(self.pivots) + 1)))

    def interval(self, alpha: float) -> Bounds:
        """mean - pivot * error at the pivots that leave alpha / 2 outside on each side; at least Student's."""
        count = len(self.pivots)
        outside = math.floor(alpha * (count + 1) / 2 + 1e-9)
        if outside < 1:
            return None, None
        ordered = np.partition(self.pivots, (outside - 1, count - outside))
        mean, error = self.mean, self.student.error
        low = mean - float(ordered[count - outside]) * error
        high = mean - float(ordered[outside - 1]) * error
        shortest = self.student.interval(alpha)
        low, high = min(low, shortest[0]), max(high, shortest[1])
        return (low if math.isfinite(low) else None), (high if math.isfinite(high) else None)


@dataclass(frozen=True)
class Sign:
    """Numbers that are all the same: there is no spread to measure by, only that they all lie on one side.

    Student's t would be infinite and p 0 for as few as two of them. But two equal differences are no miracle where a metric
    has few values (2 of 10 answers more, twice). Numbers that are as likely to lie above their true mean as below all fall
    on one side with chance 2^(1 - n), whatever their distribution: an honest p, and 6 numbers decide at 5 %.
    """

    mean: float
    count: int

    @property
    def p(self) -> float:
        """The chance that all fall on one side."""
        return 2.0 ** (1 - self.count) if self.mean else 1.0

    def interval(self, alpha: float) -> Bounds:
        """The value itself when there are enough to decide, else no bounds at all."""
        return (self.mean, self.mean) if 2.0 ** (1 - self.count) <= alpha else (None, None)


def judge(values: Sequence[float], *, grain: float = 0.0) -> tuple[Evidence | None, Method]:
    """The evidence in some finite numbers, and its name; numbers that differ by no more than `grain` are the same."""
    given = np.asarray(values, dtype=np.float64)
    count = len(given)
    if count < 2:
        return None, "none"
    if np.ptp(given) <= grain:
        middle = float(np.median(given))
        return Sign(middle if abs(middle) > grain else 0.0, count), "sign"
    student = Student(float(given.mean()), float(given.std(ddof=1)) / math.sqrt(count), count - 1)
    # Resamples of a few distinct numbers are often all alike, and have no error to divide by.
    if ENOUGH <= count <= PLENTY and len(np.unique(given)) >= ENOUGH // 2:
        return Bootstrap(student, _pivots(given)), "bootstrap"
    return student, "student"


def _pivots(given: np.ndarray) -> np.ndarray:
    """The studentized means of all resamples. They keep the order of numbers: those of -given are exactly the opposite."""
    count = len(given)
    centred = (given - given.mean()) / given.std()
    shares = _shares(count)
    means = shares @ centred
    variances = np.maximum(shares @ centred**2 - means**2, 0) * count / (count - 1)
    with np.errstate(divide="ignore"):
        return means / np.sqrt(variances / count)


@lru_cache(maxsize=2)
def _shares(count: int) -> np.ndarray:
    """(resamples, count): how often each number is drawn, over count. The same at every call."""
    resamples = min(RESAMPLES, 4_000_000 // count)
    drawn = stream(0, "bootstrap", count).multinomial(count, np.full(count, 1 / count), size=resamples)
    return drawn / count


def power(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """The chance that n paired differences with this true mean and spread are found to differ from 0, by noncentral t."""
    if n < 2:
        return 0.0
    if sd == 0:
        return float(effect != 0 and 2.0 ** (1 - n) <= alpha)
    tables = special()
    centre = abs(effect) / sd * math.sqrt(n)
    critical = -float(tables.stdtrit(n - 1, alpha / 2))
    # SciPy's noncentral t gives nan for some chances that are too small to matter here.
    above, below = (float(tables.nctdtr(n - 1, centre, end)) for end in (critical, -critical))
    return 1.0 - max(0.0, (0.0 if math.isnan(above) else above) - (0.0 if math.isnan(below) else below))


def seeds_needed(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int | None:
    """The fewest paired seeds that find such a difference with this power; None when more than 1,000 would be needed."""
    if effect == 0:
        return None
    normal = special().ndtri
    # As if the spread were known: Student's t never needs fewer, and seldom many more.
    known = (float(normal(1 - alpha / 2)) + float(normal(power))) * sd / abs(effect)
    n = max(2, math.ceil(min(known, MOST_SEEDS) ** 2) - 1)
    while n <= MOST_SEEDS:
        if _power(effect, sd, n, alpha) >= power:
            return n
        n += 1
    return None


_power = power  # under its own name it is hidden by an argument above
