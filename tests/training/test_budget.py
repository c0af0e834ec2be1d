import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from training_helpers import tiny, write_text

from keyhole.core.config import Train
from keyhole.training.budget import DEFAULT_STEPS, Budget, Spent, due
from keyhole.training.loop import train


def fires(every, times, steps, progress):
    """At which steps something is due in a run whose progress after step n is progress(n)."""
    return [n for n in range(1, steps + 1) if due(every, times, n, progress(n - 1), progress(n))]


@given(times=st.integers(1, 200), steps=st.integers(1, 3000))
@example(times=100, steps=100)
@example(times=10, steps=1000)
@example(times=7, steps=49)
def test_something_due_so_many_times_in_a_run_of_steps_is_due_exactly_so_often(times, steps):
    found = fires(0, times, steps, lambda n: n / steps)
    assert len(found) == min(times, steps)
    assert found[-1] == steps
    if steps % times == 0:
        assert found == list(range(steps // times, steps + 1, steps // times))


@given(
    times=st.integers(1, 50),
    amount=st.integers(1, 10**15),
    pieces=st.lists(st.integers(1, 10**13), min_size=1, max_size=300),
)
@example(times=10, amount=10**12, pieces=[10**11] * 9 + [10**11 - 1, 1])
def test_something_due_is_never_due_more_often_and_always_at_the_end_whatever_is_counted(times, amount, pieces):
    spent, found, steps = 0, [], 0
    for piece in pieces:
        before, after = spent / amount, (spent + piece) / amount
        steps, spent = steps + 1, spent + piece
        found.append(due(0, times, steps, before, after))
        if after >= 1:
            break
    assert sum(found) <= times
    assert found[-1] or spent < amount


@given(every=st.integers(1, 50), steps=st.integers(1, 500))
def test_something_due_every_so_many_steps_is_due_then_and_at_the_end(every, steps):
    wanted = sorted({*range(every, steps + 1, every), steps})
    assert fires(every, 3, steps, lambda n: n / steps) == wanted


@pytest.mark.parametrize(
    ("train", "budget"),
    [
        (Train(steps=5), Budget("steps", 5)),
        (Train(tokens=500), Budget("tokens", 500)),
        (Train(seconds=0.5), Budget("seconds", 0.5)),
        (Train(), Budget("steps", DEFAULT_STEPS)),
    ],
)
def test_a_budget_is_what_the_recipe_names(train, budget):
    assert Budget.of(train) == budget
    assert Budget.of(train).progress(Spent()) == 0
    assert Budget.of(train).progress(Spent(budget.amount, budget.amount, budget.amount)) == 1


def test_a_run_of_steps_takes_exactly_these(folder):
    run = train(tiny(folder, train_steps=7), folder / "run", quiet=True)
    assert run.step == 7
    assert run.metrics[-1]["tokens"] == 7 * 4 * 8


def test_a_run_of_tokens_ends_with_the_step_that_reaches_them(folder):
    run = train(tiny(folder, train_tokens=4 * 8 * 3 + 1), folder / "run", quiet=True)
    assert run.step == 4


def test_only_targets_that_count_are_counted(folder):
    run = train(tiny(folder, data_rows="lines", data_block=48, train_steps=3), folder / "run", quiet=True)
    assert 0 < run.metrics[-1]["tokens"] < 3 * 4 * 48
    whole = (len(line) + 1 for line in (folder / "text.txt").read_text().splitlines())
    assert run.metrics[-1]["tokens"] <= sum(whole)


def test_a_run_of_seconds_stops_soon_after_them(folder):
    run = train(tiny(folder, train_seconds=0.2, train_eval_every=0), folder / "run", quiet=True)
    spent = run.checkpoint.state["seconds"]
    assert 0.2 <= spent < 0.5
    assert run.step > 5


def test_a_run_measures_ten_times_and_logs_a_hundred_times_when_the_recipe_does_not_say(tmp_path):
    write_text(tmp_path)
    recipe = tiny(tmp_path, train_steps=250, train_eval_every=0, train_log_every=0, train_save_every=0)
    rows = train(recipe, tmp_path / "run", quiet=True).metrics
    assert len(rows) == 100
    assert [row["step"] for row in rows if "dev_loss" in row] == list(range(25, 251, 25))
