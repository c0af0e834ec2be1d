"""`keyhole runs`: the runs below a folder, chosen and sorted, or some of them side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.listing import lines, shown
from keyhole.cli.output import Json, cell, console, print_json, print_rows, table
from keyhole.core.errors import InputError

_RESULTS = (
    *("state", "honest", "step", "tokens", "seconds", "tokens_per_second", "parameters"),
    *("train_loss", "dev_loss", "dev_bits_per_byte"),
)


def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Where the runs lie (default: runs); with --compare, the runs.", metavar="DIR"),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="EXPR", help="Only these: dev_loss<1.5, mixer=linear, run~demo. May be repeated."),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort by a column, smallest first.")] = None,
    descending: Annotated[bool, typer.Option("--descending", metavar="", help="Largest first.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most so many.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B,C", help="Show these columns; see docs/runs.md.")] = None,
    reindex: Annotated[bool, typer.Option("--reindex", metavar="", help="Read every run anew.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", metavar="", help="Show what differs between the runs given.")
    ] = False,
    json: Json = False,
) -> None:
    """List the runs below a folder, or compare some: how far and how good each is."""
    places = places or []
    if compare:
        if where or sort or descending or limit is not None or columns or reindex:
            raise InputError("--compare takes runs and --json alone, for example keyhole runs --compare runs/a runs/b")
        _compare(places, json)
        return
    if len(places) > 1:
        raise InputError(
            f"got unexpected extra argument ({places[1]}); one folder is listed, and several runs are given to --compare; "
            "see keyhole runs --help"
        )
    from keyhole.record.index import list_runs
    from keyhole.record.query import known_column

    names = [known_column(name.strip()) for name in columns.split(",")] if columns is not None else []
    folder = places[0] if places else Path("runs")
    rows = list_runs(folder, where=where or (), sort=sort, descending=descending, limit=limit, reindex=reindex)
    if json:
        print_rows("runs", [{name: row[name] for name in names} for row in rows] if names else rows)
    elif rows:
        typer.echo("\n".join(lines(rows, names)))
    elif where:
        typer.echo(f"no run in {folder} is so: {', '.join(where)}")
    else:
        typer.echo(f"no runs in {folder}; keyhole train RECIPE.toml makes the first")


def _compare(paths: list[Path], json: bool) -> None:
    from rich.text import Text

    from keyhole.record.compare import compare_runs

    found = compare_runs(paths)
    if json:
        print_json(found)
        return
    common = os.path.commonpath([path.parent for path in paths]) if _alike(paths) else ""
    names = [shown("run", str(path.relative_to(common)) if common else str(path)) for path in paths]
    made = table("", *names)
    for column in made.columns:
        column.header = Text(str(column.header), overflow="fold")
    for name in _RESULTS:
        values = [shown(name, row[name]) for row in found["runs"]]
        if set(values) != {"-"}:
            made.add_row(name, *map(cell, values))
    for section in ("recipe", "environment"):
        made.add_section()
        if not found[section]:
            made.add_row(f"{section}: the same", *("" for _ in paths), style="dim")
        for key, values in found[section].items():
            made.add_row(key, *(Text(_value(value)) for value in values))
    if common not in ("", "."):
        typer.echo(f"in {shown('run', common)}")
    console().print(made)
    for remark in found["remarks"]:
        typer.echo(f"! {shown('', remark)}")


def _alike(paths: list[Path]) -> bool:
    """Whether the runs lie in one place, so that it need not be said of each."""
    return len({path.is_absolute() for path in paths}) == 1


def _value(value: Any) -> str:
    """A recipe's value on one line: a part as it is called."""
    if isinstance(value, dict):
        options = ", ".join(f"{key}={item!r}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')}({options})"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return shown("", value)
