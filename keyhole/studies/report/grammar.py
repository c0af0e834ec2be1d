"""The one grammar of all charts: colours by arm, lines with bands of seeds, rows of arms, and how they become files.

An arm has one colour in every chart; an arm that is not honest is grey and dashed in all. Up to FEW arms share a panel and
carry their names at the ends of their lines; more get a panel each, with the baseline behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from keyhole.core.errors import InputError

if TYPE_CHECKING:
    from keyhole.studies.result import StudyResult

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#d09a00", "#56a4d8", "#882255", "#6b7a1f")
"""Told apart with every common kind of colour blindness, and dark enough for lines on white."""
BASELINE, UNFAIR, INK, FAINT, RULE = "#222222", "#8c8c8c", "#222222", "#666666", "#e4e4e4"
BEHIND = "#b9b9b9"
"""The baseline where it is the same background of every panel."""
DASHES, SOLID = [5, 3], [1, 0]
FEW = 8
"""So many arms fit one panel."""
WIDTH, HEIGHT, ROW = 600, 300, 30
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
LONGEST_NAME = 30


Point = tuple[float, float, float, float]
"""A place along x; the mean, the lowest and the highest over seeds."""


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in all charts."""

    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Line:
    """An arm's course."""

    arm: str
    look: Look
    points: list[Point]


@dataclass(frozen=True)
class Axis:
    """A quantity along an axis."""

    title: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    """What lies above is cut off."""
    format: str = ""
    ticks: tuple[float, ...] = ()


def altair() -> Any:
    """Altair, where it is installed."""
    try:
        import altair
        import vl_convert  # noqa: F401 - what draws must be there as well
    except ImportError:
        raise InputError("charts need altair and vl-convert; install them with: pip install 'keyhole[study]'") from None
    return altair


def arm_looks(result: StudyResult) -> dict[str, Look]:
    """The look of each arm, by its place in the plan, so that no chart can disagree with another."""
    found, taken = {}, 0
    for arm in result.arms:
        if not arm.honest:
            found[arm.name] = Look(UNFAIR, dashed=True)
        elif arm.name == result.plan.baseline:
            found[arm.name] = Look(BASELINE)
        else:
            found[arm.name] = Look(PALETTE[taken % len(PALETTE)])
            taken += 1
    return found


def short(name: str) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def lines(drawn: list[Line], baseline: str, x: Axis, y: Axis, mark: tuple[float, str] | None = None) -> Any:
    """Lines with bands: in one panel with their names at the ends, or a panel for each arm where there are many."""
    alt = altair()
    drawn = [line for line in drawn if line.points]
    xs = [point[0] for line in drawn for point in line.points]
    x = replace(x, low=min(xs), high=max(xs))
    y = _held(drawn, y)
    if len(drawn) <= FEW:
        base = alt.Chart(width=WIDTH, height=HEIGHT)
        layers = alt.layer(*_line_layers(base, x, y), data=alt.Data(values=_rows(drawn, y)))
        return alt.layer(layers, *_names(drawn, x, y), *_mark(mark, x, WIDTH))
    behind = [
        Line(line.arm, replace(line.look, colour=BEHIND), _thin(line.points)) for line in drawn if line.arm == baseline
    ]
    rows: list[dict[str, Any]] = []
    for line in drawn:
        if line.arm != baseline:
            # The baseline's points stand in every panel: a panel shows one arm against it.
            shown = [*_rows(behind, y, band=False), *_rows([Line(line.arm, line.look, _thin(line.points))], y)]
            rows += [row | {"panel": short(line.arm)} for row in shown]
    panel = alt.Chart(width=150, height=100)
    layers = alt.layer(
        *_line_layers(panel, x, y, small=True), *_mark(mark, x, 150, named=False), data=alt.Data(values=rows)
    )
    order = [short(line.arm) for line in drawn if line.arm != baseline]
    head = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    return layers.facet(facet=alt.Facet("panel:N", sort=order, header=head), columns=4, spacing=14)


