"""Searches whose trainings are played: what a training tells, without one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from search_helpers import bowl

from keyhole.core.files import write_json
from keyhole.core.toml import to_toml
from keyhole.studies.execute import Watcher
from keyhole.studies.search.engine import LOOKS
from keyhole.studies.trial import Event, Task, carry_out
from tests.training.training_helpers import TINY, write_text

SPACE = """
[space]
"train.rate" = { low = 1e-3, high = 1e-1, log = true, points = 3 }
"model.layers" = { low = 2, high = 3 }
"model.position" = ["rope", "learned"]
"""
STEPS = 5


def write_search(folder: Path, space: str = SPACE, base: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A search of the tiny recipe, in a folder with all it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder)
    recipe = {section: dict(values) | (base or {}).get(section, {}) for section, values in TINY.items()}
    (folder / "base.toml").write_text(to_toml(recipe))
    (folder / "mine.toml").write_text(to_toml({"search": {"recipe": "base.toml", **keys}}) + space)
    return folder / "mine.toml"


def height(task: Task) -> float:
    """The dev loss that a played training comes to; a seed more is a little more."""
    recipe = task.recipe
    settings = {"train.rate": recipe["train"]["rate"]}
    settings |= {f"model.{key}": recipe["model"][key] for key in ("layers", "position")}
    return bowl(settings) + 0.01 * task.seed


@dataclass
class Played:
    """An executor that plays trainings, side by side and in turns: each tells its dev loss on its way down to the bowl."""

    root: Path
    slots: int = 1
    ends: dict[str, str] = field(default_factory=dict)
    """Task name -> how it ends, where it is not simply done: failed, diverged, or late: measured so
    seldom that it is found hopeless with its very last step."""
    enough: int = 10_000
    """So many trainings end before the user stops the search."""
    said: list[str] = field(default_factory=list)
    """What happened, in order: a task taken, or an event."""
    where: str = "played"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._unwanted = set()

    def run(self, tasks: Iterable[Task], watch: Watcher) -> None:
        """Take a task when there is room; then every one goes a step, in turn."""
        source, going, ended = iter(tasks), dict[str, tuple[Task, int]](), 0
        self._unwanted: set[str] = set()
        while True:
            while len(going) < self.slots and (task := next(source, None)) is not None:
                self.said.append(f"take {task.name}")
                going[task.name] = (task, 0)
            if not going:
                return
            for name, (task, step) in list(going.items()):
                event = self.event(task, step + 1)
                going[name] = (task, step + 1)
                self.said.append(f"{event.what} {name}")
                if event.what != "progress":
                    del going[name]
                    ended += 1
                watch(event)
                if ended >= self.enough:
                    raise KeyboardInterrupt

    def event(self, task: Task, step: int) -> Event:
        """What a training tells at a step."""
        if task.name in self._unwanted:
            return Event(task=task.name, what="stopped")
        value, how = height(task), self.ends.get(task.name, "done")
        if step <= STEPS:
            row = {"step": step, "dev_loss": value + 1 / step}
            if how == "late":
                row = {"step": step} | ({"dev_loss": 99.0} if step > STEPS - LOOKS else {})
            return Event(task=task.name, what="progress", progress=step / STEPS, row=row)
        if how == "failed":
            return Event(task=task.name, what="failed", message="there is not enough memory")
        found = {"state": "diverged", "message": "the loss is no number"} if how == "diverged" else {"state": "done"}
        write_json(task.place(self.root), {"digest": task.digest, "dev_loss": value, **found})
        return Event(task=task.name, what="done")

    def stop(self, task: str) -> None:
        """Give it up."""
        self._unwanted.add(task)

    def count(self, what: str) -> int:
        """How often something happened."""
        return sum(said.startswith(what) for said in self.said)


@dataclass
class Here:
    """An executor that trains in this process, one task after the other."""

    root: Path
    slots: int = 1
    where: str = "here"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def run(self, tasks: Iterable[Task], watch: Watcher) -> None:
        """Train, and stop at the next telling what is not wanted."""
        self._unwanted: set[str] = set()
        for task in tasks:

            def told(progress: float, row: dict[str, Any], name: str = task.name) -> None:
                if name in self._unwanted:
                    raise StopIteration
                watch(Event(task=name, what="progress", progress=progress, row=row))

            try:
                carry_out(task, self.root, told)
            except StopIteration:
                watch(Event(task=task.name, what="stopped"))
            except Exception as error:  # as a worker does
                watch(Event(task=task.name, what="failed", message=str(error)))
            else:
                watch(Event(task=task.name, what="done"))

    def stop(self, task: str) -> None:
        """Give it up."""
        self._unwanted.add(task)
