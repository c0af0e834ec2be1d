"""A process that has torch loaded, and forks a child for each training it is told to carry out: a start costs no seconds.

Orders come as lines of JSON on stdin: recipe (nested values), folder, out, resume, log. A plant kills the child in the
middle of a save; a stop sends it a signal, so many seconds after its start or as soon as there are so many rows of metrics.
The answer is a line with the exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ENDED = 77  # what a child that a plant killed exits with: nothing is flushed and nothing is cleaned up


def serve() -> None:
    """Carry out orders until stdin ends."""
    import torch

    # What every child would load by itself is loaded once.
    for name in ("torch._dynamo", "keyhole.training.loop", "keyhole.use.evaluate"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(_carry_out(order))
        if order.get("stop"):
            _stop(pid, Path(order["out"]), **order["stop"])
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _stop(pid: int, out: Path, number: int, seconds: float = 0.0, rows: int = 0) -> None:
    """Send a signal when it is time. The child is not reaped here, so its number stays its own even when it has ended."""
    until, metrics = time.monotonic() + seconds, out / "metrics.jsonl"
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        enough = rows and metrics.is_file() and metrics.read_bytes().count(b"\n") >= rows
        if enough or (not rows and time.monotonic() >= until):
            os.kill(pid, number)
            return
        time.sleep(0.0005)


def _carry_out(order: dict) -> int:
    from keyhole.core.config import Recipe
    from keyhole.core.errors import KeyholeError
    from keyhole.training.loop import train

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    if order.get("plant"):
        plant(**order["plant"])
    try:
        recipe = Recipe.parse(order["recipe"], folder=Path(order["folder"]))
        train(recipe, order["out"], resume=order["resume"])
    except KeyholeError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        return error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def plant(where: str, save: int) -> None:
    """Let the process die at a place inside its `save`-th save, as SIGKILL would have it."""
    from keyhole.record import checkpoint, metrics

    saves = 0
    fill, save_file, fsync, replace = checkpoint._fill, checkpoint.save_file, checkpoint.fsync, os.replace

    def counted(*arguments: object) -> None:
        nonlocal saves
        saves += 1
        fill(*arguments)
        die("before the rename")

    def die(here: str) -> None:
        if where == here and saves == save:
            os._exit(ENDED)

    def cut_file(tensors: dict, file: Path) -> None:
        save_file(tensors, file)
        if where == f"half of {file.name}" and saves == save:
            os.truncate(file, file.stat().st_size // 2)
            os._exit(ENDED)

    def cut_sync(path: Path) -> None:
        if path.name == "state.json" and where == "half of state.json" and saves == save:
            os.truncate(path, path.stat().st_size // 2)
            os._exit(ENDED)
        die(f"before {path.name} is safe")
        fsync(path)

    def renamed(old: Path, new: Path) -> None:
        replace(old, new)
        die("after the rename")

    def prune(path: Path, ignore_errors: bool = False) -> None:
        if where == "half of the pruning" and saves == save and path.name.startswith("step-"):
            (path / "state.json").unlink()
            os._exit(ENDED)
        rmtree(path, ignore_errors)

    rmtree = checkpoint.shutil.rmtree
    checkpoint._fill, checkpoint.save_file, checkpoint.fsync = counted, cut_file, cut_sync
    checkpoint.os = SimpleNamespace(**{**vars(os), "replace": renamed})
    checkpoint.shutil = SimpleNamespace(rmtree=prune)
    if where == "half of a row":
        rows = 0

        def half(self: metrics.MetricsWriter, row: dict) -> None:
            nonlocal rows
            rows += 1
            text = (json.dumps(row) + "\n").encode()
            self._file.write(text[: len(text) // 2] if rows == 3 * save else text)
            self._file.flush()
            if rows == 3 * save:
                os._exit(ENDED)

        metrics.MetricsWriter.write = half


PLACES = (
    "half of weights.safetensors",
    "before weights.safetensors is safe",
    "half of optimizer.safetensors",
    "half of state.json",
    "before the rename",
    "after the rename",
    "half of the pruning",
    "half of a row",
)

if __name__ == "__main__":
    serve()
