"""The charts of a study: what of it is better seen than read. Each is made where its numbers were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.core.files import write_atomically
from keyhole.record.metrics import read_metrics
from keyhole.studies.report.grammar import (
    FEW,
    Axis,
    Line,
    Look,
    altair,
    arm_looks,
    lines,
    plain_spec,
    to_png,
    to_svg,
)
from keyhole.studies.report.rows import dumbbell, forest
from keyhole.studies.report.wording import MEASURES

if TYPE_CHECKING:
    from keyhole.studies.result import ArmResult, StudyResult, TrialResult

GRID = 80
"""A curve is drawn through at most so many points."""
SHOWN_FROM = 0.2
"""Curves fall steeply at first; what arms differ by afterwards would be a hair's breadth if all of it were shown."""


@dataclass(frozen=True)
class Picture:
    """A chart, drawn."""

    key: str
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class _Chart:
    key: str
    title: str
    caption: str
    spec: dict[str, Any]


def draw(result: StudyResult) -> list[Picture]:
    """All charts that the study has numbers for, as SVG and PNG."""
    altair()
    # What turns charts into pictures is no Python and leaves the other core free: one is drawn while the next is made.
    with ThreadPoolExecutor(2) as pool:
        drawn = [pool.submit(_picture, chart) for kind in KINDS if (chart := kind(result)) is not None]
        return [picture.result() for picture in drawn]


def _picture(chart: _Chart) -> Picture:
    svg = to_svg(chart.spec, chart.key, chart.title, chart.caption)
    return Picture(chart.key, chart.title, chart.caption, svg, to_png(svg))


def save_charts(result: StudyResult, folder: str | Path) -> dict[str, Path]:
    """Draw all charts and write each as SVG and PNG; returns the paths of the SVG files by key."""
    return save_pictures(draw(result), Path(folder))


def save_pictures(pictures: Iterable[Picture], folder: Path) -> dict[str, Path]:
    """Write pictures as SVG and PNG; one of an earlier report that is not made any more is taken away."""
    written = {}
    for picture in pictures:
        written[picture.key] = folder / f"{picture.key}.svg"
        write_atomically(written[picture.key], picture.svg)
        write_atomically(folder / f"{picture.key}.png", picture.png)
    for key in KEYS:
        if key not in written:
            for ending in ("svg", "png"):
                (folder / f"{key}.{ending}").unlink(missing_ok=True)
    return written


def _differences(result: StudyResult) -> _Chart | None:
    found = {name: one for name, one in result.differences.items() if one.mean is not None or one.verdict != "undecided"}
    if not any(one.low_holm is not None or one.high_holm is not None for one in found.values()):
        return None
    name, unit = MEASURES[result.measure]
    lower = result.measure != "accuracy"
    caption = (
        f"{name.capitalize()} of each arm minus {result.plan.baseline}'s, paired by seed, with intervals corrected over "
        "arms; "
        f"{'left' if lower else 'right'} of 0 is better. Hollow: not distinguishable. Not comparable: no mark."
    )
    axis = f"difference in {name}{f', {unit}' if unit else ''}"
    drawn = forest(result.differences, arm_looks(result), axis, lower_is_better=lower)
    return _Chart("differences", f"Difference to {result.plan.baseline}", caption, plain_spec(drawn))


def _whole_and_prefix(result: StudyResult) -> _Chart | None:
    from keyhole.studies.report.tables import prefix_mean

    rows = [
        (arm.name, full, prefix, arm.honest)
        for arm in result.arms
        if (full := prefix_mean(arm, "full")) is not None and (prefix := prefix_mean(arm, "prefix")) is not None
    ]
    if not rows:
        return None
    caption = (
        "Hollow: the loss when a window is read whole, as every training script reports it. Filled: each token foretold "
        "from what stands before it alone, as use does. An honest model has both in one place."
    )
    return _Chart("prefix", "Read whole, and prefix by prefix", caption, plain_spec(dumbbell(rows, arm_looks(result))))


def _curves(result: StudyResult) -> _Chart | None:
    key, axis = _against(result)
    courses = {arm.name: _courses(arm, key) for arm in result.arms}
    drawn = [line for arm in result.arms if (line := _line(arm.name, courses[arm.name], arm_looks(result)))]
    if sum(len(line.points) > 1 for line in drawn) == 0:
        return None
    end = max(point[0] for line in drawn for point in line.points)
    late = [point[3] for line in drawn for point in line.points if point[0] >= SHOWN_FROM * end]
    caption = (
        "Dev loss while training: the mean over seeds, and between the lowest and the highest seed. "
        f"The steep first fifth is cut off. {_key(drawn)}"
    )
    chart = lines(drawn, result.plan.baseline, Axis(axis), Axis("dev loss, nats", high=max(late)))
    return _Chart("curves", "Dev loss while training", caption, plain_spec(chart))


def _against(result: StudyResult) -> tuple[str, str]:
    """What the budget promised is what curves are drawn against."""
    unit = (result.plan.budget or ("steps", 0))[0]
    return {"tokens": ("tokens", "tokens"), "flops": ("flops", "FLOPs"), "seconds": ("seconds", "seconds")}.get(
        unit, ("step", "steps")
    )


def _courses(arm: ArmResult, key: str) -> list[list[tuple[float, float]]]:
    from keyhole.studies.match import TRAINING_FLOPS

    def at(row: dict[str, Any]) -> float | None:
        if key != "flops":
            return row.get(key)
        return None if arm.flops_per_token is None else TRAINING_FLOPS * arm.flops_per_token * row["tokens"]

    return [
        [
            (float(place), float(row["dev_loss"]))
            for row in read_metrics(trial.path)
            if row.get("dev_loss") is not None and (place := at(row)) is not None
        ]
        for trial in _drawable(arm)
    ]