def _thin(points: list[Point], most: int = 32) -> list[Point]:
    """As many points as a small panel shows; the last always."""
    step = -(-len(points) // most)
    return [*points[:-1:step], points[-1]]


def _held(drawn: list[Line], y: Axis) -> Axis:
    """Bounds that hold all that is drawn, or what the axis asks for."""
    low = min(point[2] for line in drawn for point in line.points) if y.low is None else y.low
    high = max(point[3] for line in drawn for point in line.points) if y.high is None else y.high
    room = 0.04 * (high - low) or 0.01 * abs(high) or 0.01
    return replace(y, low=low - room, high=high + room)


def _rows(drawn: list[Line], y: Axis, *, band: bool = True) -> list[dict[str, Any]]:
    """The points of lines as a chart takes them; a line that leaves the panel at its top is cut into pieces there."""
    top = y.high if y.high is not None else float("inf")
    return [
        {
            "piece": f"{line.arm} {number}",
            "x": at,
            "y": mean,
            "low": low,
            "high": min(high, top),
            "band": band and any(point[3] > point[2] for point in piece),
            "colour": line.look.colour,
            "dashed": line.look.dashed,
        }
        for line in drawn
        for number, piece in enumerate(below(line.points, top))
        for at, mean, low, high in piece
    ]


def below(points: list[Point], top: float) -> list[list[Point]]:
    """The pieces of a course whose mean lies at or below `top`, with the places where it crosses it."""
    pieces: list[list[Point]] = []
    last: Point | None = None
    for point in points:
        inside, was = point[1] <= top, last is not None and last[1] <= top
        crossing = None
        if last is not None and inside != was:
            part = (top - last[1]) / (point[1] - last[1])
            x, _, low, high = (a + part * (b - a) for a, b in zip(last, point, strict=True))
            crossing = (x, top, low, high)
        if inside:
            if not was:
                pieces.append([] if crossing is None else [crossing])
            pieces[-1].append(point)
        elif crossing is not None:
            pieces[-1].append(crossing)
        last = point
    return pieces


def _line_layers(base: Any, x: Axis, y: Axis, small: bool = False) -> list[Any]:
    alt = altair()
    scale = {"type": "log", "base": 2} if x.log else {}
    ticks = {"values": list(x.ticks)} if x.ticks else {"tickCount": 3 if small else 7}
    across = alt.X(
        "x:Q",
        title=x.title,
        scale=alt.Scale(domain=[x.low, x.high], nice=False, **scale),
        axis=alt.Axis(format=x.format or "~s", grid=False, labelOverlap=True, labelFlush=True, **ticks),
    )
    down = alt.Y(
        "y:Q",
        title=y.title,
        scale=alt.Scale(domain=[y.low, y.high], nice=False, zero=False),
        axis=alt.Axis(tickCount=3 if small else 6),
    )
    colour = alt.Color("colour:N", scale=None, legend=None)
    detail = alt.Detail("piece:N")
    area = base.transform_filter("datum.band").mark_area(opacity=0.18)
    low = alt.Y("low:Q", title=y.title)
    made = [area.encode(x=across, y=low, y2="high:Q", color=colour, detail=detail)]
    for dashed in (False, True):
        kind = base.transform_filter(f"datum.dashed === {str(dashed).lower()}")
        drawn = kind.mark_line(strokeWidth=1.8, strokeDash=DASHES if dashed else SOLID)
        made.append(drawn.encode(x=across, y=down, color=colour, detail=detail))
    return made


def _names(drawn: list[Line], x: Axis, y: Axis) -> list[Any]:
    """The name of each arm at the right, moved apart where ends lie close, with a hair line to the end it names."""
    alt = altair()
    low, high = y.low or 0.0, y.high or 1.0
    ends = {line.arm: min(max(line.points[-1][1], low), high) for line in drawn}
    pixel = (high - low) / HEIGHT
    places = spread({arm: (high - end) / pixel for arm, end in ends.items()}, apart=16, limit=HEIGHT)
    rows = [
        {
            "name": short(line.arm),
            "x": line.points[-1][0],
            "edge": x.high,
            "y": ends[line.arm],
            "label": high - places[line.arm] * pixel,
            "colour": line.look.colour,
        }
        for line in drawn
    ]
    base = alt.Chart(alt.Data(values=rows))
    colour = alt.Color("colour:N", scale=None, legend=None)
    text = base.mark_text(align="left", baseline="middle", dx=20, fontSize=12.5, fontWeight="bold")
    hair = base.mark_rule(strokeWidth=0.7, opacity=0.7, x2Offset=17)
    return [
        hair.encode(x="x:Q", x2="edge:Q", y=alt.Y("y:Q", title=y.title), y2="label:Q", color=colour),
        text.encode(x="edge:Q", y=alt.Y("label:Q", title=y.title), text="name:N", color=colour),
    ]


def spread(places: Mapping[str, float], apart: float, limit: float) -> dict[str, float]:
    """Places moved as little as needed to lie `apart` from one another, between 0 and `limit`."""

    def centre(names: list[str]) -> float:
        half = apart * (len(names) - 1) / 2
        return min(max(sum(places[name] for name in names) / len(names), half), max(half, limit - half))

    groups: list[list[str]] = []  # names of those that touch
    for name in sorted(places, key=places.__getitem__):
        groups.append([name])
        while len(groups) > 1:
            over, under = groups[-2:]
            if centre(under) - centre(over) >= apart * (len(over) + len(under)) / 2:
                break
            groups[-2:] = [over + under]
    return {
        name: centre(names) + apart * (place - (len(names) - 1) / 2) for names in groups for place, name in enumerate(names)
    }


def _mark(mark: tuple[float, str] | None, x: Axis, width: int, named: bool = True) -> list[Any]:
    """A vertical line with a word at its head."""
    if mark is None:
        return []
    alt = altair()
    at, word = mark
    place = width * (at - (x.low or 0)) / ((x.high or 1) - (x.low or 0))
    rule = alt.Chart(alt.Data(values=[{}])).mark_rule(strokeDash=[2, 3], color=FAINT).encode(x=alt.value(place))
    if not named:
        return [rule]
    text = alt.Chart(alt.Data(values=[{}])).mark_text(align="left", baseline="top", dx=5, dy=2, color=FAINT, fontSize=12)
    return [rule, text.encode(x=alt.value(place), y=alt.value(0), text=alt.value(word))]


def theme() -> dict[str, Any]:
    """What all charts share: fonts, axes, quiet lines."""
    return {
        "background": "white",
        "padding": {"left": 10, "right": 32, "top": 10, "bottom": 8},
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelFontSize": 12,
            "titleFontSize": 12.5,
            "titleFontWeight": "normal",
            "labelColor": "#444444",
            "titleColor": INK,
            "gridColor": RULE,
            "domainColor": "#999999",
            "tickColor": "#999999",
            "titlePadding": 8,
        },
        "text": {"fontSize": 12.5},
    }


