"""Contenders as processes: all are built and warmed up once, then exactly one at a time computes.

A contender that waits is blocked reading its standard input, which costs no processor time. So the contenders can be
alternated many times in one run, and what the machine does meanwhile (heat, neighbours) meets all of them alike.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300.0
"""How long a contender may take to import and build."""


class Shape(NamedTuple):
    """The size of one training step, the same for every contender."""

    layers: int
    heads: int
    width: int
    time: int
    batch: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads} heads, width {self.width}, T {self.time}, " + (
            f"batch {self.batch}, vocabulary {self.vocab:,}"
        )

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.time * self.batch


class ContenderError(Exception):
    """A contender died or fell silent; the message ends with the last lines it wrote."""


class Worker:
    """One contender's process."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: whatever the contender starts can be killed with it, and Ctrl-C reaches only us.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.contender", name, *map(str, shape)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def wait_until_built(self) -> None:
        """Block until the contender has its model and waits."""
        self.facts = self._answer(START_SECONDS)

    def warm_up(self) -> None:
        """Take the first steps, which set up memory and kernels and are not measured."""
        self.run(0.0)

    def run(self, seconds: float) -> dict[str, Any]:
        """Let the contender train for about `seconds`, and return what it measured."""
        try:
            self._input.write(f"run {seconds}\n".encode())
            self._input.flush()
        except OSError:
            raise self._failure("died while it waited") from None
        return self._answer(60 + 30 * seconds)

    def stop(self) -> None:
        """Kill the contender and everything it started."""
        if self._errors.closed:
            return
        with suppress(ProcessLookupError):  # it and all its children may be gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        with suppress(OSError):  # an unsent line cannot be sent to the dead
            self._input.close()
        self._errors.close()

    @property
    def _input(self) -> Any:
        return self._process.stdin

    def _answer(self, timeout: float) -> dict[str, Any]:
        output = self._process.stdout
        if not select.select([output], [], [], timeout)[0]:
            raise self._failure(f"gave no answer in {timeout:.0f} s")
        line = output.readline()
        if not line:
            raise self._failure(f"died with exit code {self._process.wait()}")
        return json.loads(line)

    def _failure(self, what: str) -> ContenderError:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-8:]
        return ContenderError("\n    ".join([f"{self.name} {what}", *last]))


@contextmanager
def contenders(names: Sequence[str], shape: Shape, failures: list[str]) -> Iterator[list[Worker]]:
    """Start contenders, give those that are ready, and kill all of them however the block ends."""
    workers: list[Worker] = []
    try:
        workers.extend(Worker(name, shape) for name in names)
        # Imports may overlap; steps may not: two programs of two threads each on two cores mostly wait for each other.
        built = _survivors(workers, Worker.wait_until_built, failures)
        yield _survivors(built, Worker.warm_up, failures)
    finally:
        for worker in workers:
            worker.stop()


def _survivors(workers: list[Worker], stage: Callable[[Worker], None], failures: list[str]) -> list[Worker]:
    alive = []
    for worker in workers:
        try:
            stage(worker)
            alive.append(worker)
        except ContenderError as error:
            failures.append(str(error))
    return alive


def alternate(workers: list[Worker], rounds: int, seconds: float, failures: list[str]) -> list[dict[str, dict[str, Any]]]:
    """Run every contender once a round, in an order that rotates; a contender that dies is left out from then on."""
    alive = list(workers)
    results: list[dict[str, dict[str, Any]]] = []
    for number in range(rounds):
        start = number % max(1, len(alive))
        measured: dict[str, dict[str, Any]] = {}
        for worker in [*alive[start:], *alive[:start]]:
            try:
                measured[worker.name] = worker.run(seconds)
            except ContenderError as error:
                failures.append(str(error))
                alive.remove(worker)
        results.append(measured)
    return results
