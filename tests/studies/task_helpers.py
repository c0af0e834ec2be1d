"""Small tasks, a part that can be held up, and what it means that two results are the same."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyhole.core.config import Recipe
from keyhole.core.files import read_json
from keyhole.studies.trial import RESULT, Event, Task
from tests.training.training_helpers import TINY, differences, end, write_text

CLOCKS = ("seconds", "tokens_per_second", "memory_mb")
MEASURE = {"tokens": 64, "texts": {"short": "The old house."}, "positions": True, "past": [2.0], "windows": 4}
HELD_AFTER = 8
"""The step within which a held training waits; it has saved twice by then."""

PARTS = '''
import os, signal, time
import torch
from torch import nn


class Chatty(nn.Module):
    """The mean of what came before. Prints, as people do."""

    def __init__(self, width, heads, block):
        super().__init__()
        self.out = nn.Linear(width, width)
        print("hello from a part")

    def forward(self, x):
        print('{"task": "nobody", "what": "done"}')
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.out(x.cumsum(1) / count[:, None])


class Held(Chatty):
    """Waits in one step until a file is there."""

    def __init__(self, width, heads, block, file="", after=8):
        super().__init__(width, heads, block)
        self.file, self.after, self.calls = file, after, 0

    def forward(self, x):
        self.calls += self.training
        while self.training and self.calls == self.after and not os.path.exists(self.file):
            time.sleep(0.01)
        return super().forward(x)


class Broken(Chatty):
    """Works until it is trained."""

    def forward(self, x):
        if self.training:
            raise ArithmeticError("the part of arm broken divides by nothing\\nand says more")
        return super().forward(x)


class Deadly(Chatty):
    """Takes its process with it."""

    def forward(self, x):
        if self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
'''


def new_study(folder: Path) -> Path:
    """A study's directory as preparing leaves it: the user's parts in code/; the text lies elsewhere."""
    (folder / "study/code").mkdir(parents=True)
    (folder / "study/code/parts.py").write_text(PARTS)
    write_text(folder)
    return folder / "study"


def trial(root: Path, arm: str, seed: int = 0, *, processes: int = 1, **changes: Any) -> Task:
    """A training of a second; keys are changed as `model_mixer="linear"`."""
    given = {key.replace("_", ".", 1): value for key, value in changes.items()}
    given |= {"train.seed": seed, "data.seed": seed, "data.source": str(root.parent / "text.txt")}
    recipe = Recipe.parse(TINY, folder=root).replace(given)
    return Task(
        kind="trial", name=f"runs/{arm}/seed-{seed}", study="test", arm=arm, seed=seed,
        recipe=recipe.model_dump(), processes=processes, measure=MEASURE,
    )  # fmt: skip


def held(root: Path, arm: str, seed: int, gate: Path) -> Task:
    """A training that waits in the middle until `gate` is there."""
    mixer = {"name": "code/parts.py:Held", "file": str(gate), "after": HELD_AFTER}
    return trial(root, arm, seed, model_mixer=mixer)


def audit(root: Path, arm: str) -> Task:
    """The audit of an arm."""
    return Task(kind="audit", name=f"audits/{arm}", study="test", arm=arm, recipe=trial(root, arm).recipe)


def unlike(task: Task, one: Path, two: Path) -> list[str]:
    """What is not equal, bit for bit, in a task's results in two studies; clocks and memory aside."""
    if task.kind == "audit":
        return [] if task.result(one) == task.result(two) is not None else ["findings"]
    found = differences(end(one / task.name), end(two / task.name))
    first, second = (read_json(root / task.name / RESULT) for root in (one, two))
    return found + [key for key in first.keys() | second.keys() if key not in CLOCKS and first.get(key) != second.get(key)]


def as_held(task: Task, one: Path, two: Path) -> list[str]:
    """The same for a held training: two gates are two files, and all else must agree."""
    return [key for key in unlike(task, one, two) if key != "digest"]


def wait_until(met: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; never longer than is reasonable."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)


def step_saved(root: Path, task: Task, step: int) -> bool:
    """Whether a training has saved this step."""
    return (root / task.name / f"checkpoints/step-{step:08d}").is_dir()


def processes_below(pid: int) -> list[int]:
    """A process's descendants, which are alive."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    family = {pid}
    while new := {int(p) for p, parent, _ in rows if int(parent) in family} - family:
        family |= new
    dead = {int(p) for p, _, state in rows if state.startswith("Z")}
    return [found for found in sorted(family - {pid} - dead) if alive(found)]  # ps has listed itself


def alive(pid: int) -> bool:
    """Whether a process is there, and not merely waiting to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def endings(events: list[Event]) -> dict[str, str]:
    """How each task ended."""
    return {event.task: event.what for event in events if event.what in ("done", "failed", "stopped")}


def kill(pid: int, number: int) -> None:
    """End one process of our own."""
    if alive(pid):
        os.kill(pid, number)
