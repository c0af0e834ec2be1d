"""`keyhole search` as a person runs it, with real workers: what it says, how it is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from searching_helpers import write_search

from keyhole.cli.main import run
from keyhole.core.config import Recipe
from keyhole.studies.cluster import Cluster
from keyhole.studies.execute import build_executor
from keyhole.studies.local import Local
from keyhole.studies.search.result import open_search
from keyhole.studies.search.sampler import point_name
from keyhole.studies.trial import Task

RATES = '[space]\n"train.rate" = { low = 1e-3, high = 1e-1, log = true, points = 4 }\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search that nobody disturbed, and what it said on stdout and on stderr."""
    folder = tmp_path_factory.mktemp("finished")
    source, out = write_search(folder, RATES, sampler="random", trials=4), folder / "out"
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        assert run(["search", str(source), "--out", str(out), "--workers", "1"]) == 0
    return out, stdout.getvalue(), stderr.getvalue()


def start(source, out, *more):
    command = [sys.executable, "-m", "keyhole", "search", str(source), "--out", str(out), "--workers", "1", *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy())


def table(out: Path):
    return [(trial.state, point_name(trial.settings), trial.value) for trial in open_search(out).trials]


def test_a_search_that_is_killed_goes_on_and_comes_to_the_same_table(finished, tmp_path):
    source, out = finished[0].parent / "mine.toml", tmp_path / "out"
    process = start(source, out)
    for line in process.stderr:
        if "trial 1 " in line:
            break
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert len(table(out)) < 4
    assert run(["search", str(out / "search.toml"), "--resume", "--workers", "1", "--quiet", "--json"]) == 0
    assert table(out) == table(finished[0])
    assert [state for state, *_ in table(out)] == ["complete"] * 4


def test_a_search_says_on_stdout_what_was_found_and_on_stderr_how_it_went(finished, capsys):
    out, stdout, stderr = finished
    assert "search out: 4 trials by random, 1 worker of one thread" in stderr
    assert "100.0%  trial" in stderr
    assert "4 trials: 4 complete. The lowest dev_loss is" in stdout
    assert "optimistic" in stdout
    assert f"keyhole study {out}/confirm.toml" in stdout
    assert Recipe.load(out / "best.toml").train.rate == open_search(out).best.settings["train.rate"]
    assert run(["search", str(out / "search.toml"), "--resume", "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    assert [trial["number"] for trial in found["trials"]] == [0, 1, 2, 3]
    assert found["best"]["recipe"] == str(out / "best.toml")
    assert set(found["files"]["charts"]) == {"trials", "settings"}


def test_a_search_without_any_value_ends_with_1_and_a_wrong_one_with_2(tmp_path, capsys):
    source = write_search(tmp_path, '[space]\n"data.block" = [5000, 6000]\n', sampler="grid")
    code = run(["search", str(source), "--out", str(tmp_path / "out"), "--quiet"])
    said = capsys.readouterr()
    assert code == 1, said
    assert "None came to a value" in said.out
    assert "trial 0: the text is too short for block 5000" in said.out
    assert run(["search", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == (
        f"keyhole: there is no search file {tmp_path}/none.toml; give a TOML file with [search] and [space]\n"
    )
    assert run(["search", str(source), "--out", str(tmp_path / "new"), "--on", "slurm"]) == 2
    assert "'slurm' is no place to train on; it may be local, ray, or ray://host:port" in capsys.readouterr().err


def test_tasks_are_taken_one_by_one_as_there_is_room_and_those_of_two_processes_take_two(tmp_path):
    """Each fails at once: what counts is when it is taken."""
    went = []

    def tasks():
        for name in ("a", "b", "c", "wide", "d"):
            went.append(f"take {name}")
            yield Task(
                kind="trial", name=name, study="s", arm=name, recipe={"wrong": {}}, processes=2 if name == "wide" else 1
            )

    with Local(tmp_path, 2) as local:
        local.run(tasks(), lambda event: went.append(f"{event.what} {event.task}"))
    assert went[:2] == ["take a", "take b"]
    places = {said: place for place, said in enumerate(went)}
    ended = [place for said, place in places.items() if said.startswith("failed")]
    assert len(ended) == 5
    for number, name in enumerate(("c", "wide")):
        assert sum(place < places[f"take {name}"] for place in ended) == number + 1
    assert sum(place < places["started wide"] for place in ended) == 3, "it waits until both places are free"
    assert places["take d"] > places["failed wide"]


def test_a_cluster_takes_what_is_still_being_thought_of_as_there_is_room_and_a_list_whole(tmp_path, monkeypatch):
    """What Ray would say is put in its place."""
    names = ("a", "b", "wide", "c")
    made = [
        Task(kind="trial", name=name, study="s", arm=name, recipe={}, processes=2 if name == "wide" else 1)
        for name in names
    ]
    went, going = [], []

    def told(self, seconds=None):
        name = going.pop(0)
        went.append(f"end {name}")
        return {"task": name, "what": "done"}

    def sent(self, order):
        went.append(f"take {order['task']['name']}")
        going.append(order["task"]["name"])

    monkeypatch.setattr(Cluster, "_next", told)
    monkeypatch.setattr(Cluster, "_send", sent)
    cluster = Cluster(tmp_path, workers=2)
    cluster.run(iter(made), lambda _: None)
    assert went == [
        "take a", "take b", "end a", "end b", "take wide", "end wide", "take c", "end c",
    ]  # fmt: skip
    went.clear()
    cluster.run(made, lambda _: None)
    assert went[:4] == [f"take {name}" for name in names]


def test_a_task_is_given_up_when_its_search_says_so(tmp_path):
    source = write_search(tmp_path, RATES, sampler="grid", trials=4)
    recipe = Recipe.load(source.parent / "base.toml").replace({"train.steps": 100_000, "train.eval_every": 100_000})
    task = Task(kind="trial", name="trials/0/seed-0", study="s", arm="a", recipe=recipe.model_dump())
    ended = []
    with build_executor("local", tmp_path, 1) as executor:

        def watch(event):
            if event.what == "progress":
                executor.stop(event.task)
            elif event.what != "started":
                ended.append(event.what)

        executor.run(iter([task]), watch)
    assert ended == ["stopped"]
