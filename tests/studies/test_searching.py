"""Whole searches: what is proposed when, what ends early, what is kept. Most play what a training tells; some train."""

import json
import math

import pytest
from search_helpers import bowl
from searching_helpers import Here, Played, write_search

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError
from keyhole.core.files import read_json
from keyhole.record.create import only_writer
from keyhole.record.run import open_run
from keyhole.studies.plan import load_plan
from keyhole.studies.search import conduct
from keyhole.studies.search.conduct import search
from keyhole.studies.search.engine import Search
from keyhole.studies.search.plan import OBJECTIVES, SearchPlan
from keyhole.studies.search.report import caution, headline, next_steps, write_search_report
from keyhole.studies.search.result import open_search
from keyhole.studies.search.sampler import point_name
from keyhole.studies.study import StudyInterrupted


@pytest.fixture
def played(monkeypatch):
    """Searches with played trainings: `played(source, out, slots=2)`; the executor stands in `.executor`."""

    def carry_out(source, out, *, resume=False, trials=None, **how):
        def build(on, root, workers):
            carry_out.executor = Played(root, **how)
            return carry_out.executor

        monkeypatch.setattr(conduct, "build_executor", build)
        return search(source, out, resume=resume, trials=trials, quiet=True)

    return carry_out


@pytest.fixture
def here(monkeypatch):
    """Trainings in this process."""
    monkeypatch.setattr(conduct, "build_executor", lambda _, root, __: Here(root))


def table(result):
    return [(trial.state, point_name(trial.settings), trial.value, trial.values) for trial in result.trials]


def test_every_point_of_a_grid_is_trained_once_and_the_best_is_written_as_a_recipe(played, tmp_path):
    source, out = write_search(tmp_path, sampler="grid", pruner="none"), tmp_path / "out"
    result = played(source, out, slots=2)
    assert result.counts == {"complete": 12}
    assert played.executor.count("take") == played.executor.count("done") == 12
    assert [trial.value for trial in result.trials] == [pytest.approx(bowl(trial.settings)) for trial in result.trials]
    best = Recipe.load(out / "best.toml")
    assert (best.train.rate, best.model.layers, best.model.position.name) == (0.01, 3, "rope")
    assert (best.data.block, best.train.steps) == (8, 12), "what was not searched is the recipe's"


def test_a_trial_is_proposed_when_there_is_room_for_it_and_no_sooner(played, tmp_path, monkeypatch):
    running = []
    ask = Search.ask

    def asked(self, count=1):
        running.append(sum(trial.state == "running" for trial in self.trials()))
        return ask(self, count)

    monkeypatch.setattr(Search, "ask", asked)
    played(write_search(tmp_path, sampler="tpe", trials=9, pruner="none"), tmp_path / "out", slots=2)
    assert max(running) == 1, "of two places one is free"
    assert len(running) >= 9


def test_the_model_has_been_told_of_all_that_ended_when_it_proposes(played, tmp_path):
    source = write_search(tmp_path, sampler="tpe", trials=12, pruner="none")
    result = played(source, tmp_path / "out")
    with Search(SearchPlan.load(source), tmp_path / "straight") as straight:
        while asked := straight.ask():
            straight.tell(asked[0].number, bowl(asked[0].settings))
        assert [point_name(trial.settings) for trial in straight.trials()] == [
            point_name(trial.settings) for trial in result.trials
        ]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_hopeless_trial_is_given_up_and_the_best_never(played, tmp_path, slots):
    source = write_search(tmp_path, sampler="grid")
    result = played(source, tmp_path / "out", slots=slots)
    assert result.counts["pruned"] >= 2
    assert result.counts["pruned"] == played.executor.count("stopped")
    assert result.best.settings == {"train.rate": 0.01, "model.layers": 3, "model.position": "rope"}
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert min(bowl(trial.settings) for trial in pruned) > bowl(result.best.settings)
    assert f"{len(pruned)} pruned" in headline(result)


def test_a_trial_that_has_come_to_its_end_is_not_given_up_there(played, tmp_path):
    result = played(write_search(tmp_path, sampler="grid"), tmp_path / "out", ends={"trials/6/seed-0": "late"})
    assert (result.trials[6].state, result.best.number) == ("complete", 6)


def test_a_trial_of_several_seeds_counts_by_their_mean_and_ends_as_one(played, tmp_path):
    source = write_search(tmp_path, sampler="grid", repeats=3, pruner="none")
    ends = {"trials/1/seed-1": "failed", "trials/2/seed-0": "diverged"}
    result = played(source, tmp_path / "out", ends=ends)
    first, second, third = result.trials[:3]
    assert first.values == tuple(pytest.approx(bowl(first.settings) + 0.01 * seed) for seed in range(3))
    assert first.value == pytest.approx(bowl(first.settings) + 0.01)
    assert (second.state, second.failure) == ("failed", "there is not enough memory")
    assert (third.value, third.diverged, third.failure) == (math.inf, True, "the loss is no number")
    assert third not in result.ranked
    taken = [said.split()[1] for said in played.executor.said if said.startswith("take")]
    assert "trials/1/seed-2" not in taken, "a trial that failed is not trained further"
    assert "trials/2/seed-1" not in taken
    assert headline(result).startswith("12 trials: 10 complete, 1 diverged, 1 failed.")


