"""A long list of runs as lines of text: as many columns as fit, each as wide as it must be.

Rich's tables take 4 s for 10,000 rows; these lines take a tenth of one, and choose their columns by the width there is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from keyhole.cli.output import console, number, speaks_unicode
from keyhole.record.columns import COLUMNS

ORDER = (
    *("run", "state", "honest", "step", "train_loss", "dev_loss", "model", "optimizer", "rate", "source"),
    *("tokens_per_second", "parameters", "modified"),
)
"""The columns of a listing, from left to right."""
FIRST = (
    *("run", "state", "step", "train_loss", "dev_loss", "honest", "model", "optimizer", "source", "rate", "modified"),
    *("tokens_per_second", "parameters"),
)
"""The same, by who is let in first where the line is short."""
NARROWEST = {"run": 24, "state": 20, "model": 24, "source": 14}
"""How far a column may be cut to let another in."""
READABLE = 48
"""How much of a run's path goes before the columns after the model."""
GAP = "  "
LOSSES = ("train_loss", "dev_loss", "dev_bits_per_byte")
_TITLES = {
    "train_loss": "train\nloss",
    "dev_loss": "dev\nloss",
    "dev_bits_per_byte": "dev bits\n/ byte",
    "tokens_per_second": "tokens\n/ second",
}
_COLOURS = {"done": "green", "unfinished": "yellow", "no checkpoint": "yellow"}


def _whole(value: float) -> str:
    return f"{value:,.0f}"


_FORMS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("step", "saved", "steps", "tokens", "parameters", "tokens_per_second"), _whole),
    **dict.fromkeys(LOSSES, number),
    "seconds": lambda value: f"{value:,.1f}",
    "rate": lambda value: f"{value:g}",
    "source": lambda value: Path(value).name,
    "started": lambda value: value[:16].replace("T", " "),
    "modified": lambda value: value[:16].replace("T", " "),
}


class _Column(NamedTuple):
    name: str
    title: list[str]
    cells: list[str]
    wanted: int
    narrowest: int

    @property
    def right(self) -> bool:
        return COLUMNS[self.name].kind == "number"


def lines(rows: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> Iterable[str]:
    """The head, a rule, and a line for each run; the columns that were asked for, or those that fit."""
    output = console()
    columns = [_column(name, rows) for name in names or ORDER]
    width = output.width
    if not sys.stdout.isatty():  # a program that reads the lines wants to find the run
        columns = [column._replace(narrowest=column.wanted) if column.name == "run" else column for column in columns]
    chosen = columns if names else _fitting(columns, width)
    widths = _widths(chosen, width)
    dots = "…" if speaks_unicode() else "..."
    for level in range(max(len(column.title) for column in chosen)):
        head = GAP.join(
            _placed(column, column.title[level], size, dots) for column, size in zip(chosen, widths, strict=True)
        )
        yield typer.style(head.rstrip(), bold=True) if output.is_terminal else head.rstrip()
    yield ("─" if speaks_unicode() else "-") * min(width, sum(widths) + len(GAP) * (len(widths) - 1))
    coloured = output.color_system is not None and not output.no_color
    for number_, row in enumerate(rows):
        cells = [_placed(column, column.cells[number_], size, dots) for column, size in zip(chosen, widths, strict=True)]
        if coloured:
            cells = [_coloured(column.name, cell, row) for column, cell in zip(chosen, cells, strict=True)]
        yield GAP.join(cells).rstrip()


def shown(name: str, value: Any) -> str:
    """A value as people read it; a dash where there is none. What is not of its kind is shown as it is."""
    if value is None:
        return "-"
    try:
        text = _FORMS.get(name, str)(value)
    except (TypeError, ValueError):
        text = str(value)
    # The names of folders and what an error quotes may hold anything; a terminal must not obey it.
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)


def _column(name: str, rows: Sequence[dict[str, Any]]) -> _Column:
    cells = [shown(name, row[name]) for row in rows]
    title = _TITLES.get(name, name).split("\n")
    title = [""] * (2 - len(title)) + title
    wanted = max(map(_length, (*title, *cells)))
    return _Column(name, title, cells, wanted, min(wanted, NARROWEST.get(name, wanted)))


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """Those of the usual columns that fit and say something of at least one run."""
    told = {column.name: column for column in columns if column.name in FIRST[:5] or set(column.cells) - {"-"}}
    chosen: list[_Column] = []
    for name in FIRST:
        if name not in told:
            continue
        path = 0 if FIRST.index(name) <= FIRST.index("model") else min(told["run"].wanted, READABLE) - told["run"].narrowest
        if len(chosen) < 2 or _least([*chosen, told[name]]) + max(path, 0) <= width:
            chosen.append(told[name])
    return [column for column in columns if column in chosen]


def _least(columns: list[_Column]) -> int:
    return sum(column.narrowest for column in columns) + len(GAP) * (len(columns) - 1)


def _widths(columns: list[_Column], width: int) -> list[int]:
    """The narrowest for all, and what is left to those that want more, from left to right."""
    left = width - _least(columns)
    sizes = []
    for column in columns:
        more = min(max(left, 0), column.wanted - column.narrowest)
        sizes.append(column.narrowest + more)
        left -= more
    return sizes


def _placed(column: _Column, text: str, size: int, dots: str) -> str:
    if (length := _length(text)) > size:
        text = _cut(text, size, dots, column.name == "run")
        length = _length(text)
    spaces = " " * (size - length)
    return spaces + text if column.right else text + spaces


def _cut(text: str, size: int, dots: str, end: bool) -> str:
    """The end of a path, the beginning of anything else."""
    room = max(size - len(dots), 0)
    while _length(text) > room:
        over = max(1, (_length(text) - room) // 2)
        text = text[over:] if end else text[:-over]
    return dots[:size] + text if end else text + dots[:size]


def _length(text: str) -> int:
    """Columns on the screen; some signs take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _coloured(name: str, cell: str, row: dict[str, Any]) -> str:
    if name == "state":
        return typer.style(cell, fg=_COLOURS.get(row["state"], "red"))
    if row["honest"] == "fails" and name == "honest":
        return typer.style(cell, fg="red")
    if row["honest"] == "fails" and name in LOSSES:
        text = cell.strip()  # struck out: it cannot be compared
        return cell.replace(text, typer.style(text, strikethrough=True))
    return cell
