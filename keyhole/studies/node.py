"""What happens on a node of a Ray cluster: one task, carried out where it can be, with what it finds brought back as bytes.

A node need not see the study's directory. One that does works in place, so that a training whose node is lost goes on
from its last checkpoint elsewhere, and nothing has to travel. One that does not works in a folder of its own, which is
begun with the files that came with the task and comes back whole.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import fsync, storage_errors, write_atomically
from keyhole.studies.trial import Event, Task, carry_out
from keyhole.studies.worker import PROGRESS_EVERY, failure

TOKEN = ".cluster"
"""A file in the study's directory, of random content: a node that reads the same sees the same directory."""
MUST_AGREE = ("torch", "numpy", "tokenizers")
"""Packages whose versions, beside Keyhole's own, decide the last bits of a result."""
LOG_KEPT = 1 << 18
"""Bytes of a task's log that come back."""
Files = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Order:
    """A task, and all that a node needs for it. Plain data."""

    task: dict[str, Any]
    root: str
    token: str
    versions: dict[str, str]
    files: Files
    begun: list[Any] = field(default_factory=list)
    """A reference to the files of a training that was stopped before, if there are any: fetched only where needed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended on its node."""

    what: str
    message: str = ""
    files: Files = field(default_factory=dict)
    """What it made, by place in the study's directory; nothing where it worked in place."""
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a node is."""

    address: str
    versions: dict[str, str]
    capability: str
    shares: bool
    """Whether it sees the study's directory."""


class Board:
    """Where tasks say how far they are, and the study reads it. Lives in an actor on the head node."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def tell(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        self._events.append(event)

    def take(self) -> list[dict[str, Any]]:
        """Everything since the last time."""
        taken, self._events = self._events, []
        return taken


def survey(root: str, token: str) -> About:
    """What the node is that this is called on."""
    import ray
    import torch

    return About(
        address=ray.util.get_node_ip_address(),
        versions=versions(),
        capability=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        shares=shares(Path(root), token),
    )


def versions() -> dict[str, str]:
    """Of what decides a result's last bits. Keyhole's own is that of its code: it is sent to the nodes."""
    from keyhole import __version__

    return {"keyhole": __version__, **{name: metadata.version(name) for name in MUST_AGREE}}


def shares(root: Path, token: str) -> bool:
    """Whether the study's directory is to be seen here, and can be written."""
    try:
        return (root / TOKEN).read_text() == token and os.access(root, os.W_OK)
    except OSError:
        return False


def carry(order: Order, board: Any) -> Outcome:
    """Carry a task out on this node. Never raises, but for what ends a process; an interrupt saves first."""
    import ray

    def tell(event: Event) -> None:
        # Waited for: whoever reads the outcome has read all that was told before.
        ray.get(board.tell.remote({**asdict(event), "node": node}))

    task, root = Task(**order.task), Path(order.root)
    node = ray.get_runtime_context().get_node_id()
    tell(Event(task=task.name, what="started"))
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # A file of the system, not of Python: processes that the task starts write there too.
        with redirect_stdout(log), redirect_stderr(log):
            try:
                with _place(order, root) as place:
                    what, message = _outcome(order, task, place, tell)
                    # Paths in a message are told as the person who reads it knows them.
                    message = message.replace(str(place), str(root))
                    files = {} if place == root else pack(place, task.name)
            except KeyboardInterrupt:
                what, message, files = "stopped", "", {}
            except Exception as error:
                what, message, files = "failed", failure(error), {}
        return Outcome(what=what, message=message, files=files, log=_end_of(log))


@contextmanager
def _place(order: Order, root: Path) -> Iterator[Path]:
    """The study's directory where it can be seen, else a folder like it."""
    import ray

    if shares(root, order.token):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="keyhole-") as folder:
        begun = ray.get(order.begun[0]) if order.begun else {}
        for name, content in (order.files | begun).items():
            write_atomically(inside(Path(folder), name), content)
        yield Path(folder)


def _outcome(order: Order, task: Task, place: Path, tell: Callable[[Event], None]) -> tuple[str, str]:
    import torch

    from keyhole.training.loop import Interrupted

    last = 0.0

    def told(progress: float, row: dict[str, Any]) -> None:
        nonlocal last
        if progress >= 1 or "dev_loss" in row or time.monotonic() - last > PROGRESS_EVERY:
            last = time.monotonic()
            tell(Event(task=task.name, what="progress", progress=progress, row=row))

    torch.set_num_threads(1)
    try:
        _refuse_other_versions(order.versions)
        refuse_missing_data(task)
        carry_out(task, place, told)
    except (KeyboardInterrupt, Interrupted):
        return "stopped", ""
    except Exception as error:  # whatever a task raises is its own failure; the others go on
        return "failed", failure(error)
    return "done", ""


def _refuse_other_versions(wanted: dict[str, str]) -> None:
    """Also nodes that join a running study must be like the others."""
    for name, found in versions().items():
        if found != wanted[name]:
            raise InputError(
                f"node {platform.node()} has {name} {found} and the others have {wanted[name]}: results would not agree; "
                "install the same on every node"
            )


def refuse_missing_data(task: Task) -> None:
    """A file of the user's must be on this node."""
    source = task.recipe["data"]["source"]
    name = source if isinstance(source, str) else source["name"]
    path = name.removeprefix("hf:")
    if os.path.isabs(path) and not os.path.exists(path):
        raise InputError(
            f"node {platform.node()} has no {path}: a study on a cluster needs its data under the same path on every "
            "node; put it on a file system that all of them share, or copy it to each"
        )


def _end_of(log: io.TextIOBase) -> str:
    log.flush()
    log.seek(0)
    return log.read()[-LOG_KEPT:]


def pack(root: Path, name: str) -> Files:
    """What a task has made in a study's directory: the folder of its name, or the file of its name."""
    folder, file = root / name, root / f"{name}.json"
    paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [file] * file.is_file()
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def unpack(files: Files, root: Path, name: str) -> None:
    """Put a task's files in their place, all at once; what an earlier try left there makes room."""
    alone = f"{name}.json"
    if foreign := [path for path in files if path != alone and not path.startswith(f"{name}/")]:
        raise StorageError(f"{foreign[0]!r} came back for {name}, where it does not belong; nothing was written")
    for path in files:
        inside(root, path)
    if alone in files:
        write_atomically(inside(root, alone), files[alone])
        return
    target = inside(root, name)
    new, old = (target.parent / f".{target.name}.{state}" for state in ("arriving", "leaving"))
    with storage_errors(target, "writing"):
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        for path, content in files.items():
            place = inside(new, path.removeprefix(f"{name}/"))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            fsync(place)
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def inside(folder: Path, name: str) -> Path:
    """A path within a folder; a name that leads out of it is refused."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise StorageError(f"{name!r} would lie outside {folder}; nothing was written")
    return folder / path
