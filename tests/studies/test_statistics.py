import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.core.errors import InputError
from keyhole.studies import intervals, statistics
from keyhole.studies.statistics import compare, estimate, power, seeds_needed

BASE = {0: 1.90, 1: 2.10, 2: 1.95, 3: 2.05, 4: 2.00}


def arm(*differences, base=BASE):
    return {seed: base[seed] + difference for seed, difference in zip(base, differences, strict=False)}


def verdict(*differences, **options):
    return compare("base", {"base": BASE, "arm": arm(*differences)}, **options)["arm"]


def test_students_interval_is_the_textbooks():
    """Worked by hand: mean 3, sd sqrt(2.5), t(4, .975) = 2.776445."""
    found = estimate([1, 2, 3, 4, 5])
    reach = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.n, found.method) == (3, 5, "student")
    assert found.sd == pytest.approx(math.sqrt(2.5))
    assert (found.low, found.high) == pytest.approx((3 - reach, 3 + reach), rel=1e-6)


def test_one_value_has_no_interval_and_equal_values_have_one_of_no_width():
    one, same = estimate([2.5]), estimate([0.1] * 3)
    assert (one.mean, one.low, one.high, one.sd, one.n) == (2.5, None, None, None, 1)
    assert (same.mean, same.low, same.high, same.sd) == (0.1, 0.1, 0.1, 0)


def test_from_twenty_values_on_the_interval_follows_their_skewness():
    skewed = np.random.default_rng(0).exponential(1.0, 40).tolist()
    found = estimate(skewed)
    assert found.method == "bootstrap"
    assert found.high - found.mean > 1.15 * (found.mean - found.low), "the long tail is above"
    assert estimate(skewed) == found
    assert estimate(skewed[:19]).method == "student"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_values_and_diverged_ones_have_no_estimate(values):
    with pytest.raises(InputError, match="one finite number or more"):
        estimate(values)


def test_a_level_is_a_share():
    with pytest.raises(InputError, match=r"between 0 and 1, for example \.95, not 95"):
        estimate([1, 2], level=95)


def test_the_paired_test_is_students_on_the_differences():
    from scipy import stats

    mine = arm(-0.03, -0.02, -0.01, -0.04, 0.005)
    found = compare("base", {"base": BASE, "arm": mine})["arm"]
    theirs = stats.ttest_rel(list(mine.values()), list(BASE.values()))
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert (found.low_holm, found.high_holm, found.p_holm) == (found.low, found.high, found.p), "one arm: no correction"


