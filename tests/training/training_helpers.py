"""Tiny runs, and what it means that two of them are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from keyhole.core.config import Recipe
from keyhole.record import checkpoint

ROOT = Path(__file__).resolve().parents[2]
CLOCK = ("seconds", "tokens_per_second")
TINY: dict[str, dict[str, Any]] = {
    "data": {"source": "text.txt", "block": 8},
    "model": {"layers": 1, "heads": 2, "width": 16},
    "train": {
        "steps": 12,
        "batch": 4,
        "precision": "float32",
        "warmup": 2,
        "save_every": 3,
        "eval_every": 4,
        "log_every": 1,
    },
}


def write_text(folder: Path) -> None:
    """A text of sentences and lines: small, so that runs go over it many times."""
    draw = random.Random(1)
    words = ["the", "a", "small", "key", "door", "opens", "under", "light", "of", "every", "old", "house", "no", "hand"]
    lines = [" ".join(draw.choices(words, k=draw.randint(2, 7))).capitalize() + "." for _ in range(40)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def values(**changes: Any) -> dict[str, dict[str, Any]]:
    """The tiny recipe with keys changed, written `train_steps=5`."""
    nested = {section: dict(keys) for section, keys in TINY.items()}
    for key, value in changes.items():
        section, _, name = key.partition("_")
        if name in ("tokens", "seconds") and section == "train":
            nested[section].pop("steps")
        nested[section][name] = value
    return nested


def tiny(folder: Path, **changes: Any) -> Recipe:
    """The tiny recipe on the text in `folder`."""
    if not (folder / "text.txt").exists():
        write_text(folder)
    return Recipe.parse(values(**changes), folder=folder)


def end(out: Path) -> dict[str, Any]:
    """Everything that must be equal in two runs that are the same: tensors, state, and rows without their clocks."""
    saved, faults = checkpoint.latest(out / "checkpoints")
    assert saved is not None
    assert not faults
    weights, optimizer = (load_file(saved.path / f"{name}.safetensors") for name in ("weights", "optimizer"))
    state = {key: value for key, value in saved.state.items() if key not in ("seconds", "metrics_offset", "files")}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]
    return {"weights": weights, "optimizer": optimizer, "state": state, "rows": rows}


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Names of what is not equal, bit for bit."""
    found = []
    for kind in ("weights", "optimizer"):
        names = one[kind].keys() | two[kind].keys()
        found += [f"{kind}: {n}" for n in sorted(names) if not _same(one[kind].get(n), two[kind].get(n))]
    found += [kind for kind in ("state", "rows") if one[kind] != two[kind]]
    return found


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


class Trainer:
    """Trainings in processes of their own, which can be killed at any moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "KEYHOLE_CACHE": str(folder / "cache")}
        environment = {**os.environ, **own}
        self._server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/training/training_driver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder,
        )  # fmt: skip

    def run(self, recipe: dict[str, Any], out: Path, *, resume: bool = False, **order: Any) -> int:
        """Carry a training out; returns its exit code, negative for a signal. See the driver for `plant` and `stop`."""
        files = {"folder": str(self.folder), "out": str(out), "log": str(log_of(out))}
        self._server.stdin.write(json.dumps({"recipe": recipe, "resume": resume, **files, **order}) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def kill_often(
    trainer: Trainer, recipe: dict[str, Any], out: Path, kills: int, seconds: float, draw: random.Random
) -> Counter[str]:
    """Kill a run up to `kills` times at random moments, going on each time, until it is done; tells what they hit."""
    hit: Counter[str] = Counter()
    while True:
        stop = {"number": signal.SIGKILL, "seconds": draw.uniform(0, seconds)} if hit.total() < kills else None
        code = trainer.run(recipe, out, resume=(out / "recipe.toml").is_file(), stop=stop)
        if code == 0:
            return hit
        assert code == -signal.SIGKILL, log_of(out).read_text()
        if any((out / "checkpoints").glob(".writing-*")):
            hit["inside a save"] += 1
        else:
            hit["between saves" if (out / "recipe.toml").is_file() else "before the run began"] += 1


def log_of(out: Path) -> Path:
    """What a run in a process of its own said."""
    return out.with_name(f"{out.name}.log")
