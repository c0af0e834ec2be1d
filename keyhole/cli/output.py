"""How commands print: text for people, or one JSON object; never both."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object instead of text.")]

PIPE_WIDTH = 160
"""Columns where the terminal's width is unknown: files and pipes take long lines."""


_STDOUT: ContextVar[TextIO | None] = ContextVar("stdout", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Keep stdout for the one JSON object: what else prints meanwhile, such as a part of the user's, goes to stderr."""
    kept = _STDOUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _STDOUT.reset(kept)


def answers() -> TextIO:
    """Where a command's answer goes: stdout, whoever else has been turned away from it."""
    return _STDOUT.get() or sys.stdout


def print_json(value: Any) -> None:
    """One JSON object on stdout. JSON has no infinity and no NaN: they become null."""
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False), file=answers())


def print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """One JSON object that holds a list, one row a line: many rows are quick to write and easy to search."""
    texts = [json.dumps(_finite(row), ensure_ascii=False) for row in rows]
    typer.echo(f'{{"{name}": [\n' + ",\n".join(texts) + "\n]}" if texts else f'{{"{name}": []}}', file=answers())


def console() -> Console:
    """Stdout for tables and colours; plain text where it is not a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with a rule under its head and no frame; the columns in `right` hold numbers, which stay whole."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return made


def cell(text: str, style: str = "") -> Text:
    """Text for a table that is cut short, rather than wrapped, where the terminal is narrow."""
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; a dash where there is none."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "infinite"
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


def next_steps(screen: Console, steps: dict[str, str]) -> None:
    """Commands to go on with, and what each does."""
    from rich.markup import escape

    screen.print("\n  next")
    wide = max(map(len, steps))
    for command, what in steps.items():
        screen.print(f"    [green]{escape(command):<{wide}}[/]   [dim]{what}[/]", soft_wrap=True)


def speaks_unicode() -> bool:
    """Whether stdout can show lines and dots, or ASCII alone."""
    try:
        "⠿●│✓".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