def test_holms_corrected_p_is_the_textbooks():
    """p = .01, .04, .03, .005 give .03, .06, .06, .02 (Holm 1979)."""
    steps = statistics._holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 0.05)
    assert {name: round(step.p, 12) for name, step in steps.items()} == {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    levels = {name: Fraction(step.alpha).limit_denominator(1000) for name, step in steps.items()}
    # d and a are rejected at their steps; c stops the procedure, and b is judged by the level that stopped it.
    assert levels == {"d": Fraction(1, 80), "a": Fraction(1, 60), "c": Fraction(1, 40), "b": Fraction(1, 40)}


def test_an_arm_is_better_or_worse_by_what_its_measure_means():
    lower = [-0.03, -0.02, -0.025, -0.02, -0.03]
    assert verdict(*lower).sentence == "better by .025 nats (.019 to .031, 5 seeds)"
    assert verdict(*lower, lower_is_better=False, unit="").sentence == "worse by .025 (.019 to .031, 5 seeds)"
    assert verdict(*(-d for d in lower)).sentence == "worse by .025 nats (.019 to .031, 5 seeds)"


def test_the_sentence_says_for_how_many_arms_it_is_corrected():
    losses = {"base": BASE, "a": arm(-0.03, -0.02, -0.025, -0.02, -0.03), "b": arm(0.01, -0.02, 0.0, 0.03, -0.01)}
    found = compare("base", losses)
    assert found["a"].sentence == "better by .025 nats (.017 to .033, 5 seeds, corrected for 2 arms)"
    assert found["b"].verdict == "not distinguishable"
    assert found["b"].sentence.startswith("not distinguishable: +.002 nats (-.022 to .026, 5 seeds, corrected for 2 arms)")
    assert list(found) == ["a", "b"]
    assert json.loads(json.dumps(found["a"].to_dict()))["p_holm"] == found["a"].p_holm


def test_not_distinguishable_says_how_many_seeds_would_decide():
    found = verdict(-0.03, 0.01, -0.02, 0.005, -0.01)
    assert found.verdict == "not distinguishable"
    assert power(found.mean, found.sd, found.seeds_to_decide, 0.05) >= 0.8
    assert power(found.mean, found.sd, found.seeds_to_decide - 1, 0.05) < 0.8
    assert found.sentence.endswith(f"; a difference of this size would take about {found.seeds_to_decide} seeds")
    hopeless = verdict(0.1, -0.1, 0.1, -0.1, 0.001)
    assert hopeless.seeds_to_decide is None
    assert hopeless.sentence.endswith("; more than 1,000 seeds would be needed to tell")


def test_one_seed_decides_nothing():
    found = verdict(-5.0)
    assert (found.verdict, found.p, found.low, found.mean) == ("undecided", None, None, pytest.approx(-5))
    assert found.sentence == "undecided: one seed; 4 seeds without a pair left out"
    alone = compare("base", {"base": {0: 2.0}, "arm": {0: 1.0}})["arm"]
    assert alone.sentence == "undecided: one seed"
    apart = compare("base", {"base": {0: 2.0}, "arm": {1: 1.0}})["arm"]
    assert (apart.sentence, apart.n, apart.dropped) == (
        "undecided: no seed in common with the baseline; 2 seeds without a pair left out",
        0,
        2,
    )
    assert compare("base", {"base": BASE, "arm": {}})["arm"].verdict == "undecided"


def test_only_seeds_that_both_have_are_compared_and_the_others_are_counted():
    mine = {**arm(-0.03, -0.02, -0.025, -0.02), 9: 55.0}
    found = compare("base", {"base": BASE, "arm": mine})["arm"]
    assert (found.n, found.dropped, found.verdict) == (4, 2, "better")
    assert found.sentence.endswith("4 seeds); 2 seeds without a pair left out")


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_an_arm_that_diverged_is_not_judged_by_the_seeds_at_which_it_did_not(lost):
    found = verdict(-0.03, -0.02, lost, -0.02, -0.03)
    assert (found.verdict, found.mean, found.p, found.n) == ("undecided", None, None, 0)
    assert found.sentence == "undecided: no finite difference at 1 seed (2)"


def test_a_dishonest_arm_is_not_comparable_however_low_its_loss():
    losses = {"base": BASE, "cheat": arm(-1, -1.1, -1.2, -1, -1.1), "fair": arm(-0.03, -0.02, -0.025, -0.02, -0.03)}
    honest = {"base": True, "cheat": False, "fair": True}
    found = compare("base", losses, honest=honest)
    assert found["cheat"].verdict == "not comparable"
    assert (found["cheat"].p, found["cheat"].low_holm) == (None, None)
    assert found["cheat"].mean == pytest.approx(-1.08), "the struck-out loss is still shown"
    alone = compare("base", {name: losses[name] for name in ("base", "fair")})["fair"]
    assert found["fair"] == alone, "it costs the others no correction"
    both = compare("base", losses, honest={**honest, "base": False})
    assert {difference.verdict for difference in both.values()} == {"not comparable"}
    assert "the baseline fails honesty" in both["fair"].sentence


def test_honesty_must_be_known_of_every_arm():
    losses = {"base": BASE, "cheat": BASE}
    with pytest.raises(InputError, match="it does not agree on cheat"):
        compare("base", losses, honest={"base": True})
    with pytest.raises(InputError, match="no arm 'bse' to compare with; did you mean 'base'"):
        compare("bse", losses)


def test_the_same_losses_are_not_distinguishable():
    found = verdict(0, 0, 0, 0, 0)
    assert (found.verdict, found.p, found.seeds_to_decide, found.mean) == ("not distinguishable", 1, None, 0)
    assert found.sentence == "not distinguishable: the same at every seed (5 seeds)"


def test_the_same_difference_at_every_seed_is_judged_by_its_sign_alone():
    """Two of ten answers more, at each seed: no spread, so Student's t would be sure at two seeds already."""
    five = verdict(0.2, 0.2, 0.2, 0.2, 0.2)
    assert (five.verdict, five.p, five.seeds_to_decide, five.low) == ("not distinguishable", 1 / 16, 6, None)
    assert five.sentence == (
        "not distinguishable: +.200 nats at every seed, no spread to judge it by (5 seeds); "
        "a difference of this size would take about 6 seeds"
    )
    base = dict.fromkeys(range(6), 1.0) | {3: 700.0}
    six = compare("base", {"base": base, "arm": {seed: loss + 0.2 for seed, loss in base.items()}})["arm"]
    assert (six.verdict, six.method) == ("worse", "sign"), "rounding is no spread"
    assert six.sentence == "worse by .200 nats at every seed (6 seeds)"
    assert six.low == six.high == pytest.approx(0.2)


def test_power_is_that_of_the_noncentral_t():
    """R: power.t.test(n = 5 and 20, delta = 1 and .5, sd = 1, type = "one.sample", strict = TRUE)."""
    assert power(1.0, 1.0, 5, 0.05) == pytest.approx(0.4014, abs=2e-4)
    assert power(0.5, 1.0, 20, 0.05) == pytest.approx(0.5645, abs=2e-4)
    assert power(0.0, 1.0, 7, 0.05) == pytest.approx(0.05)
    assert power(1.0, 1.0, 1, 0.05) == 0
    assert seeds_needed(0.5, 1.0, 0.05) == 34, "the textbooks' 34 pairs for half a standard deviation"


def test_power_grows_with_seeds_where_scipy_s_own_table_has_holes():
    for effect in (0.1, 1.0, 30.0):
        for alpha in (0.05, 0.0005):
            curve = [power(effect, 1.0, n, alpha) for n in range(2, 400, 7)]
            assert np.isfinite(curve).all()
            assert (np.diff(curve) > -1e-9).all()


def test_seeds_for_no_difference_and_for_tiny_ones_are_not_promised():
    assert seeds_needed(0.0, 1.0, 0.05) is None
    assert seeds_needed(0.001, 1.0, 0.05) is None
    assert seeds_needed(1.0, 0.0, 0.05) == 6


@st.composite
def made_up(draw):
    """Losses of a study, from plain to odd: few seeds or many, arms far and near, ties, one value repeated."""
    seeds = draw(st.sampled_from([2, 3, 5, 8, 20, 25]))
    arms = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    grid = draw(st.sampled_from([0.0, 0.1, 1.0]))
    base = random.normal(2, 1, seeds)
    losses = {"base": dict(enumerate(base.tolist()))}
    for number in range(arms):
        shift, spread = draw(st.sampled_from([0.0, 0.3, 1.0, 3.0])), draw(st.sampled_from([0.0, 0.5, 1.0]))
        differences = shift + spread * random.standard_normal(seeds)
        differences = np.round(differences / grid) * grid if grid else differences
        losses[f"arm {number}"] = dict(enumerate((base + differences).tolist()))
    return losses


def contains_zero(low, high):
    return (low is None or low <= 0) and (high is None or high >= 0)


@settings(max_examples=150)
@given(made_up(), st.sampled_from([0.9, 0.95, 0.99]))
def test_a_verdict_and_its_corrected_interval_never_contradict_each_other(losses, level):
    for found in compare("base", losses, level=level).values():
        decided = found.verdict in ("better", "worse")
        assert decided == (not contains_zero(found.low_holm, found.high_holm)) == (found.p_holm <= round(1 - level, 9))
        assert (found.p <= round(1 - level, 9)) == (not contains_zero(found.low, found.high))
        assert found.p_holm >= found.p
        if decided:
            assert (found.verdict == "better") == (found.mean < 0)
        if found.low_holm is not None and found.low is not None:
            assert found.low_holm <= found.low <= found.mean <= found.high <= found.high_holm


@settings(max_examples=40)
@given(made_up())
def test_exchanging_arm_and_baseline_exchanges_the_verdict_exactly(losses):
    pair = {name: losses[name] for name in ("base", "arm 0")}
    there, back = compare("base", pair)["arm 0"], compare("arm 0", pair)["base"]
    assert {there.verdict, back.verdict} in ({"better", "worse"}, {"not distinguishable"})
    assert (there.p, there.mean, there.low_holm) == pytest.approx(
        (back.p, -back.mean, None if back.high_holm is None else -back.high_holm)
    )


def test_seeds_may_come_in_any_order():
    losses = {"base": BASE, "arm": arm(-0.03, 0.01, -0.02, 0.005, -0.01)}
    turned = {name: dict(reversed(values.items())) for name, values in losses.items()}
    assert compare("base", turned) == compare("base", losses)


def test_many_arms_leave_intervals_without_end_rather_than_a_wrong_verdict():
    """2 resamples in 20,000 are the rarest event that the bootstrap can show; 1,000 arms ask for a rarer one."""
    random = np.random.default_rng(0)
    evidence, method = intervals.judge((1 + random.standard_normal(20) / 9).tolist())
    assert method == "bootstrap"
    assert evidence.interval(0.05 / 1000) == (None, None)
    assert evidence.p > 0.05 / 1000