def _drawable(arm: ArmResult) -> list[TrialResult]:
    """Trainings that are done or going on; a diverged one is told of in words."""
    return [trial for trial in arm.trials if trial.state in ("done", "missing")]


def _line(arm: str, courses: list[list[tuple[float, float]]], found: dict[str, Look]) -> Line | None:
    """Mean, lowest and highest of courses, at the places of the first, as far as all of them go."""
    import numpy as np

    courses = [course for course in courses if course]
    if not courses:
        return None
    # Seeds may be measured at slightly different places (a budget in seconds): straight lines between them.
    start, end = max(course[0][0] for course in courses), min(course[-1][0] for course in courses)
    grid = [place for place, _ in courses[0] if start <= place <= end] or [end]
    grid = grid[:: math.ceil(len(grid) / GRID)] + ([end] if grid[-1] != end and end > start else [])
    values = np.array([np.interp(grid, *zip(*course, strict=True)) for course in courses])
    points = zip(grid, values.mean(0), values.min(0), values.max(0), strict=True)
    return Line(arm, found[arm], [(float(x), float(m), float(low), float(high)) for x, m, low, high in points])


def _positions(result: StudyResult) -> _Chart | None:
    def course(trial: TrialResult) -> list[tuple[float, float]]:
        # Four points for each doubling: later positions differ little, and one of them alone is mostly chance.
        return together(trial.values.get("positions", ()), lambda position: int(4 * math.log2(max(position, 1))))

    drawn = [line for arm in result.arms if (line := _line(arm.name, [*map(course, arm.done)], arm_looks(result)))]
    if not any(len(line.points) > 1 for line in drawn):
        return None
    axis = Axis("position in the block", log=True, format="~d")
    chart = lines(drawn, result.plan.baseline, axis, Axis("dev loss, nats"))
    caption = (
        "Dev loss by position in the block, neighbours taken together, mean and range over seeds: what more context is "
        f"worth. {_key(drawn)}"
    )
    return _Chart("positions", "Loss by position", caption, plain_spec(chart))


def _past(result: StudyResult) -> _Chart | None:
    factors = result.plan.file.measure.past
    if not factors:
        return None
    longest, block = f"{max(factors):g}", result.plan.arm(result.plan.baseline).recipe.data.block
    size = block / 8 * max(1, math.ceil(max(factors) / 6))

    def course(trial: TrialResult) -> list[tuple[float, float]]:
        found = trial.values.get("past", {}).get(longest, {}).get("positions", ())
        # Few windows are read so far: single positions are mostly chance.
        return together(found, lambda position: int((position - 1) // size))

    drawn = [line for arm in result.arms if (line := _line(arm.name, [*map(course, arm.done)], arm_looks(result)))]
    if not any(len(line.points) > 1 for line in drawn):
        return None
    absent = [arm.name for arm in result.arms if arm.done and arm.name not in {line.arm for line in drawn}]
    caption = (
        f"Dev loss by position in windows {longest} times as long as those that trained, neighbours taken together. "
        f"{f'Not drawn, because they cannot read so far: {_listed(absent)}. ' if absent else ''}{_key(drawn)}"
    )
    # Next to the loss of a window's first tokens, which nothing stands before, all else would look flat.
    top = max(point[3] for line in drawn for point in line.points if point[0] > block / 8)
    axes = Axis("position", format="~d"), Axis("loss, nats", high=top)
    chart = lines(drawn, result.plan.baseline, *axes, mark=(block, "trained length"))
    return _Chart("past", "Beyond the trained length", caption, plain_spec(chart))


def together(points: Iterable[Sequence[float]], group: Callable[[float], int]) -> list[tuple[float, float]]:
    """Points whose places fall into one group, as their mean."""
    groups: dict[int, list[Sequence[float]]] = {}
    for point in points:
        groups.setdefault(group(point[0]), []).append(point)
    return [(statistics.fmean(x for x, _ in found), statistics.fmean(y for _, y in found)) for found in groups.values()]


def _key(drawn: list[Line]) -> str:
    """What the looks of lines mean."""
    behind = "Pale in every panel: the baseline. " if len(drawn) > FEW else ""
    return behind + ("Grey and dashed: not comparable." if any(line.look.dashed for line in drawn) else "")


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _rates(result: StudyResult) -> _Chart | None:
    drawn = []
    for arm in result.arms:
        found = [(rate, loss, loss, loss) for rate, loss in sorted(arm.rates.items()) if loss is not None]
        if found:
            drawn.append(Line(arm.name, arm_looks(result)[arm.name], found))
    if not any(len(line.points) > 1 for line in drawn):
        return None
    caption = (
        "Mean dev loss at each learning rate that was tried; every arm tried as many. A course whose lowest point is its "
        "first or last may go lower beyond it. A rate at which training diverged has no point. " + _key(drawn)
    )
    top = _robust_top([point[1] for line in drawn for point in line.points])
    tried = tuple(sorted({rate for arm in result.arms for rate in arm.rates}))
    axes = Axis("learning rate", log=True, format="~g", ticks=tried), Axis("dev loss, nats", high=top)
    return _Chart("rates", "Loss by learning rate", caption, plain_spec(lines(drawn, result.plan.baseline, *axes)))


def _robust_top(values: list[float]) -> float:
    """A bound that a few ruined trainings do not set."""
    low, middle = min(values), statistics.median(values)
    return min(max(values), middle + 3 * (middle - low)) if middle > low else max(values)


KINDS = (_differences, _whole_and_prefix, _curves, _positions, _past, _rates)
KEYS = ("differences", "prefix", "curves", "positions", "past", "rates")