def test_the_other_seeds_of_a_trial_that_failed_are_stopped(played, tmp_path):
    source = write_search(tmp_path, sampler="random", trials=1, repeats=2, pruner="none")
    result = played(source, tmp_path / "out", slots=2, ends={"trials/0/seed-0": "failed"})
    assert played.executor.said[-2:] == ["failed trials/0/seed-0", "stopped trials/0/seed-1"]
    assert result.best is None
    assert "None came to a value" in headline(result)
    assert not (tmp_path / "out" / "best.toml").exists()
    with pytest.raises(InputError, match=r"no trial of .* came to a value"):
        _ = result.best_recipe


@pytest.mark.parametrize(("sampler", "pruner"), [("grid", "none"), ("random", "median"), ("tpe", "median")])
def test_an_interrupted_search_comes_to_the_same_table(played, tmp_path, sampler, pruner):
    source = write_search(tmp_path, sampler=sampler, trials=12, pruner=pruner)
    straight = played(source, tmp_path / "straight")
    out = tmp_path / "out"
    for enough in (3, 5):
        with pytest.raises(StudyInterrupted, match=r"Go on with: keyhole search .*out/search.toml --resume"):
            played(source, out, resume=enough == 5, enough=enough)
    again = played(out / "search.toml", out, resume=True)
    assert table(again) == table(straight)
    assert table(open_search(out)) == table(straight)


def test_what_was_trained_before_the_search_was_stopped_is_not_trained_again(played, tmp_path):
    source, out = write_search(tmp_path, sampler="grid", repeats=2, pruner="none"), tmp_path / "out"
    with pytest.raises(StudyInterrupted):
        played(source, out, enough=5)
    result = played(source, out, resume=True)
    taken = [said for said in played.executor.said if said.startswith("take")]
    assert taken[0] == "take trials/2/seed-1", "its seed 0 is done, and trial 2 goes on under its number"
    assert len(taken) == 2 * 12 - 5
    assert result.trials[2].attempts == 2
    played(source, out, resume=True)
    assert played.executor.said == [], "nothing is left to do"


def test_trials_may_be_added(played, tmp_path):
    source, out = write_search(tmp_path, sampler="random", trials=3), tmp_path / "out"
    first = played(source, out)
    more = played(out / "search.toml", out, resume=True, trials=5)
    assert len(more.trials) == 5
    assert table(more)[:3] == table(first)
    assert open_search(out).plan.trials == 5


def test_the_study_that_confirms_the_best_uses_seeds_that_chose_nothing(played, tmp_path):
    source = write_search(tmp_path, sampler="grid", repeats=2, pruner="none")
    result = played(source, tmp_path / "out")
    study = load_plan(tmp_path / "out" / "confirm.toml")
    assert study.seeds == (2, 3, 4, 5, 6)
    assert (study.baseline, [arm.name for arm in study.arms]) == ("base", ["base", "best"])
    assert study.arm("best").recipe.train.rate == result.best.settings["train.rate"]
    assert study.arm("base").recipe == result.plan.recipe
    assert "optimistic" in caution(result)
    assert next(iter(next_steps(result).values())).startswith(f"keyhole study {tmp_path}/out/confirm.toml")


def test_where_no_study_can_confirm_the_best_it_is_said_why(played, tmp_path):
    space = '[space]\n"train.steps" = { low = 20, high = 30, step = 10 }\n'
    result = played(write_search(tmp_path, space, sampler="grid", pruner="none"), tmp_path / "out")
    assert result.unconfirmed == "train.steps was searched, and a study compares under one budget"
    assert not (tmp_path / "out" / "confirm.toml").exists()
    assert "No study confirms it" in write_search_report(result).markdown.read_text()


def test_a_report_tells_of_every_trial_and_draws_them(played, tmp_path):
    source = write_search(tmp_path, sampler="grid", repeats=2)
    result = played(source, tmp_path / "out", ends={"trials/3/seed-0": "diverged"})
    written = write_search_report(result)
    text = written.markdown.read_text()
    assert text.count("\n| ") == 12 + 2
    assert "the loss is no number" in text
    assert "pruned at step" in text
    assert set(written.charts) == {"trials", "settings"}
    for path in written.charts.values():
        assert path.read_text().startswith("<svg")
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for key in ("train.rate", "model.layers", "model.position"):
        assert key in written.charts["settings"].read_text()


