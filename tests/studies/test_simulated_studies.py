"""Studies whose truth is known, judged by the very function that judges real ones; then by deliberately wrong ones."""

import math

import numpy as np
import pytest
from simulate import Setting, coverage, heavy, noise, normal, rates, skewed

from keyhole.studies import intervals, statistics
from keyhole.studies.intervals import power

ALLOWED = 0.05 + 2 * noise(0.05, 1000)
"""5 %, and what a thousand studies may show by chance."""


@pytest.mark.parametrize(
    "setting",
    [
        Setting("normal"),
        Setting("two seeds", seeds=2),
        Setting("no seed effect", shared=0.0),
        Setting("twelve arms", arms=12),
        Setting("arms alike", related=0.7),
        Setting("heavy tails", draw=heavy),
        Setting("skewed", draw=skewed),
    ],
    ids=lambda setting: setting.name,
)
def test_where_no_arm_differs_at_most_one_study_in_twenty_says_one_does(setting):
    found = rates(setting, 1000, seed=1)
    assert found.any_false <= ALLOWED
    assert found.covered >= 0.95 - 3 * noise(0.95, 1000)


@pytest.mark.parametrize("draw", [normal, heavy], ids=["normal", "heavy tails"])
def test_with_twenty_seeds_the_bootstrap_does_not_see_what_is_not_there_either(draw):
    assert rates(Setting(arms=4, seeds=20, draw=draw), 500, seed=1).any_false <= 0.05 + 2 * noise(0.05, 500)


def test_a_true_difference_does_not_make_false_verdicts_on_the_other_arms_more_frequent():
    """Some arms are rejected for good reason, and Holm then judges the others at a milder level."""
    found = rates(Setting(effect=3.0, affected=3), 1000, seed=1)
    assert found.any_false <= ALLOWED
    assert found.found > 0.9


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 5), (1.0, 5), (-2.0, 5), (3.0, 3)])
def test_a_true_difference_is_found_as_often_as_theory_says(effect, seeds):
    theory = power(effect, 1.0, seeds, 0.05)
    found = rates(Setting(arms=1, seeds=seeds, effect=effect, affected=1), 1500, seed=1)
    assert found.found == pytest.approx(theory, abs=3 * noise(theory, 1500))


def test_the_seeds_that_are_asked_for_do_decide():
    seeds = intervals.seeds_needed(1.2, 1.0, 0.05)
    found = rates(Setting(arms=1, seeds=seeds, effect=1.2, affected=1), 1000, seed=1)
    assert 0.8 - 3 * noise(0.8, 1000) <= found.found <= 0.9


@pytest.mark.parametrize(
    ("draw", "n"),
    [(normal, 2), (normal, 5), (normal, 20), (heavy, 20), (skewed, 20), (normal, 50)],
)
def test_intervals_hold_the_true_mean_in_19_of_20_cases(draw, n):
    assert 0.95 - 3 * noise(0.95, 1000) <= coverage(draw, n, 1000, seed=1) <= 0.975


# The controls: the same harness over a comparison with a fault in it.


def test_leaving_out_holm_is_seen(monkeypatch):
    monkeypatch.setattr(
        statistics, "_holm", lambda chances, alpha: {arm: statistics._Step(p, alpha) for arm, p in chances.items()}
    )
    assert rates(Setting(), 1000, seed=1).any_false > 0.1


def test_taking_the_normal_distribution_for_students_is_seen(monkeypatch):
    class Normal(intervals.Student):
        @property
        def p(self):
            return math.erfc(abs(self.mean) / self.error / math.sqrt(2))

        def interval(self, alpha):
            reach = intervals.special().ndtri(1 - alpha / 2) * self.error
            return self.mean - reach, self.mean + reach

    monkeypatch.setattr(intervals, "Student", Normal)
    assert rates(Setting(), 500, seed=1).any_false > 0.15
    assert coverage(normal, 5, 1000, seed=1) < 0.9


def test_comparing_without_pairs_is_seen(monkeypatch):
    """Welch's test of the two arms: what a seed does to both hides the difference."""
    from scipy import stats

    class Unpaired(intervals.Student):
        def __init__(self, mine, other):
            found = stats.ttest_ind(mine, other, equal_var=False)
            error = math.sqrt((np.var(mine, ddof=1) + np.var(other, ddof=1)) / len(mine))
            super().__init__(float(np.mean(mine) - np.mean(other)), error, max(1, int(found.df)))

    def unpaired(arm, baseline, losses, honest, other_data):
        mine, other = (list(losses[name].values()) for name in (arm, baseline))
        return statistics._Pairs(arm, list(np.subtract(mine, other)), 0, Unpaired(mine, other), "student")

    monkeypatch.setattr(statistics, "_pair", unpaired)
    found = rates(Setting(arms=1, effect=2.0, affected=1), 300, seed=1)
    assert found.found < power(2.0, 1.0, 5, 0.05) - 0.5


def test_a_bootstrap_that_students_t_does_not_check_is_seen(monkeypatch):
    """Heavy tails: resamples alone are too sure of themselves."""

    class Unchecked(intervals.Bootstrap):
        def interval(self, alpha):
            inside = np.quantile(self.pivots, [1 - alpha / 2, alpha / 2])
            return tuple(self.mean - inside * self.student.error)

    monkeypatch.setattr(intervals, "Bootstrap", Unchecked)
    assert coverage(heavy, 20, 1000, seed=1) < 0.94


def test_a_verdict_the_wrong_way_round_is_seen(monkeypatch):
    monkeypatch.setattr(Setting, "losses", lambda self, random: _swapped(self, random))
    assert rates(Setting(arms=1, effect=3.0, affected=1), 200, seed=1).any_false > 0.9


def _swapped(setting, random):
    there = np.full((2, setting.seeds), 10.0) + 0.1 * random.standard_normal((2, setting.seeds))
    there[0] += setting.effect  # the difference is the opposite of what the setting says
    return {name: dict(enumerate(row.tolist())) for name, row in zip(("base", "arm 1"), there, strict=True)}
