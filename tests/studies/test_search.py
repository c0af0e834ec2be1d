import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from search_helpers import BOTTOM, bowl, finish, plan

from keyhole.core.errors import InputError, StorageError
from keyhole.studies.search.engine import Search
from keyhole.studies.search.sampler import point_name

HERE = Path(__file__).parent


@pytest.fixture
def opened(tmp_path):
    """Searches that are closed when the test ends."""
    made = []

    def begin(asked, folder="search"):
        made.append(Search(asked, tmp_path / folder))
        return made[-1]

    yield begin
    for search in made:
        search.close()


def points(trials):
    return [point_name(trial.settings) for trial in trials]


def start(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    command = [sys.executable, "-W", "error", str(HERE / "search_driver.py"), str(folder), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_grid_takes_every_point_once_and_finds_the_best(opened):
    search = opened(plan("grid"))
    trials = finish(search)
    assert len(trials) == len(set(points(trials))) == 5 * 3 * 2
    assert set(points(trials)) == {point_name(point) for point in search.plan.axes.grid()}
    # Of the rates 1e-3, .00316, .01, .0316, .1 the fourth is the nearest to .02 in its logarithm.
    assert search.best.settings == {**BOTTOM, "train.rate": 0.0316228}
    assert search.ask(5) == []
    assert search.left == 0


def test_two_processes_at_once_take_every_point_of_a_grid_once(tmp_path, opened):
    processes = [start(tmp_path / "search", "grid", 1) for _ in range(2)]
    for process in processes:
        _, problems = process.communicate(timeout=120)
        assert (process.returncode, problems) == (0, ""), "silent, and no warning escapes"
    trials = opened(plan("grid")).trials()
    assert len(trials) == len(set(points(trials))) == 30
    assert {trial.state for trial in trials} == {"complete"}


def test_threads_that_ask_at_once_never_get_the_same_trial(opened):
    search = opened(plan("grid"))
    with ThreadPoolExecutor(6) as pool:
        asked = [proposal for some in pool.map(lambda _: search.ask(3), range(12)) for proposal in some]
    assert sorted(proposal.number for proposal in asked) == list(range(30))


def test_a_killed_search_goes_on_where_it_stopped_and_nothing_is_lost_or_repeated(tmp_path, opened):
    sampler, whole = "tpe", 20
    for kill_after in (3, 2):
        process = start(tmp_path / "search", sampler, 2, kill_after)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    search = opened(plan(sampler))
    before = search.trials()
    left_running = [trial.number for trial in before if trial.state == "running"]
    assert sum(trial.state == "complete" for trial in before) >= 5
    again = search.ask(len(left_running))
    assert [proposal.number for proposal in again] == left_running, "first come those that were running"
    assert all(proposal.attempt > 1 for proposal in again)
    assert [proposal.settings for proposal in again] == [before[number].settings for number in left_running]
    for proposal in again:
        search.tell(proposal.number, bowl(proposal.settings))
    after = finish(search)
    assert len(after) == len(set(points(after))) == whole
    assert {trial.state for trial in after} == {"complete"}
    assert after[: len(before)][0].value == before[0].value
    assert list((tmp_path / "search" / "askers").iterdir()) == [tmp_path / "search" / "askers" / search._me]


def test_a_trial_of_a_process_that_lives_is_not_handed_out_twice(opened):
    first, second = opened(plan("grid")), opened(plan("grid"))
    mine = first.ask(2)
    assert [proposal.number for proposal in second.ask(2)] == [2, 3]
    first.close()
    assert [proposal.number for proposal in second.ask(2)] == [proposal.number for proposal in mine]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_search_that_was_interrupted_proposes_what_it_would_have_proposed(sampler, opened):
    straight = finish(opened(plan(sampler), "straight"))
    first = opened(plan(sampler), "twice")
    finish(first, most=9)
    first.close()
    assert finish(opened(plan(sampler), "twice")) == straight
    other_seed = finish(opened(plan(sampler, seed=1), "other"))
    assert points(other_seed) != points(straight)


def test_the_model_finds_the_bottom_of_a_bowl_sooner_than_chance(opened):
    def best(sampler, seed):
        space = {"train.rate": {"low": 1e-5, "high": 1.0, "log": True}, "model.layers": {"low": 1, "high": 12}}
        space["model.position"] = ["rope", "learned", "sinusoidal"]
        search = opened(plan(sampler, space=space, seed=seed, trials=30), f"{sampler}{seed}")
        finish(search)
        return search.best.value

    chance, model = ([best(sampler, seed) for seed in range(3)] for sampler in ("random", "tpe"))
    assert sum(model) < 0.5 * sum(chance)
    assert sum(a < b for a, b in zip(model, chance, strict=True)) >= 2


def test_more_trials_may_be_asked_for_but_nothing_else_may_change(opened):
    finish(opened(plan("random", trials=4)))
    assert len(finish(opened(plan("random", trials=7)))) == 7
    with pytest.raises(InputError, match=r"holds another search \(space changed\)"):
        opened(plan("random", space={"model.layers": {"low": 2, "high": 5}}))
    with pytest.raises(InputError, match=r"holds another search \(recipe, sampler changed\)"):
        opened(plan("tpe", given={"train.steps": 11}))


def test_a_small_space_is_walked_once_and_then_the_search_ends(opened):
    for sampler in ("random", "tpe"):
        small = {"model.layers": {"low": 1, "high": 3}, "model.position": ["rope", "learned"]}
        search = opened(plan(sampler, space=small, trials=50), sampler)
        while asked := search.ask(2):
            for proposal in asked:
                search.tell(proposal.number, float(proposal.settings["model.layers"]))
        assert len(set(points(search.trials()))) == len(search.trials()) == 6


def test_points_that_make_no_recipe_are_passed_over(opened):
    space = {"model.heads": [3, 4, 8], "model.width": [96, 128]}
    search = opened(plan("grid", space=space))
    found = []
    while asked := search.ask():
        search.tell(asked[0].number, 1.0)
        found.append(tuple(asked[0].settings.values()))
    assert found == [(3, 96), (4, 96), (4, 128), (8, 96), (8, 128)], "3 heads do not divide 128"
    hopeless = opened(plan("random", space={"model.heads": [3, 5], "model.width": [64, 128]}), "hopeless")
    with pytest.raises(
        InputError, match=r"no combination of this space makes a recipe.*width .* is not divisible by heads"
    ):
        hopeless.ask()


def test_a_diverged_trial_is_the_worst_and_a_failed_one_keeps_its_reason(opened):
    search = opened(plan("random", trials=4))
    asked = search.ask(4)
    worst = search.tell(asked[0].number, math.nan, note="the loss is no number")
    assert (worst.value, worst.diverged, worst.failure) == (math.inf, True, "the loss is no number")
    assert search.tell(asked[1].number, failure="out of memory").failure == "out of memory"
    assert search.best is None
    assert search.tell(asked[2].number, 5.0).state == "complete"
    search.tell(asked[3].number, 7.0)
    assert search.best.number == asked[2].number
    assert search.ask() == [], "a failed trial is not tried again, nor counted anew"


def test_the_model_goes_on_over_diverged_failed_pruned_and_running_trials(opened):
    search = opened(plan("tpe", trials=16, pruner="median"))
    for number in range(16):
        (asked,) = search.ask()
        search.report(number, 1, math.inf if number % 4 == 0 else 1.0)
        if number % 4 == 0:
            search.tell(number, math.inf)
        elif number % 4 == 1:
            search.tell(number, failure="no memory")
        elif number % 4 == 2:
            search.tell(number, pruned=True)
        assert asked.number == number
    assert [trial.state for trial in search.trials()[:4]] == ["complete", "failed", "pruned", "running"]


def test_the_highest_may_be_the_best(opened):
    search = opened(plan("random", trials=3, goal="highest", objective="accuracy"))
    for value, proposal in zip((0.2, 0.9, math.nan), search.ask(3), strict=True):
        search.tell(proposal.number, value)
    assert (search.best.value, search.trials()[2].value) == (0.9, -math.inf)


def test_repeats_are_one_trial_with_a_recipe_for_each_seed(opened):
    search = opened(plan("random", trials=2, repeats=3))
    (asked,) = search.ask()
    assert [(recipe.train.seed, recipe.data.seed) for recipe in asked.recipes] == [(0, 0), (1, 1), (2, 2)]
    assert {recipe.train.rate for recipe in asked.recipes} == {asked.settings["train.rate"]}
    assert {recipe.train.steps for recipe in asked.recipes} == {10}, "[set] holds in every trial"
    assert not search.report(asked.number, 1, math.nan, repeat=1)
    with pytest.raises(InputError, match="1 values for repeats = 3"):
        search.tell(asked.number, 1.0)
    assert search.tell(asked.number, [1.0, 2.0, 6.0]).value == 3.0
    assert search.trials()[0].values == (1.0, 2.0, 6.0)


@pytest.mark.parametrize("pruner", ["median", "halving"])
def test_a_pruner_ends_the_worst_trial_and_never_the_best(pruner, opened):
    search = opened(plan("random", trials=8, pruner=pruner))
    ended = []
    for rank, proposal in enumerate(search.ask(8)):
        for step in range(1, 28):
            if search.report(proposal.number, step, rank + 1 / step):
                search.tell(proposal.number, pruned=True)
                ended.append((rank, step))
                break
        else:
            search.tell(proposal.number, float(rank))
    ranks = [rank for rank, _ in ended]
    assert 7 in ranks
    assert 0 not in ranks
    assert all(step >= 3 for _, step in ended) or pruner == "halving"
    pruned = [trial for trial in search.trials() if trial.state == "pruned"]
    assert len(pruned) == len(ranks)
    assert search.best.number == 0


def test_without_a_pruner_no_trial_ends_early(opened):
    search = opened(plan("random", trials=8))
    for rank, proposal in enumerate(search.ask(8)):
        assert not any(search.report(proposal.number, step, float(rank)) for step in range(1, 20))
        assert not search.report(proposal.number, 20, math.nan)
        search.tell(proposal.number, float(rank))


def test_what_cannot_be_told_is_refused(opened):
    search = opened(plan("random", trials=2))
    search.ask()
    with pytest.raises(InputError, match="there is no trial 7; 1 were asked for"):
        search.tell(7, 1.0)
    with pytest.raises(InputError, match="only one of them"):
        search.tell(0)
    with pytest.raises(InputError, match="only one of them"):
        search.tell(0, 1.0, pruned=True)
    search.tell(0, 1.0)
    with pytest.raises(InputError, match="trial 0 has ended before"):
        search.tell(0, 2.0)


def test_a_damaged_record_is_told_in_a_sentence(tmp_path, opened):
    finish(opened(plan("random", trials=1)))
    (tmp_path / "search" / "trials.sqlite3").write_bytes(b"not a database, but long enough to look like a file of one" * 99)
    with pytest.raises(StorageError, match=r"trials.sqlite3 cannot be used: file is not a database"):
        opened(plan("random", trials=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="opening the search directory"):
        opened(plan("random"), "file")
