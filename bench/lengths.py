"""Time and memory of training against length: every mixer beside softmax, in the table and in pictures.

One row, width 128, one thread; 4 heads of 32 channels, polynomial 8 of 16. Dense softmax is the definition; softmax
is ours.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from bench.mixing import CONTENDERS, in_a_process
from bench.report import Section, Settings, Table, verdict
from bench.workers import ROOT

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DENSE_AT_MOST = 8192
"""Beyond, the definition's matrices of scores do not fit beside one another."""
FROM = 1024
"""Shorter texts take less memory than what any process takes and gives back."""
LEVEL = ("linear", "polynomial", "ridge", "statespace")
"""Whose cost a token must not grow."""
PICTURES = ROOT / "docs" / "mixers"

Figures = dict[str, dict[int, dict[str, float]]]


def measured(settings: Settings) -> Figures:
    """All mixers at all lengths, rounds interleaved; medians of time, the least of peak memory."""
    lengths = (512, 1024) if settings.quick else LENGTHS
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _, tokens, name in itertools.product(range(min(settings.rounds, 3)), lengths, CONTENDERS):
        if name != "softmax, dense" or tokens <= DENSE_AT_MOST:
            found.setdefault((name, tokens), []).append(in_a_process(name, tokens, settings.seconds / 10))
    figures: Figures = {name: {} for name in CONTENDERS}
    for (name, tokens), runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        figures[name][tokens] = {"seconds": seconds, "mb": min(run["mb"] for run in runs)}
    return figures


def measure(settings: Settings) -> Section:
    """The tables, what follows from them, and the pictures."""
    figures = measured(settings)
    tables = [
        _table("Training: microseconds a token, forward and backward", figures, _microseconds, ",.2f"),
        _table("Training: peak memory added, MB", figures, lambda _, one: one["mb"], ",.0f"),
        _conclusions(figures),
    ]
    if not settings.quick:
        tables[-1].notes.append(f"pictures: {', '.join(path.name for path in draw(figures, PICTURES))}")
    return Section(tables, {name: {str(T): one for T, one in row.items()} for name, row in figures.items()})


def _microseconds(tokens: int, one: dict[str, float]) -> float:
    return 1e6 * one["seconds"] / tokens


def _table(title: str, figures: Figures, value: Any, form: str) -> Table:
    lengths = sorted({tokens for row in figures.values() for tokens in row})
    table = Table(title, ("mixer", *(f"{tokens:,}" for tokens in lengths)))
    for name, row in figures.items():
        table.rows.append((name, *(f"{value(T, row[T]):{form}}" if T in row else "-" for T in lengths)))
    return table


def _conclusions(figures: Figures) -> Table:
    """The figures that were promised, and whether they were kept."""
    table = Table("What follows", ("figure", "value", "target", ""))
    measured_lengths = sorted(figures["linear"])
    short, long = min(512, measured_lengths[-1]), min(4096, measured_lengths[-1])
    for name in LEVEL:
        ratio = _microseconds(long, figures[name][long]) / _microseconds(short, figures[name][short])
        met = verdict(ratio, 1.3, at_most=True)
        table.rows.append((f"{name}: cost a token at {long:,} / at {short:,}", f"{ratio:.2f}", "at most 1.3", met))
    dense, linear = (figures[name][long]["seconds"] for name in ("softmax, dense", "linear"))
    table.rows.append((f"dense softmax / linear at {long:,}", f"{dense / linear:.1f}", "5", verdict(dense / linear, 5)))
    for name, row in figures.items():
        power = _growth({T: one["mb"] for T, one in row.items() if T >= FROM})
        target = ("-", "-") if "dense" in name else ("at most 1.1", verdict(power, 1.1, at_most=True))
        table.rows.append((f"{name}: memory grows as T^p, p", "-" if power is None else f"{power:.2f}", *target))
    for name in [name for name in figures if "softmax" not in name]:
        for other in ("softmax, dense", "softmax"):
            shown = _crossover(figures[name], figures[other])
            table.rows.append((f"{name}: quicker than {other} from", shown, "-", "-"))
    return table


def _growth(mb: dict[int, float]) -> float | None:
    """p of the power law that fits best, by least squares of logarithms; None with fewer than three lengths."""
    if len(mb) < 3:
        return None
    return statistics.linear_regression(
        [math.log(T) for T in mb], [math.log(max(1.0, value)) for value in mb.values()]
    ).slope


def _crossover(row: dict[int, dict[str, float]], other: dict[int, dict[str, float]]) -> str:
    """The shortest measured length from which on one is always quicker than the other."""
    since = None
    for tokens in sorted(set(row) & set(other), reverse=True):
        if row[tokens]["seconds"] >= other[tokens]["seconds"]:
            break
        since = tokens
    return "not reached" if since is None else f"{since:,}"


def draw(figures: Figures, folder: Path) -> list[Path]:
    """One picture a mixer, time and memory against length beside softmax, and one of all."""
    import altair

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chosen in [None, *(name for name in figures if "softmax" not in name)]:
        names = [name for name in figures if chosen in (None, name) or "softmax" in name]
        rows = [
            {"mixer": name, "tokens": T, "us": _microseconds(T, one), "MB": max(1.0, one["mb"])}
            for name in names
            for T, one in figures[name].items()
        ]
        charts = [_chart(altair, rows, names, *axis) for axis in (("us", "microseconds a token"), ("MB", "MB, peak"))]
        path = folder / f"{chosen or 'all'}.svg"
        altair.hconcat(*charts).configure_view(strokeWidth=0).save(path)
        written.append(path)
    return written


def _chart(altair: Any, rows: list[dict[str, Any]], names: list[str], key: str, title: str) -> Any:
    logarithmic = altair.Scale(type="log", nice=False, padding=8)
    lengths = sorted({row["tokens"] for row in rows})
    ours = [name for name in names if "softmax" not in name]
    grey = ["#bbbbbb", "#777777"]
    palette = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#eeca3b"]
    colours = altair.Scale(domain=[*names[:2], *ours], range=[*grey, *palette[: len(ours)]])
    return (
        altair.Chart(altair.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=altair.X("tokens:Q", scale=logarithmic, title="tokens", axis=altair.Axis(values=lengths, format="d")),
            y=altair.Y(f"{key}:Q", scale=logarithmic, title=title, axis=altair.Axis(tickCount=6, format="~g")),
            color=altair.Color("mixer:N", scale=colours, title=None),
        )
        .properties(width=300, height=240)
    )
