"""One task of a study, carried out: a training with its measurements, or the audit of an arm before it trains.

A task is plain data, so that it can go to another process or another machine. What it finds is a file in the study's
directory; a task whose file is there is done, and is never carried out again.

    audits/ARM.json                  the findings about an arm's model
    runs/ARM/seed-N/                 a run directory, with trial.json (whose it is) and result.json (what was measured)
    rates/ARM/rate-R-seed-N/         the same, in the search of a rate
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, KeyholeError, RunStopped
from keyhole.core.files import read_json, write_atomically, write_json
from keyhole.core.findings import Finding

RESULT, TRIAL = "result.json", "trial.json"
SAVING = 60.0
"""Seconds within which a training that has lost its worker saves and ends."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be done, in plain JSON types. Its name is its place in the study's directory."""

    kind: Literal["audit", "trial"]
    name: str
    study: str
    arm: str
    recipe: dict[str, Any]
    seed: int = 0
    processes: int = 1
    measure: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names what the result depends on: a result of another task is no result of this one."""
        known = [self.kind, self.recipe, self.processes, self.measure]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def place(self, root: Path) -> Path:
        """Where its result will stand."""
        return root / f"{self.name}.json" if self.kind == "audit" else root / self.name / RESULT

    def result(self, root: Path) -> dict[str, Any] | None:
        """What it found, if it has been carried out."""
        place = self.place(root)
        if not place.is_file():
            return None
        try:
            found = read_json(place)
        except KeyholeError:
            return None  # a damaged result is made again; the run beside it is not trained again
        return found if isinstance(found, dict) and found.get("digest") == self.digest else None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a task."""

    task: str
    what: Literal["started", "progress", "done", "failed", "stopped", "moved"]
    progress: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)
    message: str = ""


Tell = Callable[[float, dict[str, Any]], None]
"""Told how far a training is, and its last logged row. May raise to stop it."""


class Telling:
    """A display that hands what it is shown on to whoever watches the study."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def note(self, text: str) -> None:
        """Keep a line in the worker's log."""
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def update(self, row: dict[str, Any], progress: float) -> None:
        """Hand a row on."""
        self._tell(progress, row)

    def close(self) -> None:
        """Nothing to end."""


def carry_out(task: Task, root: Path, tell: Tell) -> dict[str, Any]:
    """Do a task in a study's directory, going on where an earlier try was stopped; returns what it found."""
    if (found := task.result(root)) is not None:
        return found
    recipe = Recipe.parse(task.recipe, folder=root)
    found = _audit(recipe) if task.kind == "audit" else _trial(task, recipe, root / task.name, tell)
    found = {"digest": task.digest, **found}
    write_json(task.place(root), found)
    return found


def _audit(recipe: Recipe) -> dict[str, Any]:
    from keyhole.audits.recipe import audit_recipe
    from keyhole.text import open_dataset

    vocab = open_dataset(recipe.data, recipe.folder).vocab
    return {"findings": [finding.to_dict() for finding in audit_recipe(recipe, vocab)]}


def _trial(task: Task, recipe: Recipe, out: Path, tell: Tell) -> dict[str, Any]:
    from keyhole.record.metrics import read_metrics
    from keyhole.record.run import open_run
    from keyhole.studies.measure import Peak, measure

    before, peak = read_metrics(out), Peak()
    try:
        _train(task, recipe, out, tell)
    except RunStopped as stopped:
        # A training that diverges does so again: this is a result, not a failure to get one.
        return {"state": "diverged", "message": str(stopped), "finding": stopped.finding.to_dict()}
    finally:
        if out.is_dir():
            write_json(out / TRIAL, {"study": task.study, "arm": task.arm, "seed": task.seed})
    # Of several processes this one only watched, and a run that was trained before is not trained again: neither says
    # what memory training takes.
    trained = task.processes == 1 and len(read_metrics(out)) > len(before)
    return {"state": "done", **measure(open_run(out), task.measure, peak if trained else None)}


def _train(task: Task, recipe: Recipe, out: Path, tell: Tell) -> None:
    from keyhole.training.loop import train

    _wait_for_another(out)
    if task.processes == 1:
        train(recipe, out, resume=(out / "recipe.toml").is_file(), display=Telling(tell))
    else:
        _train_together(task, recipe, out, tell)


def _wait_for_another(out: Path) -> None:
    """Where a worker or a node was lost, what it trained may be saving still."""
    from keyhole.record.create import only_writer

    deadline = time.monotonic() + SAVING
    while out.is_dir():
        try:
            with only_writer(out):
                return
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _train_together(task: Task, recipe: Recipe, out: Path, tell: Tell) -> None:
    """Several processes, one run: what a person would start by hand with torchrun, watched through its metrics."""
    resume = (out / "recipe.toml").is_file()
    # A relative path in a recipe is looked up beside its file: this one must lie where the study's code does. Its name is
    # the task's: two arms may have one recipe.
    source = out / "recipe.toml" if resume else recipe.folder / f".{task.name.replace('/', '-')}.toml"
    if not resume:
        write_atomically(source, recipe.to_toml())
    command = [sys.executable, "-m", "keyhole.studies.together", "--standalone", "--nproc-per-node", str(task.processes)]
    command += ["-m", "keyhole", "train", str(source), "--out", str(out), "--json", *(["--resume"] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=sys.stderr, text=True, env=environment
        )
        try:
            _watch(process, recipe, out, tell)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdin.close()  # type: ignore[union-attr]
            if not resume:
                source.unlink(missing_ok=True)
        output.seek(0)
        if process.returncode:
            _raise(output.read(), process.returncode)


def _watch(process: subprocess.Popen[str], recipe: Recipe, out: Path, tell: Tell) -> None:
    from keyhole.record.metrics import read_metrics
    from keyhole.training.budget import Budget, Spent

    budget = Budget.of(recipe.train)
    while True:
        try:
            process.wait(timeout=1.0)
            return
        except subprocess.TimeoutExpired:
            if rows := read_metrics(out):
                last = rows[-1]
                tell(budget.progress(Spent(last["step"], last["tokens"], last["seconds"])), last)


def _raise(output: str, code: int) -> NoReturn:
    """The error that `keyhole train --json` told of, as the one it was."""
    # Whatever a part of the user's prints comes before it.
    start = max(output.rfind("\n{\n") + 1, 0)
    try:
        told = json.loads(output[start:])
    except ValueError:
        told = {}
    if "finding" in told:
        raise RunStopped(Finding(**told["finding"]))
    raise KeyholeError(told.get("error") or f"torchrun ended with exit code {code}; the worker's log has what it said")
