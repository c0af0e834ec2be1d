import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.config import Spec
from keyhole.core.errors import InputError
from keyhole.training.schedule import SHAPES, build_schedule


def factor(name, progress, warmup=0.0, step=10_000, **options):
    return build_schedule(Spec(name=name, options=options), warmup).factor(step, progress)


@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        ("constant", {}, {0: 1, 0.5: 1, 1: 1}),
        ("cosine", {}, {0: 1, 0.5: 0.55, 1: 0.1}),
        ("cosine", {"floor": 0.0}, {0: 1, 1 / 3: 0.75, 0.5: 0.5, 2 / 3: 0.25, 1: 0}),
        ("linear", {}, {0: 1, 0.25: 0.75, 1: 0}),
        ("linear", {"floor": 0.5}, {0: 1, 0.5: 0.75, 1: 0.5}),
        ("trapezoid", {}, {0: 1, 0.6: 1, 0.8: 0.5, 1: 0}),
        ("trapezoid", {"decay": 0.2, "floor": 0.1}, {0.8: 1, 0.9: 0.55, 1: 0.1}),
        ("trapezoid", {"decay": 0}, {0: 1, 1: 1}),
        ("trapezoid", {"decay": 1.0}, {0: 1, 0.5: 0.5, 1: 0}),
    ],
)
def test_a_schedule_has_the_values_of_its_formula(name, options, values):
    for progress, value in values.items():
        assert factor(name, progress, **options) == pytest.approx(value, abs=1e-12)


def test_a_warm_up_in_steps_rises_to_one_and_then_leaves_the_shape_alone():
    schedule = build_schedule(Spec(name="linear"), warmup=4)
    assert [schedule.factor(step, 0.0) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedule.factor(100, 0.5) == 0.5


def test_a_warm_up_below_one_is_a_fraction_of_the_budget():
    schedule = build_schedule(Spec(name="constant"), warmup=0.1)
    assert [schedule.factor(0, p) for p in (0.01, 0.05, 0.1, 0.5)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert 0 < schedule.factor(0, 0.0) <= 0.011  # the first step moves as well


@given(
    name=st.sampled_from(sorted(SHAPES)),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 1000)),
    step=st.integers(0, 10**6),
    progress=st.floats(0, 2),
)
def test_a_factor_is_always_between_zero_and_one(name, warmup, step, progress):
    value = build_schedule(Spec(name=name), warmup).factor(step, progress)
    assert 0 <= value <= 1
    assert math.isfinite(value)


@given(name=st.sampled_from(sorted(SHAPES)), a=st.floats(0, 1), b=st.floats(0, 1))
def test_after_the_warm_up_no_schedule_rises(name, a, b):
    assert factor(name, min(a, b)) >= factor(name, max(a, b)) - 1e-12


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Spec(name="cosin"), r"there is no schedule 'cosin'; did you mean 'cosine'\? \(allowed: constant, cosine"),
        (Spec(name="cosine", options={"flor": 0}), r"unknown option 'flor' of schedule 'cosine'; did you mean 'floor'\?"),
        (
            Spec(name="linear", options={"floor": 2}),
            r"schedule 'linear': floor = 2 is not valid; it is a fraction from 0 to 1",
        ),
        (Spec(name="linear", options={"floor": True}), r"floor = True is not valid"),
        (Spec(name="linear", options={"floor": "low"}), r"floor = 'low' is not valid"),
        (Spec(name="constant", options={"floor": 0.1}), r"unknown option 'floor' of schedule 'constant'"),
    ],
)
def test_a_wrong_schedule_is_refused_in_a_sentence(spec, says):
    with pytest.raises(InputError, match=says):
        build_schedule(spec, 0)
