"""How quickly 10,000 runs are listed: the first time, when their index is made, and every time after it."""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Section, Settings, Table, spread, verdict
from bench.workers import ROOT
from keyhole.record.index import NAME, list_runs
from tests.record.many_runs import make_runs

TARGET = 1.0
"""Seconds for a listing of 10,000 runs."""


def measure(settings: Settings) -> Section:
    """Seconds of each way to list them; the files are in the system's memory, and the weights are a few bytes."""
    count = 1_000 if settings.quick else 10_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs"
        runs = make_runs(folder, count)
        first = [_first(folder) for _ in range(1 if settings.quick else 2)]
        grown = runs[count // 2] / "metrics.jsonl"
        asked = {
            "again": lambda: list_runs(folder),
            "again, one run has grown": lambda: _grow(grown) or list_runs(folder),
            "filtered and sorted": lambda: list_runs(folder, where=["dev_loss<1.5", "mixer=linear"], sort="dev_loss"),
            "`keyhole runs`, all of them": lambda: _command(folder),
            "`keyhole runs --json`": lambda: _command(folder, "--json"),
            "`keyhole runs --sort dev_loss --limit 20`": lambda: _command(folder, "--sort", "dev_loss", "--limit", "20"),
        }
        seconds = {name: [_seconds(ask) for _ in range(settings.rounds)] for name, ask in asked.items()}
        size = (folder / NAME).stat().st_size
    table = Table(f"{count:,} runs, seconds", ["listing", "median", "range"])
    table.rows += [[name, *spread(values)] for name, values in {"the first": first, **seconds}.items()]
    again = statistics.median(seconds["again"])
    table.notes.append(f"again: {again:.2f} s, at most {TARGET:g}: {verdict(again, TARGET, at_most=True)}")
    table.notes.append(f"the index takes {size / count:,.0f} bytes a run; commands include Python's start")
    return Section([table], {"runs": count, "first": first, **seconds, "index_bytes": size})


def _first(folder: Path) -> float:
    (folder / NAME).unlink(missing_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):
        return _seconds(lambda: list_runs(folder))


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _grow(metrics: Path) -> None:
    with metrics.open("a") as file:
        file.write('{"step": 1001, "loss": 1.0}\n')


def _command(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "keyhole", "runs", str(folder), *words], cwd=ROOT, check=True, capture_output=True
    )
