import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keyhole.studies.execute import build_executor
from keyhole.studies.local import TRIES, Local
from tests.studies.task_helpers import (
    alive,
    as_held,
    endings,
    held,
    kill,
    new_study,
    processes_below,
    step_saved,
    trial,
    wait_until,
)
from tests.training.training_helpers import ROOT, differences, end


def carry_out(root, tasks, watch=None, workers=2):
    events = []

    def seen(event):
        events.append(event)
        if watch is not None:
            watch(event)

    with Local(root, workers) as local:
        local.run(tasks, seen)
    return events


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A study whose held training was never held, and one whose part prints."""
    root = new_study(tmp_path_factory.mktemp("undisturbed"))
    (root.parent / "gate").touch()
    tasks = [held(root, "a", 0, root.parent / "gate"), trial(root, "chatty", model_mixer="code/parts.py:Chatty")]
    assert set(endings(carry_out(root, tasks)).values()) == {"done"}
    return root


def test_one_task_that_fails_is_told_in_a_sentence_and_the_rest_goes_on(tmp_path):
    root = new_study(tmp_path)
    tasks = [trial(root, arm, model_mixer=f"code/parts.py:{arm}") for arm in ("Broken", "Deadly", "Nothing", "Chatty")]
    events = carry_out(root, tasks)
    assert endings(events) == {
        "runs/Broken/seed-0": "failed",
        "runs/Deadly/seed-0": "failed",
        "runs/Nothing/seed-0": "failed",
        "runs/Chatty/seed-0": "done",
    }
    said = {event.task: event.message for event in events if event.what == "failed"}
    assert said["runs/Broken/seed-0"] == (
        "mixer code/parts.py:Broken raised ArithmeticError: the part of arm broken divides by nothing"
    )
    assert "has no 'Nothing'" in said["runs/Nothing/seed-0"]
    assert said["runs/Deadly/seed-0"].startswith(f"its worker ended {TRIES} times (signal 9")
    assert [event.task for event in events if event.what == "moved"] == ["runs/Deadly/seed-0"] * (TRIES - 1)


def test_what_a_part_prints_goes_to_the_log(undisturbed):
    said = "".join(path.read_text() for path in (undisturbed / "logs").iterdir())
    assert "hello from a part" in said
    assert '{"task": "nobody", "what": "done"}' in said


def test_a_task_whose_worker_is_killed_goes_on_with_another_and_ends_the_same(tmp_path, undisturbed):
    root, gate = new_study(tmp_path), tmp_path / "gate"
    task = held(root, "a", 0, gate)
    killed = []

    def watch(event):
        if event.what == "progress" and not killed:
            wait_until(lambda: step_saved(root, task, 6), "the second save")
            killed.extend(processes_below(os.getpid()))
            kill(killed[0], signal.SIGKILL)
            gate.touch()

    events = carry_out(root, [task], watch, workers=1)
    assert len(killed) == 1
    assert [event.what for event in events if event.what != "progress"] == ["started", "moved", "started", "done"]
    moved = next(event.message for event in events if event.what == "moved")
    assert moved == "its worker ended (signal 9, as where memory runs out); going on with another"
    assert "resuming" in "".join(path.read_text() for path in (root / "logs").iterdir())
    assert as_held(task, undisturbed, root) == []


def test_a_line_that_a_killed_worker_left_half_does_not_hold_the_study_up(tmp_path, monkeypatch):
    root = new_study(tmp_path)
    half = 'import sys; sys.stdin.readline(); sys.stdout.write(\'{"task": "runs/a/se\'); sys.stdout.flush()'
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: popen([sys.executable, "-c", half], **given))
    events = carry_out(root, [trial(root, "a")], workers=1)
    assert [event.what for event in events] == ["moved", "failed"]


def test_a_study_that_is_killed_leaves_no_worker_behind_and_its_training_saved(tmp_path, undisturbed):
    root, gate = new_study(tmp_path), tmp_path / "gate"
    task = held(root, "a", 0, gate)
    (tmp_path / "task.json").write_text(json.dumps(task.to_dict()))
    code = """if True:
        import json, sys
        from pathlib import Path
        from keyhole.studies.local import Local
        from keyhole.studies.trial import Task
        with Local(Path(sys.argv[1]), 1) as local:
            local.run([Task(**json.loads(Path(sys.argv[2]).read_text()))], lambda event: print(event.what, flush=True))
    """
    study = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(tmp_path / "task.json")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with study:
        wait_until(lambda: step_saved(root, task, 6), "the second save")
        (worker,) = processes_below(study.pid)
        study.kill()
    gate.touch()
    wait_until(lambda: not alive(worker), "the end of the worker")
    assert task.result(root) is None
    carry_out(root, [task], workers=1)
    assert as_held(task, undisturbed, root) == []


def test_a_task_that_is_no_longer_wanted_is_given_up_and_the_next_one_begins(tmp_path):
    root = new_study(tmp_path)
    long, short = trial(root, "long", train_steps=10**6, train_log_every=10), trial(root, "short")
    events = []
    with Local(root, 1) as local:

        def watch(event):
            events.append(event)
            if event.what == "progress" and event.task == long.name:
                local.stop(long.name)

        local.run([long, short], watch)
    assert endings(events) == {long.name: "stopped", short.name: "done"}
    assert short.result(root) is not None
    assert long.result(root) is None


def test_there_must_be_workers_and_a_place_to_run(tmp_path):
    from keyhole.core.errors import InputError

    with pytest.raises(InputError, match="0 workers can do nothing; give 1 or more"):
        build_executor("local", tmp_path, 0)
    with pytest.raises(InputError, match="'slurm' is no place to train on; it may be local, ray, or ray://host:port"):
        build_executor("slurm", tmp_path, None)


@pytest.mark.slow
def test_a_task_of_two_processes_is_what_a_person_would_start_with_torchrun(tmp_path):
    root = new_study(tmp_path)
    task = trial(root, "chatty", processes=2, model_mixer="code/parts.py:Chatty")
    refused = trial(root, "odd", processes=2, train_batch=5)
    events = carry_out(root, [task, refused])
    assert endings(events) == {task.name: "done", refused.name: "failed"}
    message = next(event.message for event in events if event.what == "failed")
    assert message == "a batch of 5 rows cannot be shared by 2 processes; make train.batch a multiple of 2"
    found = task.result(root)
    assert found["memory_mb"] is None
    by_hand = tmp_path / "by hand"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "keyhole"]
    command += ["train", str(root / task.name / "recipe.toml"), "--out", str(by_hand)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert differences(end(root / task.name), end(by_hand)) == []
    assert list(root.glob(".*.toml")) == []


@pytest.mark.slow
def test_a_worker_killed_over_a_task_of_two_processes_leaves_none_of_them_behind(tmp_path):
    root = new_study(tmp_path)
    task = trial(root, "long", processes=2, train_steps=10**6, train_log_every=10)
    events, family = [], []
    with Local(root, 2) as local:

        def watch(event):
            events.append(event)
            if event.what != "progress":
                return
            if family:
                local.stop(task.name)
                return
            (worker,) = filter(_is_worker, processes_below(os.getpid()))
            family.extend(processes_below(worker))
            kill(worker, signal.SIGKILL)
            wait_until(lambda: not any(map(alive, family)), "the end of what the worker had started")

        local.run([task], watch)
    assert len(family) >= 3  # torchrun and two that train
    assert [event.what for event in events if event.what != "progress"] == ["started", "moved", "started", "stopped"]
    first, second = [event.row["step"] for event in events if event.what == "progress"][:2]
    assert second > first


def _is_worker(pid: int) -> bool:
    return b"keyhole.studies.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
