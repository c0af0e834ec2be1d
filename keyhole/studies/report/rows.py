"""Charts with a row for each arm, in the plan's order: differences with intervals, and one loss against another."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keyhole.studies.report.grammar import DASHES, FAINT, INK, ROW, SOLID, WIDTH, Look, altair, short
from keyhole.studies.report.wording import number
from keyhole.studies.result import PREFIX_LIMIT

if TYPE_CHECKING:
    from keyhole.studies.statistics import Difference

BETTER, WORSE = "#00664b", "#a83a00"
SPREAD = 6
"""An arm this many times farther out than most is drawn at the edge, with its number: else the others would be dots."""


def forest(found: Mapping[str, Difference], look: Mapping[str, Look], axis: str, *, lower_is_better: bool) -> Any:
    """Each arm's difference with its corrected interval, a line at 0, the verdict in words at the right."""
    alt = altair()
    edge = _edge(found)
    order = [short(name) for name in found]
    rows = [_forest_row(name, one, look[name], edge) for name, one in found.items()]
    base = alt.Chart(alt.Data(values=rows), width=WIDTH - 60, height=alt.Step(ROW))
    y = _names(order)
    title = f"{axis}   ({'better ← 0 → worse' if lower_is_better else 'worse ← 0 → better'})"
    x = alt.X(
        "mean:Q",
        title=title,
        scale=alt.Scale(domain=[-edge, edge], nice=False),
        axis=alt.Axis(tickCount=7, labelExpr="datum.value == 0 ? '0' : format(datum.value, '+~g')", grid=True),
    )
    colour = alt.Color("colour:N", scale=None, legend=None)
    shown = base.transform_filter("datum.mean !== null")
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(color=INK, strokeWidth=1.2).encode(x="zero:Q")
    interval = shown.mark_rule(strokeWidth=2.2).encode(x=alt.X("low:Q", title=title), x2="high:Q", y=y, color=colour)
    layers = [base.mark_rule(opacity=0).encode(y=y), zero, interval]
    for end in ("low", "high"):
        # An interval that goes on beyond the edge has no end there.
        cap = shown.transform_filter(f"!datum.{end}_open").mark_tick(thickness=2.2, size=10, opacity=1)
        layers.append(cap.encode(x=alt.X(f"{end}:Q", title=title), y=y, color=colour))
    fill = alt.Fill("fill:N", scale=None, legend=None)
    mark = alt.Shape("shape:N", scale=None, legend=None)
    point = shown.mark_point(size=85, strokeWidth=2, opacity=1).encode(x=x, y=y, stroke=colour, fill=fill, shape=mark)
    words = base.mark_text(align="left", baseline="middle", dx=12).encode(
        x=alt.value(WIDTH - 60), y=y, text="words:N", color=alt.Color("tone:N", scale=None, legend=None)
    )
    return alt.layer(*layers, point, words)


def _edge(found: Mapping[str, Difference]) -> float:
    reach = []
    for one in found.values():
        ends = [abs(end) for end in (one.mean, one.low_holm, one.high_holm) if end is not None]
        if ends and one.verdict != "not comparable":
            reach.append(max(ends))
    usual = SPREAD * statistics.median(reach)
    return 1.08 * (min(max(reach), usual) or 1e-3)


def _forest_row(name: str, found: Difference, look: Look, edge: float) -> dict[str, Any]:
    hollow = found.verdict in ("not distinguishable", "undecided")
    mean = None if found.verdict == "not comparable" else found.mean
    beyond = mean is not None and abs(mean) > edge
    low, high = found.low_holm, found.high_holm
    # The reasons of the undecided stand in words elsewhere.
    words = found.verdict
    if beyond:
        words += f": {number(mean, 2, '+')}"

    def held(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else min(max(value, -edge), edge)

    return {
        "name": short(name),
        "mean": None if mean is None else held(mean, 0),
        "low": held(low, -edge if high is not None else mean or 0),
        "high": held(high, edge if low is not None else mean or 0),
        "low_open": low is None or low < -edge,
        "high_open": high is None or high > edge,
        "colour": look.colour,
        "fill": "white" if hollow else look.colour,
        "shape": "circle" if not beyond else "triangle-right" if (mean or 0) > 0 else "triangle-left",
        "words": words,
        "tone": {"better": BETTER, "worse": WORSE}.get(found.verdict, FAINT),
    }


def dumbbell(scored: list[tuple[str, float, float, bool]], look: Mapping[str, Look]) -> Any:
    """Arms with their loss read whole (hollow) and prefix by prefix (filled), and what lies between."""
    alt = altair()
    order = [short(name) for name, *_ in scored]
    rows = [
        {
            "name": short(name),
            "full": full,
            "prefix": prefix,
            "colour": look[name].colour,
            "honest": honest,
            "words": _gained(prefix - full),
            "tone": FAINT if abs(prefix - full) <= PREFIX_LIMIT else WORSE,
        }
        for name, full, prefix, honest in scored
    ]
    values = [value for row in rows for value in (row["full"], row["prefix"])]
    room = 0.06 * (max(values) - min(values)) or 0.02
    scale = alt.Scale(domain=[min(values) - room, max(values) + room], nice=False, zero=False)
    base = alt.Chart(alt.Data(values=rows), width=WIDTH - 60, height=alt.Step(ROW))
    y = _names(order)
    title = "loss on the same windows, nats"
    colour = alt.Color("colour:N", scale=None, legend=None)
    x = alt.X("prefix:Q", title=title, scale=scale, axis=alt.Axis(tickCount=7, grid=True))
    between = [
        base.transform_filter(f"datum.honest === {str(honest).lower()}")
        .mark_rule(strokeWidth=2, strokeDash=SOLID if honest else DASHES)
        .encode(x=x, x2="full:Q", y=y, color=colour)
        for honest in (True, False)
    ]
    hollow = base.mark_point(size=110, strokeWidth=2, fill="white", opacity=1).encode(
        x=alt.X("full:Q", title=title, scale=scale), y=y, stroke=colour
    )
    filled = base.mark_point(size=100, filled=True, opacity=1).encode(x=x, y=y, color=colour)
    words = base.mark_text(align="left", baseline="middle", dx=12).encode(
        x=alt.value(WIDTH - 60),
        y=y,
        text="words:N",
        color=alt.Color("tone:N", scale=None, legend=None),
    )
    return alt.layer(*between, hollow, filled, words)


def _gained(gap: float) -> str:
    if abs(gap) <= PREFIX_LIMIT:
        return "the same"
    return f"{number(gap, 2)} nats by reading ahead" if gap > 0 else f"{number(-gap, 2)} nats lost by reading ahead"


def _names(order: list[str]) -> Any:
    alt = altair()
    axis = alt.Axis(
        grid=True, ticks=False, domain=False, labelFontSize=12.5, labelColor=INK, labelPadding=10, labelLimit=240
    )
    return alt.Y("name:N", sort=order, title=None, axis=axis)
