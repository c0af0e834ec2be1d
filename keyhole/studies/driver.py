"""The process that speaks with a Ray cluster for a study: `python -m keyhole.studies.driver DIRECTORY [ADDRESS] ...`.

    in   {"task": {...}}   {"stop": "NAME"}
    out  {"slots": 4, "where": "Ray cluster of 2 nodes, 4 CPUs"}, or {"error": "..."}, then events as a worker tells them

A process of its own, for what Ray prints, and how it ends when the cluster does, are not to be the study's. It ends when
its input does: what trains saves first and is brought back, and a cluster that it started ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import write_atomically
from keyhole.studies.join import connect, said
from keyhole.studies.local import TRIES
from keyhole.studies.node import TOKEN, About, Board, Files, Order, Outcome, carry, pack, survey, unpack
from keyhole.studies.trial import Event, Task
from keyhole.studies.worker import failure

ANSWER = 120.0
"""Seconds within which every node must say what it is; the first time it receives Keyhole."""
POLL = 0.1
SAVING = 50.0
"""Seconds that tasks have to save when the study is stopped."""
SHOWN = 10.0
"""Seconds within which a network file system shows what another machine wrote."""
LOSSES = 10
"""How often a task may lose its node."""
AHEAD = 64
"""Tasks that wait in Ray itself, so that it sees what a growing cluster would be good for."""
UNMANNED = 60.0
"""Seconds that a cluster may be without any CPU before the study gives up."""


@dataclass
class Going:
    """A task that Ray has."""

    task: Task
    size: int
    node: str | None = None
    """Where it is; None while it waits."""


class Driver:
    """Hands tasks to a cluster, and tells how they go."""

    def __init__(self, root: Path, workers: int | None, out: TextIO) -> None:
        self.root, self.workers, self.out = root, workers, out
        self.token = secrets.token_hex(16)
        self.waiting: deque[Task] = deque()
        self.going: dict[Any, Going] = {}
        self.crashes: dict[str, int] = {}
        self.unwanted: set[str] = set()
        """Tasks that were given up: a cancellation may reach them anywhere, and shows as whatever it interrupted."""
        self.losses: dict[str, int] = {}
        self._manned = time.monotonic()

    def begin(self, here: bool, apart: bool) -> None:
        """Ask every node what it is, and say who carries tasks out."""
        import ray

        if not apart:
            write_atomically(self.root / TOKEN, self.token)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        about = self._survey([node["NodeID"] for node in nodes])
        refuse_if_different(about)
        self.versions, self.shared = about[0].versions, all(node.shares for node in about)
        cpus = int(sum(node["Resources"]["CPU"] for node in nodes))
        self.slots = min(self.workers or cpus, cpus)
        # Not on any node: what tells of lost nodes must not be lost with one. The head node cannot be spared anyway.
        head = {"node:__internal_head__": 0.001}
        self.board = ray.remote(Board).options(num_cpus=0, resources=head).remote()
        self._carry = ray.remote(carry)
        where = f"Ray {'on this machine' if here else f'cluster of {len(about)} node' + 's' * (len(about) > 1)}, "
        where += f"{self.slots} CPU{'s' * (self.slots > 1)}"
        if len({node.capability for node in about}) > 1:
            where += " of different kinds, whose last bits may differ"
        self._say({"slots": self.slots, "where": where})

    def serve(self, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        """Carry out what is asked until there are no more orders."""
        while self._obey(orders):
            self._hand_out()
            self._hear()
            self._collect(POLL)
            self._look_after_nodes()

    def end(self) -> None:
        """Have everything saved and brought back."""
        import ray

        self.waiting.clear()
        for ref in self.going:
            ray.cancel(ref)
        deadline = time.monotonic() + SAVING
        while self.going and time.monotonic() < deadline:
            self._collect(POLL, moving=False)
        (self.root / TOKEN).unlink(missing_ok=True)

    def _obey(self, orders: queue.SimpleQueue[dict[str, Any] | None]) -> bool:
        """Take the orders that have come; without anything to do, wait for one. False when there will be no more."""
        while True:
            try:
                order = orders.get(block=not self.going and not self.waiting)
            except queue.Empty:
                return True
            if order is None:
                return False
            if "stop" in order:
                self._stop(order["stop"])
            else:
                self.waiting.append(Task(**order["task"]))
                self.unwanted.discard(self.waiting[-1].name)

    def _stop(self, name: str) -> None:
        import ray

        for task in [task for task in self.waiting if task.name == name]:
            self.waiting.remove(task)
            self._tell(Event(task=name, what="stopped"))
        for ref, going in self.going.items():
            if going.task.name == name:
                self.unwanted.add(name)
                ray.cancel(ref)

    def _hand_out(self) -> None:
        import ray

        while self.waiting and self._free(self.waiting[0]):
            task = self.waiting.popleft()
            size = min(task.processes, max(largest(), 1))
            begun = {} if self.shared else pack(self.root, task.name)
            order = Order(
                task=task.to_dict(),
                root=str(self.root),
                token=self.token,
                versions=self.versions,
                files={} if self.shared else self._code(),
                begun=[ray.put(begun)] if begun else [],
            )
            # Ray's own tries would be silent ones.
            ref = self._carry.options(num_cpus=size, max_retries=0, name=task.name).remote(order, self.board)
            self.going[ref] = Going(task, size)

    def _free(self, task: Task) -> bool:
        if self.workers is None:
            return len(self.going) < self.slots + AHEAD
        busy = sum(going.size for going in self.going.values())
        return not busy or busy + task.processes <= self.workers

    def _code(self) -> Files:
        """The user's own parts."""
        folder = self.root / "code"
        paths = [path for path in folder.rglob("*.py")] if folder.is_dir() else []
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in sorted(paths)}

    def _hear(self) -> None:
        """Pass on what tasks have told."""
        import ray

        going = {going.task.name: going for going in self.going.values()}
        for told in ray.get(self.board.take.remote()):
            node = told.pop("node")
            if told["task"] in going:
                going[told["task"]].node = node
                self._tell(Event(**told))

    def _collect(self, seconds: float, *, moving: bool = True) -> None:
        """Take in what has ended."""
        import ray

        if not self.going:
            return
        ended, _ = ray.wait(list(self.going), timeout=seconds)
        if ended and moving:
            self._hear()
        for ref in ended:
            going = self.going.pop(ref)
            try:
                outcome = ray.get(ref)
            except Exception as error:  # the many kinds in which Ray says that a task did not return
                self._lost(going.task, error, moving)
            else:
                self._tell(self._ended(going.task, outcome))

    def _ended(self, task: Task, outcome: Outcome) -> Event:
        sys.stderr.write(outcome.log)
        message, what = outcome.message, outcome.what
        try:
            if outcome.files:
                unpack(outcome.files, self.root, task.name)
        except KeyholeError as error:
            message, what = str(error), "failed"
        if what == "failed" and task.name in self.unwanted:
            message, what = "", "stopped"
        if what == "done" and not self._arrived(task):
            message, what = f"its node says it is done, but {task.place(self.root)} is not to be seen here", "failed"
        return Event(task=task.name, what=what, message=message, progress=float(what == "done"))  # type: ignore[arg-type]

    def _arrived(self, task: Task) -> bool:
        """Whether the result is here: a network file system may show a little later what another machine wrote."""
        deadline = time.monotonic() + SHOWN
        while task.result(self.root) is None:
            if time.monotonic() > deadline:
                return False
            os.listdir(task.place(self.root).parent)  # which has the folder looked up anew
            time.sleep(POLL)
        return True

    def _lost(self, task: Task, error: Exception, moving: bool) -> None:
        """A task did not return: it is begun again where its node or its worker was lost, the latter once."""
        from ray import exceptions as ray_errors

        if isinstance(error, ray_errors.TaskCancelledError) or task.name in self.unwanted:
            self._tell(Event(task=task.name, what="stopped"))
            return
        if isinstance(error, ray_errors.OutOfMemoryError):
            count, most, what = self.crashes, TRIES, "its node ran out of memory"
        elif isinstance(error, ray_errors.WorkerCrashedError):
            count, most, what = self.crashes, TRIES, "its worker ended"
        elif isinstance(error, ray_errors.NodeDiedError | ray_errors.ObjectLostError | ray_errors.LocalRayletDiedError):
            count, most, what = self.losses, LOSSES, "its node was lost"
        else:
            self._tell(Event(task=task.name, what="failed", message=failure(error)))
            return
        count[task.name] = count.get(task.name, 0) + 1
        if not moving:
            self._tell(Event(task=task.name, what="stopped", message=what))
        elif count[task.name] < most:
            self._tell(Event(task=task.name, what="moved", message=f"{what}; going on elsewhere"))
            self.waiting.appendleft(task)
        else:
            self._tell(Event(task=task.name, what="failed", message=f"{what} {most} times; see logs/cluster.log"))

    def _look_after_nodes(self) -> None:
        """A cluster that shrank may have no place for a task that waits: it is asked for with fewer CPUs."""
        import ray

        if all(going.node for going in self.going.values()):
            self._manned = time.monotonic()
            return
        if (most := largest()) > 0:
            self._manned = time.monotonic()
        elif time.monotonic() - self._manned > UNMANNED:
            raise KeyholeError(
                f"the cluster has had no node with a CPU for {UNMANNED:.0f} s; start one (ray start --address=...) "
                "and go on with --resume"
            )
        for ref, going in list(self.going.items()):
            if going.node is None and 0 < most < going.size:
                del self.going[ref]
                ray.cancel(ref)
                self.waiting.appendleft(going.task)

    def _survey(self, ids: list[str]) -> list[About]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        if not ids:
            raise InputError("the cluster has no CPUs; give its nodes some: ray start --address=... --num-cpus=4")
        ask = ray.remote(survey)
        asked = [
            ask.options(num_cpus=0, max_retries=0, scheduling_strategy=On(node, soft=False)).remote(
                str(self.root), self.token
            )
            for node in ids
        ]
        try:
            return ray.get(asked, timeout=ANSWER)
        except ray.exceptions.GetTimeoutError:
            raise KeyholeError(f"not every node of the cluster answered within {ANSWER:.0f} s; see: ray status") from None
        except Exception as error:
            raise KeyholeError(f"a node of the cluster cannot carry out tasks: {said(error)}") from error

    def _tell(self, event: Event) -> None:
        self._say(asdict(event))

    def _say(self, what: dict[str, Any]) -> None:
        try:
            self.out.write(json.dumps(what) + "\n")
            self.out.flush()
        except BrokenPipeError:
            pass  # whoever listened is gone; what trains is saved all the same


def refuse_if_different(nodes: list[About]) -> None:
    """Arms that train on different versions cannot be compared to the last bit."""
    first = nodes[0]
    for node in nodes[1:]:
        for name, found in node.versions.items():
            if found != first.versions[name]:
                raise InputError(
                    f"the nodes of the cluster differ: {first.address} has {name} {first.versions[name]} and "
                    f"{node.address} has {found}; install the same on every node"
                )


def largest() -> int:
    """The CPUs of the largest node."""
    import ray

    return int(max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0))


def main() -> None:
    """Started by a study, never by hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--apart", action="store_true")
    asked = parser.parse_args()
    # What Ray prints, wherever it does, goes to the log and never between the lines that the study reads.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which says what is to be done
    driver = Driver(asked.root, asked.workers, out)
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, orders), daemon=True).start()
    try:
        driver.begin(connect(asked.address, asked.workers), asked.apart)
        try:
            driver.serve(orders)
        finally:
            driver.end()
    except Exception as error:  # whatever it is, the study says it in one sentence
        driver._say({"error": failure(error)})
        sys.exit(1)


def _listen(lines: TextIO, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in lines:
        orders.put(json.loads(line))
    orders.put(None)


if __name__ == "__main__":
    main()
