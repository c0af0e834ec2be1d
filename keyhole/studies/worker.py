"""A process that carries out tasks, one thread each: it reads them as lines of JSON and tells of them in lines of JSON.

    in   {"task": {...}}   {"stop": "NAME"}
    out  {"task": "NAME", "what": "progress", "progress": .4, "row": {...}, "message": ""}

It ends when its input does: a study that is killed leaves no worker behind. SIGTERM stops it after the step, saved.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from keyhole.core.errors import KeyholeError
from keyhole.studies.trial import Event, Task, carry_out

PROGRESS_EVERY = 0.3
"""Seconds between two tellings of how far a training is."""


class Stopped(BaseException):
    """The study wants this worker, or this task, to stop. Not an Exception: no task may swallow it."""


class Worker:
    """Carries tasks out, in the directory of their study."""

    def __init__(self, root: Path, out: TextIO) -> None:
        self.root, self.out = root, out
        self.tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.unwanted: set[str] = set()
        self._told = 0.0

    def listen(self, lines: TextIO) -> None:
        """Take orders until there are no more; then stop whatever is being done."""
        for line in lines:
            order = json.loads(line)
            if "stop" in order:
                self.unwanted.add(order["stop"])
            else:
                self.tasks.put(order["task"])
        self.tasks.put(None)
        os.kill(os.getpid(), signal.SIGTERM)

    def run(self) -> None:
        """Carry out what comes, one after the other."""
        while (given := self.tasks.get()) is not None:
            task = Task(**given)
            self._tell(Event(task=task.name, what="started"))
            self._tell(self._outcome(task))

    def _outcome(self, task: Task) -> Event:
        from keyhole.training.loop import Interrupted

        def told(progress: float, row: dict[str, Any]) -> None:
            if task.name in self.unwanted:
                self.unwanted.discard(task.name)
                raise _Unwanted
            if progress >= 1 or "dev_loss" in row or time.monotonic() - self._told > PROGRESS_EVERY:
                self._told = time.monotonic()
                self._tell(Event(task=task.name, what="progress", progress=progress, row=row))

        try:
            carry_out(task, self.root, told)
        except (Stopped, Interrupted):
            self._tell(Event(task=task.name, what="stopped"))
            raise Stopped from None
        except _Unwanted:
            return Event(task=task.name, what="stopped")
        except Exception as error:  # whatever a task raises is its own failure; the others go on
            return Event(task=task.name, what="failed", message=failure(error))
        return Event(task=task.name, what="done", progress=1.0)

    def _tell(self, event: Event) -> None:
        self.out.write(json.dumps(asdict(event)) + "\n")
        self.out.flush()


class _Unwanted(Exception):
    """The study no longer wants this task's result."""


def failure(error: Exception) -> str:
    """What went wrong, in one sentence; the whole of it goes to the log."""
    import traceback

    if isinstance(error, KeyholeError):
        return str(error)
    traceback.print_exception(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "there is not enough memory; lower train.batch or data.block, or use fewer workers"
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def main() -> None:
    """`python -m keyhole.studies.worker DIRECTORY`: started by a study, never by hand."""
    import torch

    torch.set_num_threads(1)
    # Whatever a part of the user's prints must not get between the lines that the study reads.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which says what is to be done
    worker = Worker(Path(sys.argv[1]), out)
    threading.Thread(target=worker.listen, args=(sys.stdin,), daemon=True).start()
    try:
        worker.run()
    except (Stopped, BrokenPipeError):
        os._exit(0)  # no half-written line is flushed after this


if __name__ == "__main__":
    main()
