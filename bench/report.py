"""What a measurement hands back, and how it is shown and kept: one table for the terminal, Markdown and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("keyhole", "torch", "transformers", "x-transformers")


class Settings(NamedTuple):
    """How long to measure."""

    rounds: int
    seconds: float
    """Of each contender in each round."""
    quick: bool = False
    """Only to see that everything runs: the figures mean little."""
    train_seconds: float | None = None
    """Of the speedrun, instead of its recipe's own."""


@dataclass
class Table:
    """A title, a header, rows of text, and remarks below."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(f"\n[bold]{escape(self.title)}[/]", highlight=False)
        table = RichTable(box=box.SIMPLE_HEAD)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        console.print(table if self.rows else "  (no figures)")
        for note in self.notes:
            console.print(escape(note), highlight=False)

    def markdown(self) -> str:
        """The same as Markdown."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in [self.header, rule, *self.rows]] if self.rows else ["No figures."]
        return "\n".join([f"### {self.title}", "", *lines, "", *[f"{note}\n" for note in self.notes]])


@dataclass
class Section:
    """One measurement: its tables for people and its figures for programs."""

    tables: list[Table]
    figures: dict[str, Any]
    failures: list[str] = field(default_factory=list)


def spread(values: Sequence[float], form: str = ".2f") -> tuple[str, str]:
    """The median and the range, as text."""
    if not values:
        return "-", "-"
    return f"{statistics.median(values):{form}}", f"{min(values):{form}} to {max(values):{form}}"


def verdict(value: float | None, target: float, *, at_most: bool = False) -> str:
    """Whether a figure meets its target."""
    if value is None:
        return "not measured"
    return "met" if (value <= target if at_most else value >= target) else "missed"


class Busy(NamedTuple):
    """Processor seconds spent so far, by everything on this machine and by this measurement with its processes."""

    machine: float
    own: float
    clock: float

    @classmethod
    def now(cls) -> Busy:
        """Children count once they have ended."""
        words = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, words[1:9])
        ticks = user + nice + system + interrupts + soft + stolen
        return cls(ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic())

    def others_since(self, start: Busy) -> float:
        """How many cores something else kept busy in the meantime: figures count only where this is near zero."""
        others = (self.machine - start.machine) - (self.own - start.own)
        return max(0.0, others / (self.clock - start.clock))


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def keep(name: str, section: Section, settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    """Put one section into the results beside the others' latest; a quick run never replaces measured figures."""
    stem = "quick" if settings.quick else "latest"
    path = RESULTS / f"{stem}.json"
    RESULTS.mkdir(exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    results[name] = {
        "machine": facts,
        "rounds": settings.rounds,
        "figures": section.figures,
        "failures": section.failures,
        "markdown": _markdown(name, section, settings, facts),
    }
    _replace(path, json.dumps(results, indent=1) + "\n")
    _replace(RESULTS / f"{stem}.md", "\n".join(result["markdown"] for result in results.values()))
    return results[name]


def _markdown(name: str, section: Section, settings: Settings, facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in facts["versions"].items())
    lines = [
        f"## {name}",
        "",
        f"{facts['when']}: {facts['processor']}, {facts['cores']} cores, of which other programs kept "
        f"{facts['others_busy']:.2f} busy; {settings.rounds} rounds; Python {facts['python']}, {versions}.",
        "",
        *[table.markdown() for table in section.tables],
        *[f"Failed:\n\n```\n{failure}\n```\n" for failure in section.failures],
    ]
    return "\n".join(lines)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
