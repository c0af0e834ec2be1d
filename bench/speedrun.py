"""The speedrun recipe over several seeds, each in a fresh process as a user would start it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.matrix import best_rate
from bench.report import Section, Settings, Table, verdict
from bench.workers import ROOT

RECIPE = ROOT / "recipes" / "speedrun.toml"
TARGET_LOSS, TARGET_SECONDS = 1.8857, 7.0
LONG_LOSS, LONG_SECONDS = 1.65, 60.0


def train_once(seed: int, seconds: float | None) -> dict[str, Any]:
    """One run through the public interface: its final validation loss, and when it first came below the target."""
    import keyhole as kh

    changes: dict[str, Any] = {"train.seed": seed, "data.seed": seed}
    if seconds is not None:
        changes["train.seconds"] = seconds
    recipe = kh.Recipe.load(RECIPE).replace(changes)
    with tempfile.TemporaryDirectory() as folder:
        run = kh.train(recipe, out=Path(folder) / "run", quiet=True)
        metrics = run.metrics
    measured = [line for line in metrics if line.get("dev_loss") is not None]
    target, _ = targets(seconds)
    reached = next((line["seconds"] for line in measured if line["dev_loss"] <= target), None)
    return {
        "seed": seed,
        "steps": metrics[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        "dev_loss": measured[-1]["dev_loss"],
        "reached_at": reached,
    }


def targets(seconds: float | None) -> tuple[float, float]:
    """The loss to reach, and the seconds of training it may take."""
    return (LONG_LOSS, LONG_SECONDS) if seconds else (TARGET_LOSS, TARGET_SECONDS)


def in_fresh_process(seed: int, seconds: float | None) -> dict[str, Any]:
    """No run profits from what an earlier one warmed up."""
    command = [sys.executable, "-m", "bench.speedrun", str(seed), *([str(seconds)] if seconds else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n    ".join(done.stderr.strip().splitlines()[-8:])
        raise RuntimeError(f"seed {seed} exited with {done.returncode}\n    {last}")
    return json.loads(done.stdout.splitlines()[-1])


def row(one: dict[str, Any]) -> tuple[str, ...]:
    """One seed's line."""
    reached = "never" if one["reached_at"] is None else f"{one['reached_at']:.2f}"
    figures = (f"{one['dev_loss']:.4f}", f"{one['seconds']:.2f}", reached)
    return (str(one["seed"]), *figures, str(one["steps"]), f"{one['bf16_gflops']:.0f}")


def measure(settings: Settings) -> Section:
    """Seeds 0, 1, 2 and so on, as many as there are rounds, the matrix rate measured before each."""
    seconds = settings.train_seconds
    loss, limit = targets(seconds)
    failures: list[str] = []
    runs: list[dict[str, Any]] = []
    for seed in range(settings.rounds):
        gigaflops = best_rate(torch.bfloat16, settings.seconds)
        try:
            runs.append({**in_fresh_process(seed, seconds), "bf16_gflops": gigaflops})
        except RuntimeError as error:
            failures.append(str(error))
    header = ("seed", "dev loss", "seconds", "target reached at", "steps", "bf16 GFLOP/s")
    table = Table(f"Speedrun: whole dev split of tiny Shakespeare, target {loss} in {limit:g} s", header)
    table.rows.extend(map(row, runs))
    figures: dict[str, Any] = {"runs": runs}
    for key, target in (("dev_loss", loss), ("seconds", limit)):
        values = [one[key] for one in runs]
        mean = statistics.fmean(values) if values else None
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        figures[key] = {"mean": mean, "deviation": deviation, "target": target}
        shown = "-" if mean is None else f"{mean:.4f} +- {deviation:.4f}"
        reached = verdict(mean, target, at_most=True)
        table.notes.append(f"{key}: mean and standard deviation {shown}, at most {target}: {reached}")
    return Section([table], figures, failures)


if __name__ == "__main__":
    result = train_once(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None)
    print(json.dumps(result))
