"""The report of a search: what came of it in words, a table of its trials, charts; as Markdown beside its record."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.core.errors import InputError
from keyhole.core.files import write_atomically
from keyhole.studies.search.display import show_value, state_of
from keyhole.studies.search.prepare import SEARCH
from keyhole.studies.search.result import BEST, CONFIRM, CONFIRM_SEEDS, SearchResult
from keyhole.studies.search.space import Choice, Range

if TYPE_CHECKING:
    from keyhole.studies.report.charts import Picture
    from keyhole.studies.search.sampler import Trial

MARKDOWN, CHARTS = "report.md", "charts"
PANEL = 270
"""The width of the chart of one key."""


@dataclass(frozen=True)
class SearchReport:
    """Where a report was written."""

    markdown: Path
    charts: dict[str, Path] = field(default_factory=dict)
    """The SVG files by key; a PNG stands beside each."""
    notes: list[str] = field(default_factory=list)
    """What could not be made, and why."""


def write_search_report(result: SearchResult) -> SearchReport:
    """Write report.md and the charts into the search's directory, however far it has come."""
    pictures, written, notes = [], {}, []
    if result.ranked:
        from keyhole.studies.report.charts import save_pictures

        try:
            pictures = draw(result)
            written = save_pictures(pictures, result.path / CHARTS)
        except InputError as error:  # what draws is an extra; the text is whole without it
            notes.append(str(error))
    markdown = result.path / MARKDOWN
    places = {key: Path(os.path.relpath(path, result.path)).as_posix() for key, path in written.items()}
    write_atomically(markdown, to_markdown(result, [(picture, places[picture.key]) for picture in pictures]))
    return SearchReport(markdown, written, notes)


def headline(result: SearchResult) -> str:
    """What was found, in one sentence."""
    counts = dict(result.counts)
    done = counts.pop("complete", 0)
    others = "".join(f", {count} {state}" for state, count in sorted(counts.items()))
    tried = f"{len(result.trials)} trials: {done} complete{others}"
    if result.best is None:
        return f"{tried}. None came to a value."
    return f"{tried}. The {result.plan.goal} {result.objective} is {result.best.value:.4f}, of trial {result.best.number}."


def caution(result: SearchResult) -> str:
    """Why the best value is not to be believed as it stands; nothing where there is none."""
    tried = len(result.trials) - result.counts.get("failed", 0)
    if result.best is None or tried < 2:
        return ""
    seeds = len(result.plan.seeds())
    over = f"over {seeds} seeds" if seeds > 1 else "with one seed"
    return (
        f"The best of {tried} is an optimistic figure: {over} it was picked for its luck as well as for its settings, and "
        "trials that lie close are not told apart."
    )


def next_steps(result: SearchResult) -> dict[str, str]:
    """What to run next, by what it is for."""
    if result.best is None:
        return {}
    best, confirm = (shlex.quote(str(result.path / name)) for name in (BEST, CONFIRM))
    steps = {}
    if not result.unconfirmed:
        steps[f"confirm it on {CONFIRM_SEEDS} other seeds"] = f"keyhole study {confirm} --out {_beside(result, 'confirm')}"
    steps["train the best"] = f"keyhole train {best} --out {_beside(result, 'best')}"
    if result.plan.search.sampler != "grid":  # which has been walked
        steps["try more"] = f"keyhole search {shlex.quote(str(result.path / SEARCH))} --resume --trials N"
    return steps


def _beside(result: SearchResult, name: str) -> str:
    return shlex.quote(str(result.path.parent / f"{result.name}-{name}"))


def rows(result: SearchResult) -> list[tuple[Trial, dict[str, str]]]:
    """The trials as a table shows them: the best first, then those without a value."""
    known = {trial.number for trial in result.ranked}
    others = [trial for trial in result.trials if trial.number not in known]
    return [(trial, _row(result, trial)) for trial in [*result.ranked, *others]]


def _row(result: SearchResult, trial: Trial) -> dict[str, str]:
    value = f"{trial.value:.4f}" if trial.state == "complete" and not trial.diverged else ""
    row = {"trial": str(trial.number)} | {key: show_value(given) for key, given in trial.settings.items()}
    row |= {result.objective: value}
    if result.plan.search.repeats > 1:
        row["by seed"] = " ".join(f"{value:.4f}" for value in trial.values) if value else ""
    last = f" at step {max(trial.reports)}, dev loss {trial.reports[max(trial.reports)]:.4f}" if trial.reports else ""
    state = state_of(trial) + (last if trial.state == "pruned" else "")
    return row | {"state": state, "reason": trial.failure}


