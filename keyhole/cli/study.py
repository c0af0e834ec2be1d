"""`keyhole study`: carry a study out, and give its verdicts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.options import Quiet, Where, Workers
from keyhole.cli.output import Json, console, next_steps

if TYPE_CHECKING:
    from keyhole.studies.result import StudyResult


def study(
    source: Annotated[Path, typer.Argument(help="A study's file in TOML.", metavar="STUDY.toml")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The study's directory, which must be new or empty.", show_default="runs/NAME for NAME.toml"
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="How many seeds, instead of the study's own.")] = None,
    workers: Workers = None,
    on: Where = "local",
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on where the study was stopped; seeds and arms may be added.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare arms over seeds under one budget; every arm is audited before it trains."""
    from keyhole.studies.study import study as carry_out

    result = carry_out(source, out, seeds=seeds, workers=workers, on=on, resume=resume, quiet=quiet)

    from keyhole.cli.report import tell

    tell(result, json=json)
    if not json:
        next_steps(console(), _next(result))
    if any(trial.state != "done" for arm in result.arms for trial in arm.trials):
        raise typer.Exit(1)  # an arm that reads the future is a verdict; one without a result is a failure


def _next(result: StudyResult) -> dict[str, str]:
    """What one may do with a study that has ended."""
    from keyhole.model.registry import CATALOGUE

    place = shlex.quote(str(result.path))
    steps: dict[str, str] = {}
    for arm in result.arms:
        for kind in CATALOGUE:
            changed = arm.changes.get(f"model.{kind}")
            if not arm.honest and isinstance(changed, str):
                steps[f"keyhole audit {shlex.quote(changed)} --kind {kind}"] = "how it reads the future, and what mends it"
    more = 2 * len(result.plan.seeds)
    steps[f"keyhole study {place}/study.toml --resume --seeds {more}"] = "more seeds: narrower intervals"
    steps[f"keyhole runs {place}"] = "every run of it, to filter, sort and compare"
    first = next((trial.path for arm in result.arms if arm.honest for trial in arm.done), None)
    if first is not None:
        steps[f"keyhole sample {shlex.quote(str(first))}"] = "let one of them write"
    return steps
