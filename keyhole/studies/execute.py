"""Who carries tasks out: one contract for this machine and for a cluster.

An executor is given tasks that depend on nothing but the study's directory, one by one as it has room for them, tells of
each what happens, and returns when all of them have ended. A task that fails is told of; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, Self

from keyhole.core.errors import InputError
from keyhole.studies.trial import Event, Task

Watcher = Callable[[Event], None]


class Executor(Protocol):
    """Carries out tasks somewhere, as many at once as it has slots. A context: what it started ends with it."""

    slots: int
    where: str
    """For people: "2 workers of one thread"."""

    def __enter__(self) -> Self:
        """Start what carries tasks out."""

    def __exit__(self, *error: object) -> None:
        """Stop it; a training in progress saves first."""

    def run(self, tasks: Iterable[Task], watch: Watcher) -> None:
        """Carry out tasks until there are no more and every one of them is done, failed or stopped.

        A task is taken from `tasks` only when a slot is free for it, and after `watch` was told of everything that happened
        until then: a search proposes its next trial from what the last ones found. Both are called in the caller's thread.
        """

    def stop(self, task: str) -> None:
        """Give a task up, if it is still going on."""


def refuse_executor(on: str, workers: int | None) -> None:
    """Say what is wrong with `--on` and `--workers` before anything is begun."""
    if workers is not None and (type(workers) is not int or workers < 1):
        raise InputError(f"{workers!r} workers can do nothing; give 1 or more")
    if not isinstance(on, str) or (on not in ("local", "ray") and not on.startswith("ray://")):
        raise InputError(f"{on!r} is no place to train on; it may be local, ray, or ray://host:port")


def build_executor(on: str, root: Path, workers: int | None) -> Executor:
    """The executor that `--on` names: `local`, `ray`, `ray://host:port`."""
    refuse_executor(on, workers)
    if on == "local":
        from keyhole.studies.local import Local

        return Local(root, workers)
    from keyhole.studies.cluster import Cluster

    return Cluster(root, None if on == "ray" else on, workers)
