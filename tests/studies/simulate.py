"""Simulated studies, whose truth is known: how often does `compare` see what is not there, and find what is?

python -m tests.studies.simulate --studies 10000
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from keyhole.studies import statistics
from keyhole.studies.intervals import power

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape)


def heavy(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom: now and then a run that is far off. Standard deviation 1."""
    return random.standard_t(3, shape) / math.sqrt(3)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Exponential: no run is much better than most, some are much worse. Mean 0, standard deviation 1."""
    return random.exponential(1.0, shape) - 1


@dataclass(frozen=True)
class Setting:
    """How the losses of a simulated study come about: a seed moves all arms, and each arm on its own."""

    name: str = "normal"
    arms: int = 5
    """Beside the baseline."""
    seeds: int = 5
    effect: float = 0.0
    """The true difference of the arms, in standard deviations of a paired difference."""
    affected: int = 0
    """How many arms have it."""
    shared: float = 3.0
    """What a seed does to all arms, in standard deviations of a paired difference."""
    related: float = 0.0
    """Correlation of what a seed does to each arm beyond that."""
    draw: Draw = normal
    baseline_draw: Draw | None = None

    def losses(self, random: np.random.Generator) -> dict[str, dict[int, float]]:
        """The losses of one study."""
        own = self.draw(random, (self.arms, self.seeds))
        mixed = math.sqrt(self.related) * self.draw(random, (self.seeds,)) + math.sqrt(1 - self.related) * own
        of_baseline = (self.baseline_draw or self.draw)(random, (self.seeds,))
        # A paired difference has the variance of two arms; scaled so that it is 1.
        losses = 10 + self.shared * random.standard_normal(self.seeds) + np.vstack([of_baseline, mixed]) / math.sqrt(2)
        losses[1 : self.affected + 1] += self.effect
        return {f"arm {arm}" if arm else "base": dict(enumerate(row.tolist())) for arm, row in enumerate(losses)}


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated studies."""

    any_false: float
    """Any verdict better or worse on an arm without a difference, or the wrong way round."""
    found: float
    """Arms with a true difference whose verdict says so (over arms, not over studies)."""
    covered: float
    """Plain intervals that hold the true difference (over arms)."""


def studies(setting: Setting, count: int, seed: int = 0) -> Iterator[dict[str, statistics.Difference]]:
    """Simulated studies, compared by the very function that real ones are."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield statistics.compare("base", setting.losses(random))


def rates(setting: Setting, count: int, seed: int = 0) -> Rates:
    """What `compare` makes of many studies of one kind."""
    false = found = covered = 0
    for study in studies(setting, count, seed):
        wrong = 0
        for number, difference in enumerate(study.values()):
            truth = setting.effect if number < setting.affected else 0.0
            decided = difference.verdict in ("better", "worse")
            right = decided and truth != 0 and (difference.verdict == "worse") == (truth > 0)
            found += right
            wrong += decided and not right
            low, high = difference.low, difference.high
            covered += (low is None or low <= truth) and (high is None or truth <= high)
        false += wrong > 0
    return Rates(false / count, found / max(1, count * setting.affected), covered / (count * setting.arms))


def coverage(draw: Draw, n: int, count: int, seed: int = 0) -> float:
    """How often the interval of `estimate` holds the true mean."""
    random = np.random.default_rng(seed)
    held = 0
    for _ in range(count):
        found = statistics.estimate((5 + draw(random, (n,))).tolist())
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5 <= found.high
    return held / count


def noise(rate: float, count: int) -> float:
    """The standard error of a rate that was measured on so many."""
    return math.sqrt(rate * (1 - rate) / count)


NOTHING_THERE = [
    Setting(),
    Setting("2 seeds", seeds=2),
    Setting("3 seeds", seeds=3),
    Setting("10 seeds", seeds=10),
    Setting("20 arms", arms=20),
    Setting("arms alike", related=0.7),
    Setting("heavy tails", draw=heavy),
    Setting("skewed", draw=skewed),
    Setting("skewed baseline only", draw=normal, baseline_draw=skewed),
    Setting("bootstrap, 20 seeds", seeds=20),
    Setting("bootstrap, heavy tails", seeds=20, draw=heavy),
    Setting("bootstrap, skewed baseline only", seeds=20, baseline_draw=skewed),
]


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the rates of every setting as tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=10_000)
    count = parser.parse_args().studies
    began = time.perf_counter()
    say(f"{count:,} simulated studies in each line, 5 arms x 5 seeds unless said otherwise\n")
    say("| no arm differs | any false verdict | plain intervals that hold 0 |\n| --- | --- | --- |")
    for setting in NOTHING_THERE:
        found = rates(setting, count)
        say(f"| {setting.name} | {found.any_false:.4f} ± {noise(found.any_false, count):.4f} | {found.covered:.4f} |")
    say("\n| one arm differs (1 arm) | found | theory |\n| --- | --- | --- |")
    for effect, seeds in ((0.5, 5), (1.0, 5), (2.0, 5), (3.0, 3), (0.5, 20)):
        found = rates(Setting(arms=1, seeds=seeds, effect=effect, affected=1), count)
        theory = power(effect, 1.0, seeds, 0.05)
        say(f"| {effect} sd, {seeds} seeds | {found.found:.4f} ± {noise(found.found, count):.4f} | {theory:.4f} |")
    say("\n| interval of a mean | holds it |\n| --- | --- |")
    for name, draw, n in (
        ("normal, 5 values, Student", normal, 5),
        ("normal, 20 values, bootstrap", normal, 20),
        ("normal, 50 values, bootstrap", normal, 50),
        ("heavy tails, 20 values, bootstrap", heavy, 20),
        ("exponential, 20 values, bootstrap", skewed, 20),
        ("exponential, 19 values, Student", skewed, 19),
    ):
        held = coverage(draw, n, count)
        say(f"| {name} | {held:.4f} ± {noise(held, count):.4f} |")
    sys.stderr.write(f"\nin {time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
