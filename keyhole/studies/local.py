"""Tasks on this machine: one single-threaded worker a core. Small models gain more from that than from two threads each."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable
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
OVER = ("done", "failed", "stopped")
"""What ends a task."""


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
            if line.endswith("\n"):  # the last one of a process that was killed may be half
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
        self._unwanted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.wait()
        self._workers.clear()

    def run(self, tasks: Iterable[Task], watch: Watcher) -> None:
        """Carry out tasks in their order, each taken when a slot is free; one of several processes takes as many slots."""
        source, waiting, tries, running = iter(tasks), deque[Task](), Counter[str](), 0
        self._unwanted.clear()
        while True:
            while running < self.slots:
                if not waiting and (new := next(source, None)) is not None:
                    waiting.append(new)
                if not waiting or running + self._size(waiting[0]) > self.slots:
                    break
                task = waiting.popleft()
                if task.name in self._unwanted:  # given up just when its worker died under it
                    watch(Event(task=task.name, what="stopped"))
                    continue
                tries[task.name] += 1
                running += self._size(task)
                self._idle().give(task)
            if not running:
                return
            worker, told = self._events.get()
            if told is not None and told["what"] not in OVER:
                watch(Event(**told))
                continue
            running -= self._size(worker.task) if worker.task else 0
            if told is None:
                waiting.extendleft(self._died(worker, tries, watch))
            else:
                worker.task = None
                watch(Event(**told))

    def stop(self, task: str) -> None:
        """Give a task up, if it is going on, or about to go on elsewhere."""
        self._unwanted.add(task)
        for worker in self._workers:
            if worker.task is not None and worker.task.name == task:
                worker.unwanted()

    def _size(self, task: Task) -> int:
        return min(task.processes, self.slots)

    def _idle(self) -> _Process:
        """A worker without a task, started now where all have one."""
        idle = next((worker for worker in self._workers if worker.task is None), None)
        if idle is None:
            idle = _Process(len(self._workers), self.root, self._events)
            self._workers.append(idle)
        return idle

    def _died(self, worker: _Process, tries: Counter[str], watch: Watcher) -> list[Task]:
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
