"""Tasks on this machine: one single-threaded worker a core. Small models gain more from that than from two threads each."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from keyhole.core.files import storage_errors
from keyhole.studies.execute import Watcher
from keyhole.studies.trial import Event, Task

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TRIES = 2
"""How often a task is begun whose worker died under it: it goes on from its last checkpoint."""
GRACE = 60.0
"""Seconds that a worker has to save what it trains."""


class _Process:
    """One worker process and what it is doing. Its lines arrive in the queue that all workers share."""

    def __init__(self, number: int, root: Path, events: queue.SimpleQueue[tuple[_Process, dict[str, Any] | None]]) -> None:
        logs = root / "logs"
        with storage_errors(logs, "writing"):
            logs.mkdir(parents=True, exist_ok=True)
            self._log = (logs / f"worker-{number}.log").open("a")
        self.task: Task | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keyhole.studies.worker", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **dict.fromkeys(THREADS, "1")},
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def give(self, task: Task) -> None:
        """Have a task carried out."""
        self.task = task
        self._send({"task": task.to_dict()})

    def unwanted(self) -> None:
        """Have the present task given up."""
        if self.task is not None:
            self._send({"stop": self.task.name})

    def end(self) -> None:
        """Ask the process to save and end. Not by a signal: one that comes after a training's last step is lost."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def wait(self) -> int:
        """Wait for the end; how it ended."""
        try:
            code = self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        return code

    def _send(self, order: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has ended, and its reader says so
            self._process.stdin.write(json.dumps(order, default=str) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self, events: queue.SimpleQueue[tuple[_Process, dict[str, Any] | None]]) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            events.put((self, json.loads(line)))
        events.put((self, None))


class Local:
    """Worker processes on this machine."""

    def __init__(self, root: Path, workers: int | None = None) -> None:
        self.root = root.absolute()
        self.slots = workers or cores()
        self.where = f"{self.slots} worker{'s' * (self.slots > 1)} of one thread"
        self._events: queue.SimpleQueue[tuple[_Process, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait()
        self._workers.clear()

    def run(self, tasks: Sequence[Task], watch: Watcher) -> None:
        """Carry out tasks, the first ones first; one of several processes takes as many slots."""
        waiting, tries = deque(tasks), dict.fromkeys((task.name for task in tasks), 0)
        running = 0
        while waiting or running:
            while waiting and self._free(running, waiting[0]):
                task = waiting.popleft()
                tries[task.name] += 1
                running += self._size(task)
                self._idle().give(task)
            worker, told = self._events.get()
            task = worker.task
            if told is None:
                again = self._died(worker, tries, watch)
                waiting.extendleft(again)
                running -= self._size(task) if task else 0
            elif told["what"] in ("done", "failed", "stopped"):
                worker.task = None
                running -= self._size(task) if task else 0
                watch(Event(**told))
            else:
                watch(Event(**told))

    def stop(self, task: str) -> None:
        """Give a task up, if it is going on."""
        for worker in self._workers:
            if worker.task is not None and worker.task.name == task:
                worker.unwanted()

    def _size(self, task: Task) -> int:
        return min(task.processes, self.slots)

    def _free(self, running: int, task: Task) -> bool:
        return running + self._size(task) <= self.slots

    def _idle(self) -> _Process:
        """A worker without a task, started now where all have one."""
        idle = next((worker for worker in self._workers if worker.task is None), None)
        if idle is None:
            idle = _Process(len(self._workers), self.root, self._events)
            self._workers.append(idle)
        return idle

    def _died(self, worker: _Process, tries: dict[str, int], watch: Watcher) -> list[Task]:
        """A worker's process has ended by itself: its task is begun again elsewhere, once."""
        self._workers.remove(worker)
        code, task = worker.wait(), worker.task
        if task is None:
            return []
        why = f"signal {-code}" + (", as where memory runs out" if code == -9 else "") if code < 0 else f"exit code {code}"
        if tries[task.name] < TRIES:
            watch(Event(task=task.name, what="moved", message=f"its worker ended ({why}); going on with another"))
            return [task]
        watch(Event(task=task.name, what="failed", message=f"its worker ended {TRIES} times ({why}); see logs/"))
        return []


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
