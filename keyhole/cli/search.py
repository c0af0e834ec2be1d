"""`keyhole search`: try settings of a recipe, and say which came out best and how far to believe it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.options import Quiet, Where, Workers
from keyhole.cli.output import Json, cell, console, print_json, table

if TYPE_CHECKING:
    from keyhole.studies.search.report import SearchReport
    from keyhole.studies.search.result import SearchResult

SHOWN = 30
"""So many trials in the terminal; the report has all."""


def search(
    source: Annotated[Path, typer.Argument(help="A search's file in TOML.", metavar="SEARCH.toml")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The search's directory, which must be new or empty.",
            show_default="runs/NAME for NAME.toml",
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="How many trials, instead of the search's own.")] = None,
    workers: Workers = None,
    on: Where = "local",
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on where the search was stopped; trials may be added.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try settings of a recipe, by grid, at random or by a model of what was found, and write the best as a recipe."""
    from keyhole.studies.search.conduct import search as carry_out
    from keyhole.studies.search.report import write_search_report

    result = carry_out(source, out, trials=trials, workers=workers, on=on, resume=resume, quiet=quiet)
    written = write_search_report(result)
    if json:
        files = {"report": str(written.markdown), "charts": {key: str(path) for key, path in written.charts.items()}}
        print_json(result.to_dict() | {"files": files | {"notes": written.notes}})
    else:
        show(result, written)
    if result.best is None:
        raise typer.Exit(1)


def show(result: SearchResult, written: SearchReport) -> None:
    """What was found, for people, on stdout."""
    from rich.markup import escape

    from keyhole.studies.search.report import caution, headline, next_steps, rows

    screen = console()
    found = rows(result)
    keys = [key for key in found[0][1] if key != "reason"] if found else []
    made = table(*keys, right=("trial", result.objective, "by seed"))
    for place, (_, row) in enumerate(found[:SHOWN]):
        style = "bold green" if place == 0 and result.best is not None else ""
        made.add_row(*(cell(row[key], style) for key in keys))
    screen.print(made)
    if len(found) > SHOWN:
        screen.print(f"and {len(found) - SHOWN} more, see {escape(str(written.markdown))}", soft_wrap=True)
    screen.print(escape(headline(result)), soft_wrap=True)
    for reason in dict.fromkeys(row["reason"] for _, row in found if row["reason"]):
        which = [str(trial.number) for trial, row in found if row["reason"] == reason]
        screen.print(f"[red]trial {', '.join(which)}[/]: {escape(reason)}", soft_wrap=True)
    if said := caution(result):
        screen.print(f"[yellow]Mind:[/] {said}", soft_wrap=True)
    screen.print()
    steps = {"report": str(written.markdown)}
    steps |= {"charts": str(next(iter(written.charts.values())).parent)} if written.charts else {}
    steps |= next_steps(result)
    width = max(map(len, steps))
    for what, place in steps.items():
        screen.print(f"  {what:<{width}}  [green]{escape(place)}[/]", soft_wrap=True)
    for note in written.notes:
        screen.print(f"  [yellow]{escape(note)}[/]", soft_wrap=True)
