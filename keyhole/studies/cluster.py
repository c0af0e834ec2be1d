"""Tasks on a Ray cluster. Ray is spoken to by a process of its own (`driver`); this is its other end.

study ─► cluster ═► driver ─► Ray ─► node: one task, on one CPU for each of its processes
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import storage_errors
from keyhole.studies.execute import Watcher
from keyhole.studies.local import GRACE, OVER
from keyhole.studies.trial import Event, Task

START = 240.0
"""Seconds within which a cluster must be joined, or started."""
LOG = "logs/cluster.log"


class Cluster:
    """The cluster at an address, or the one that this machine belongs to, or one of this machine alone.

    Nodes that see the study's directory work in it, unless `shared` is False, as where its file system is too slow.
    """

    def __init__(self, root: Path, address: str | None = None, workers: int | None = None, *, shared: bool = True) -> None:
        self.root, self.address, self.workers, self.shared = root.absolute(), address, workers, shared
        self.slots = workers or 0
        """Known when the cluster has been joined."""
        self.where = f"Ray cluster at {address}" if address else "Ray cluster"
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        if find_spec("ray") is None:
            raise InputError("--on ray needs the ray library; install it with: pip install 'keyhole[cluster]'")
        try:
            self._start()
            told = self._next(START)
        except BaseException:
            self.__exit__()
            raise
        self.slots, self.where = told["slots"], told["where"]
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()
        self._process = None

    def run(self, tasks: Iterable[Task], watch: Watcher) -> None:
        """Carry tasks out, the first ones first as far as Ray keeps to it.

        A list is handed over whole, so that Ray sees what a growing cluster would be good for. What is still being thought
        of is taken one by one, when there is room.
        """
        source, waiting = iter(tasks), deque[Task]()
        going: dict[str, int] = {}
        room = math.inf if isinstance(tasks, Sequence) else self.slots
        while True:
            while (busy := sum(going.values())) < room:
                if not waiting and (new := next(source, None)) is not None:
                    waiting.append(new)
                if not waiting or busy + self._size(waiting[0]) > room:
                    break
                task = waiting.popleft()
                going[task.name] = self._size(task)
                self._send({"task": task.to_dict()})
            if not going:
                return
            event = Event(**self._next())
            if event.task in going:
                if event.what in OVER:
                    del going[event.task]
                watch(event)

    def _size(self, task: Task) -> int:
        return min(task.processes, self.slots)

    def stop(self, task: str) -> None:
        """Give a task up, if it is still going on or waits."""
        self._send({"stop": task})

    def _start(self) -> None:
        log = self.root / LOG
        with storage_errors(log, "writing"):
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("a")
        command = [sys.executable, "-m", "keyhole.studies.driver", str(self.root)]
        command += ["--address", self.address] if self.address else []
        command += ["--workers", str(self.workers)] if self.workers else []
        command += [] if self.shared else ["--apart"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _next(self, seconds: float | None = None) -> dict[str, Any]:
        """What the driver says next; its error, or its end, becomes ours."""
        try:
            told = self._said.get(timeout=seconds)
        except queue.Empty:
            raise KeyholeError(
                f"the Ray cluster could not be joined within {seconds:.0f} s; see {self.root / LOG}"
            ) from None
        if told is None:
            raise KeyholeError(
                f"the Ray cluster is gone, as where its head node ended; {self.root / LOG} has what Ray said. "
                "What is done is kept: go on with --resume"
            )
        if "error" in told:
            raise KeyholeError(told["error"])
        return told

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None, "a cluster is used within `with`"
        with suppress(BrokenPipeError):  # it has ended, and its reader says so
            self._process.stdin.write(json.dumps(order, default=str) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:  # type: ignore[union-attr]
            if line.endswith("\n"):  # the last one of a process that was killed may be half
                self._said.put(json.loads(line))
        self._said.put(None)
