"""The one grammar of all charts: colours by arm, lines with bands of seeds, rows of arms, and how they become files.

An arm has one colour in every chart; an arm that is not honest is grey and dashed in all. Up to FEW arms share a panel and
carry their names at the ends of their lines; more get a panel each, with the baseline behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from keyhole.core.errors import InputError

if TYPE_CHECKING:
    from keyhole.studies.result import StudyResult

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#d09a00", "#56a4d8", "#882255", "#6b7a1f")
"""Told apart with every common kind of colour blindness, and dark enough for lines on white."""
BASELINE, UNFAIR, INK, FAINT, RULE = "#222222", "#8c8c8c", "#222222", "#666666", "#e4e4e4"
DASHES, SOLID = [5, 3], [1, 0]
FEW = 8
"""So many arms fit one panel."""
WIDTH, HEIGHT, ROW = 600, 300, 30
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
LONGEST_NAME = 30


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in all charts."""

    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Line:
    """An arm's course: points of x, mean, lowest and highest."""

    arm: str
    look: Look
    points: list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Axis:
    """A quantity along an axis."""

    title: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    format: str = ""


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
    x = Axis(x.title, x.log, min(xs), max(xs), x.format)
    y = _held(drawn, y)
    if len(drawn) <= FEW:
        base = alt.Chart(alt.Data(values=_rows(drawn)), width=WIDTH, height=HEIGHT)
        layers = [*_line_layers(base, x, y), *_names(drawn, x, y), *_mark(mark, x, WIDTH)]
        return alt.layer(*layers)
    behind = [line for line in drawn if line.arm == baseline]
    rows = []
    for line in drawn:
        if line.arm != baseline:
            # The baseline's points stand in every panel: a panel shows one arm against it.
            rows += [row | {"panel": short(line.arm)} for row in _rows([*behind, line], band=line.arm)]
    panel = alt.Chart(width=150, height=100)
    layers = alt.layer(
        *_line_layers(panel, x, y, small=True), *_mark(mark, x, 150, named=False), data=alt.Data(values=rows)
    )
    order = [short(line.arm) for line in drawn if line.arm != baseline]
    head = alt.Header(title=None, labelFontSize=12, labelFontWeight="bold", labelAnchor="start", labelColor=INK)
    return layers.facet(facet=alt.Facet("panel:N", sort=order, header=head), columns=4, spacing=14)


def _held(drawn: list[Line], y: Axis) -> Axis:
    """Bounds that hold all that is drawn, or what the axis asks for."""
    low = min(point[2] for line in drawn for point in line.points) if y.low is None else y.low
    high = max(point[3] for line in drawn for point in line.points) if y.high is None else y.high
    room = 0.04 * (high - low) or 0.01 * abs(high) or 0.01
    return Axis(y.title, y.log, low - room, high + (room if y.high is None else 0), y.format)


def _rows(drawn: list[Line], band: str | None = None) -> list[dict[str, Any]]:
    return [
        {
            "arm": line.arm,
            "x": at,
            "y": mean,
            # One seed has no band, and a panel shows only its own arm's.
            "low": low if band in (None, line.arm) else mean,
            "high": high if band in (None, line.arm) else mean,
            "colour": line.look.colour,
            "dashed": line.look.dashed,
        }
        for line in drawn
        for at, mean, low, high in line.points
    ]


def _line_layers(base: Any, x: Axis, y: Axis, small: bool = False) -> list[Any]:
    alt = altair()
    across = alt.X(
        "x:Q",
        title=x.title,
        scale=alt.Scale(type="log", base=2, domain=[x.low, x.high], nice=False)
        if x.log
        else alt.Scale(domain=[x.low, x.high], nice=False),
        axis=alt.Axis(format=x.format or "~s", tickCount=3 if small else 7, grid=False, labelOverlap=True, labelFlush=True),
    )
    down = alt.Y(
        "y:Q",
        title=y.title,
        scale=alt.Scale(domain=[y.low, y.high], nice=False, zero=False),
        axis=alt.Axis(tickCount=3 if small else 6, **({"format": y.format} if y.format else {})),
    )
    colour = alt.Color("colour:N", scale=None, legend=None)
    detail = alt.Detail("arm:N")
    area = base.mark_area(opacity=0.16, clip=True).encode(
        x=across, y=alt.Y("low:Q", title=y.title), y2="high:Q", color=colour, detail=detail
    )
    made = [area]
    for dashed in (False, True):
        kind = base.transform_filter(f"datum.dashed === {str(dashed).lower()}")
        drawn = kind.mark_line(strokeWidth=1.8, strokeDash=DASHES if dashed else SOLID, clip=True)
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
        "padding": {"left": 10, "right": 14, "top": 10, "bottom": 8},
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


def to_svg(chart: Any, key: str, title: str, description: str) -> str:
    """The chart as SVG, with a name and a description for those who cannot see it."""
    import vl_convert

    spec = chart.configure(**theme()).to_dict(validate=False)
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