def plain_spec(chart: Any) -> dict[str, Any]:
    """The chart with its theme, as plain data."""
    return dict(chart.configure(**theme()).to_dict(validate=False))


def to_svg(spec: dict[str, Any], key: str, title: str, description: str) -> str:
    """The chart as SVG, with a name and a description for those who cannot see it."""
    import vl_convert

    return named(vl_convert.vegalite_to_svg(spec), key, title, description)


def to_png(svg: str) -> bytes:
    """The same picture as PNG, twice as fine as the screen."""
    import vl_convert

    return bytes(vl_convert.svg_to_png(svg, scale=2))


def named(svg: str, key: str, title: str, description: str) -> str:
    """A picture with its title; its ids begin with its key, so that several can stand in one page."""
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    svg = re.sub(r'((?:xlink:)?href)="#', rf'\1="#{key}-', svg)
    # Within one picture all is said by its description.
    svg = re.sub(r' (?:aria-[a-z]+|role)="[^"]*"', "", svg)
    head = f'<svg role="img" aria-labelledby="{key}-title {key}-desc"'
    said = f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
    start, end = re.match(r"<svg", svg), svg.index(">")
    if start is None:
        raise ValueError("what was drawn is no SVG")
    return f"{head}{svg[start.end() : end + 1]}{said}{svg[end + 1 :]}"
