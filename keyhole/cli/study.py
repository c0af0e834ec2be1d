"""`keyhole study`: carry a study out, and give its verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, print_json


def study(
    source: Annotated[Path, typer.Argument(help="A study's file in TOML.", metavar="STUDY.toml")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The study's directory, which must be new or empty.", show_default="runs/NAME for NAME.toml"
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="How many seeds, instead of the study's own.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many trainings at once, one thread each.", show_default="one a core"),
    ] = None,
    on: Annotated[str, typer.Option(metavar="WHERE", help="Where it runs: local, ray, or ray://host:port.")] = "local",
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on where the study was stopped; seeds and arms may be added.")
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="Show no progress.")] = False,
) -> None:
    """Compare arms over seeds under one budget; every arm is audited before it trains."""
    from keyhole.studies.study import study as carry_out

    result = carry_out(source, out, seeds=seeds, workers=workers, on=on, resume=resume, quiet=quiet)

    from keyhole.cli.report import as_json, show

    written = result.report()
    if json:
        print_json(as_json(result, written))
    else:
        show(result, written)
