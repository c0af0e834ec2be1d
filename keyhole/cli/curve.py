"""Curves in a terminal: braille dots, two across and four down in each character, or ASCII where there are none."""

from __future__ import annotations

import math
from dataclasses import dataclass

Piece = tuple[str, str]
"""Text and its style."""

# The bit of each dot of a braille character, by column and row.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


@dataclass(frozen=True)
class Series:
    """One curve: a line through its points, or with `dots` a mark at each."""

    name: str
    style: str
    points: list[tuple[float, float]]
    dots: bool = False


def plot(series: list[Series], width: int, height: int, unicode: bool = True) -> list[list[Piece]]:
    """Styled text: the curves over a common scale, with axes and a legend; none where there is nothing to draw."""
    series = [Series(s.name, s.style, [p for p in s.points if math.isfinite(p[1])], s.dots) for s in series]
    every = [point for one in series for point in one.points]
    if len(every) < 2 or width < 16 or height < 3:
        return []
    last = max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    high = max(high, low + 1e-9 + 1e-6 * abs(low))
    area = [[(" ", "")] * width for _ in range(height)]
    for one in sorted(series, key=lambda s: s.dots):
        # 0 to 1 from left to right and from top to bottom.
        places = [(x / last if last else 0.0, (high - y) / (high - low)) for x, y in one.points]
        _draw(area, places, one, unicode)
    return [*_framed(area, low, high, unicode), *_below(series, width, last, unicode)]


def _draw(area: list[list[Piece]], places: list[tuple[float, float]], one: Series, unicode: bool) -> None:
    height, width = len(area), len(area[0])
    if one.dots:
        for x, y in places:
            area[round(y * (height - 1))][round(x * (width - 1))] = ("●" if unicode else "o", one.style)
        return
    across, down = (2, 4) if unicode else (1, 1)
    for column, row in _line(places, width * across, height * down):
        r, c = row // down, column // across
        if not unicode:
            area[r][c] = ("*", one.style)
            continue
        drawn = ord(area[r][c][0]) - _BLANK if area[r][c][0] != " " else 0
        area[r][c] = (chr(_BLANK + (drawn | _BITS[column % 2][row % 4])), one.style)


def _line(places: list[tuple[float, float]], columns: int, rows: int) -> set[tuple[int, int]]:
    """The dots that a line through the places covers."""
    dots: set[tuple[int, int]] = set()
    ends = [(x * (columns - 1), y * (rows - 1)) for x, y in places]
    for (x0, y0), (x1, y1) in zip(ends, ends[1:] or ends, strict=False):
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for i in range(steps + 1):
            dots.add((round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)))
    return dots


def _framed(area: list[list[Piece]], low: float, high: float, unicode: bool) -> list[list[Piece]]:
    height = len(area)
    labels = {0: high, height // 2: high - (high - low) * (height // 2) / (height - 1), height - 1: low}
    tick, bar = ("┤", "│") if unicode else ("+", "|")
    return [
        [(f"{_label(labels[row])} {tick}", "dim") if row in labels else (f"{'':8} {bar}", "dim"), *cells]
        for row, cells in enumerate(area)
    ]


def _label(value: float) -> str:
    return f"{value:8.3f}" if abs(value) < 1000 else f"{value:8.1e}"


def _below(series: list[Series], width: int, last: float, unicode: bool) -> list[list[Piece]]:
    corner, flat = ("└", "─") if unicode else ("+", "-")
    end = f"step {last:,.0f}"
    legend: list[Piece] = []
    for one in series:
        if one.points:
            mark = ("●" if unicode else "o") if one.dots else ("⠒⠒" if unicode else "**")
            legend += [(mark, one.style), (f" {one.name}   ", "")]
    room = width - len(end) - 1 - sum(len(text) for text, _ in legend)
    return [
        [(f"{'':8} {corner}{flat * width}", "dim")],
        [(f"{'':9} ", ""), ("0", "dim"), ("  ", ""), *legend, (" " * max(1, room - 2), ""), (end, "dim")],
        [("", "")],
    ]