def test_what_cannot_be_carried_out_is_refused_in_a_sentence(played, tmp_path):
    source, out = write_search(tmp_path / "source", sampler="random", trials=2), tmp_path / "out"
    with pytest.raises(InputError, match=r"there is no search to resume in .*out; leave --resume out"):
        played(source, out, resume=True)
    assert not out.exists(), "what never began leaves nothing behind"
    played(source, out)
    with pytest.raises(InputError, match="holds a search; add --resume to go on with it, or give --out"):
        played(source, out)
    with only_writer(out, "search"), pytest.raises(InputError, match="another process is carrying out a search in"):
        played(source, out, resume=True)
    write_search(source.parent, sampler="random", trials=2, seed=1)
    before = (out / "search.toml").read_text()
    with pytest.raises(InputError, match=r"out holds another search \(seed changed\)"):
        played(source, out, resume=True)
    assert (out / "search.toml").read_text() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match=r"full is not empty"):
        played(source, tmp_path / "full")
    with pytest.raises(InputError, match=r"is no search: it has no search.toml"):
        open_search(tmp_path / "full")
    hopeless = write_search(tmp_path / "hopeless", '[space]\n"model.heads" = [3, 5]\n', sampler="grid")
    with pytest.raises(InputError, match="no combination of this space makes a recipe"):
        played(hopeless, tmp_path / "none")
    assert not (tmp_path / "none").exists()


PARTS = """from torch import nn


class Scaled(nn.Module):
    def __init__(self, width, heads, block, by=1.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by * x
"""


def test_parts_of_the_user_s_are_kept_and_the_search_repeats_itself_elsewhere(here, tmp_path):
    space = '[space]\n"model.mixer" = [{ name = "my.py:Scaled", by = 2.0 }, "softmax"]\n'
    source = write_search(tmp_path / "source", space, sampler="grid")
    (source.parent / "my.py").write_text(PARTS)
    result = search(source, tmp_path / "out", quiet=True)
    assert result.counts == {"complete": 2}
    assert open_run(result.paths(result.trials[0])[0]).recipe.model.mixer.options == {"by": 2.0}
    (source.parent / "my.py").write_text(PARTS + "# another\n")
    with pytest.raises(InputError, match=r"my.py changed since .*out was started; resume with .*search.toml"):
        search(source, tmp_path / "out", resume=True, quiet=True)
    again = search(tmp_path / "out" / "search.toml", tmp_path / "again", quiet=True)
    assert table(again) == table(result)
    (tmp_path / "out" / "code" / "my.py").write_text(PARTS + "# another\n")
    with pytest.raises(InputError, match=r"holds another search \(code changed\)"):
        search(tmp_path / "out" / "search.toml", resume=True, quiet=True)


def test_a_part_that_lies_beside_the_search_is_found_where_the_recipe_lies_elsewhere(here, tmp_path):
    write_search(tmp_path / "source")
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "my.py").write_text(PARTS)
    (aside / "mine.toml").write_text(
        '[search]\nrecipe = "../source/base.toml"\nsampler = "grid"\n'
        '[space]\n"train.batch" = [2, 4]\n[set]\n"model.mixer" = "my.py:Scaled"\n'
    )
    result = search(aside / "mine.toml", tmp_path / "out", quiet=True)
    assert result.counts == {"complete": 2}
    assert Recipe.load(tmp_path / "out" / "best.toml").model.mixer.name == "code/my.py:Scaled"


def test_every_objective_is_a_number_that_a_training_is_measured_by(here, tmp_path):
    source = write_search(tmp_path, sampler="random", trials=1, objective="accuracy")
    result = search(source, tmp_path / "out", quiet=True)
    found = read_json(result.paths(result.best)[0] / "result.json")
    measured = {key for key, value in found.items() if isinstance(value, int | float)}
    assert OBJECTIVES.keys() == measured - {"dev_tokens"}, "all but how much is read, which no setting changes"
    assert result.best.value == found["accuracy"]


def test_an_objective_that_a_model_has_not_fails_its_trial_with_the_reason(here, tmp_path):
    space = '[space]\n"model.mixer" = ["my.py:Scaled", "softmax"]\n'
    (tmp_path / "my.py").write_text(PARTS)
    result = search(write_search(tmp_path, space, sampler="grid", objective="flops"), tmp_path / "out", quiet=True)
    assert result.trials[0].failure == "it has no flops"
    assert result.best.number == 1


def test_a_wild_rate_diverges_and_is_the_worst_and_a_trained_trial_is_pruned(here, tmp_path):
    space = '[space]\n"train.rate" = [0.01, 0.02, 0.03, 0.005, 1e-6, 1e9]\n'
    base = {"train": {"optimizer": "sgd", "clip": 0.0, "eval_every": 2}}
    result = search(write_search(tmp_path, space, base, sampler="grid"), tmp_path / "out", quiet=True)
    assert [trial.state for trial in result.trials][:4] == ["complete"] * 4
    assert result.trials[4].state == "pruned"
    assert len(read_rows(result, 4)) < 12
    assert result.trials[5].diverged or result.trials[5].state == "pruned"
    assert result.best.number < 4


def read_rows(result, number):
    return (result.paths(result.trials[number])[0] / "metrics.jsonl").read_text().splitlines()


def test_a_search_as_json_is_plain(played, tmp_path):
    result = played(write_search(tmp_path, sampler="grid"), tmp_path / "out", ends={"trials/0/seed-0": "diverged"})
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["best"]["settings"] == result.best.settings
    assert plain["trials"][0]["reason"] == "the loss is no number"
    assert {trial["state"] for trial in plain["trials"]} == {"complete", "pruned", "diverged"}