def to_markdown(result: SearchResult, pictures: list[tuple[Picture, str]]) -> str:
    """The whole report; each picture with the path that leads to it."""
    from keyhole.studies.report.markdown import plain

    blocks = [f"# {plain(result.name)}", plain(headline(result))]
    if said := caution(result):
        blocks.append(f"> **Mind:** {said}")
    if result.best is not None and (why := result.unconfirmed):
        blocks.append(f"No study confirms it: {plain(why)}.")
    table = [row for _, row in rows(result)]
    if table:
        head = [name for name in table[0] if name != "reason" or any(row["reason"] for row in table)]
        lines = [head, ["---"] * len(head), *[[row[name] for name in head] for row in table]]
        blocks.append("\n".join(f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines))
    for picture, place in pictures:
        blocks += [f"## {plain(picture.title)}", f"![{plain(picture.title)}]({place})", plain(picture.caption)]
    steps = [*next_steps(result).items(), ("repeat it", result.command)]
    blocks += ["## What to run next", "\n\n".join(f"To {what}:\n\n```\n{command}\n```" for what, command in steps)]
    return "\n\n".join(blocks) + "\n"


def draw(result: SearchResult) -> list[Picture]:
    """The charts: the course of the search, and the value against each key."""
    from keyhole.studies.report.charts import Picture
    from keyhole.studies.report.grammar import plain_spec, to_png, to_svg

    missing = len(result.trials) - len(result.ranked)
    course = f"Each dot is a trial; the line is the {result.plan.goal} {result.objective} so far."
    course += f" {missing} trials without a value are left out." if missing else ""
    told = (
        "Each dot is a trial, with all that it has besides; the best is filled. What one panel shows may be due to another."
    )
    made = []
    for key, title, caption, chart in (
        ("trials", "The course of the search", course, _course(result)),
        ("settings", "By setting", told, _settings(result)),
    ):
        svg = to_svg(plain_spec(chart), key, title, caption)
        made.append(Picture(key, title, caption, svg, to_png(svg)))
    return made


def _course(result: SearchResult) -> Any:
    from keyhole.studies.report.grammar import BASELINE, HEIGHT, PALETTE, WIDTH, altair

    alt = altair()
    better = max if result.plan.goal == "highest" else min
    best, values = None, []
    for trial in sorted(result.ranked, key=lambda trial: trial.number):
        best = trial.value if best is None else better(best, trial.value or 0.0)
        values.append({"trial": trial.number, "value": trial.value, "best": best})
    base = alt.Chart(alt.Data(values=values), width=WIDTH, height=HEIGHT)
    across = alt.X("trial:Q", title="trial", axis=alt.Axis(grid=False, tickMinStep=1, format="d"))
    scale = alt.Scale(zero=False)
    line = base.mark_line(interpolate="step-after", color=BASELINE, strokeWidth=1.8)
    dots = base.mark_circle(size=55, opacity=0.8, color=PALETTE[0])
    return alt.layer(
        line.encode(x=across, y=alt.Y("best:Q", title=result.objective, scale=scale)),
        dots.encode(x=across, y=alt.Y("value:Q", title=result.objective, scale=scale)),
    )


def _settings(result: SearchResult) -> Any:
    from keyhole.studies.report.grammar import altair

    alt = altair()
    return alt.concat(*[_panel(result, axis) for axis in result.plan.axes.axes], columns=2, spacing=24)


def _panel(result: SearchResult, axis: Range | Choice) -> Any:
    from keyhole.studies.report.grammar import PALETTE, altair, short

    alt = altair()
    if isinstance(axis, Choice):
        x = alt.X("x:N", title=axis.key, sort=[short(show_value(option)) for option in axis.options])
        x = x.axis(labelAngle=0, labelLimit=PANEL // len(axis.options))
    else:
        scale = alt.Scale(type="log" if axis.log else "linear", domain=[axis.low, axis.high], nice=False, zero=False)
        x = alt.X("x:Q", title=axis.key, scale=scale, axis=alt.Axis(grid=False, tickCount=5, format="~g"))
    y = alt.Y("y:Q", title=result.objective, scale=alt.Scale(zero=False))
    values = [
        {
            "x": short(show_value(value)) if isinstance(axis, Choice) else value,
            "y": trial.value,
            "best": place == 0,
        }
        for place, trial in enumerate(result.ranked)
        for value in [trial.settings[axis.key]]
    ]
    base = alt.Chart(alt.Data(values=values), width=PANEL, height=190)
    return alt.layer(
        base.transform_filter("!datum.best").mark_point(size=45, color=PALETTE[0], opacity=0.85).encode(x=x, y=y),
        base.transform_filter("datum.best").mark_circle(size=90, color=PALETTE[1], opacity=1).encode(x=x, y=y),
    )
