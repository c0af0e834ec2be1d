"""`keyhole report`: what a study found, in the terminal and as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.output import Json, console, print_json, speaks_unicode

if TYPE_CHECKING:
    from keyhole.studies.report import Report
    from keyhole.studies.result import ArmResult, StudyResult


def report(
    study: Annotated[Path, typer.Argument(help="A study's directory.", metavar="STUDY_DIR")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the HTML file goes.", show_default="STUDY_DIR/report.html")
    ] = None,
    md: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the Markdown goes.", show_default="STUDY_DIR/report.md")
    ] = None,
    json: Json = False,
) -> None:
    """Tell what a study found, and write it up as Markdown, one HTML file and charts.

    A study that is still going on is told of as far as it has come.
    """
    from keyhole.studies.result import open_study

    tell(open_study(study), html, md, json=json)


def tell(result: StudyResult, html: Path | None = None, md: Path | None = None, *, json: bool = False) -> None:
    """Write the report of a study, and print it."""
    written = result.report(html, md)
    if json:
        print_json(as_json(result, written))
    else:
        show(result, written)


def show(result: StudyResult, written: Report | None = None) -> None:
    """The report for people, on stdout."""
    from rich.markup import escape

    from keyhole.studies.report.terminal import render

    screen = console()
    styled = screen.is_terminal and not screen.no_color
    for part in render(result, screen.width, unicode=speaks_unicode(), styled=styled):
        screen.print(part)
    if written is None:
        return
    screen.print()
    places = {"page": written.html, "text": written.markdown}
    places |= {"charts": next(iter(written.charts.values())).parent} if written.charts else {}
    for name, path in places.items():
        screen.print(f"  {name:<8} [bold]{escape(str(path))}[/]", soft_wrap=True)
    for note in written.notes:
        screen.print(f"  [yellow]{escape(note)}[/]", soft_wrap=True)
    screen.print(f"  {'again':<8} [green]{escape(result.command)}[/]", soft_wrap=True)


def as_json(result: StudyResult, written: Report | None = None) -> dict[str, Any]:
    """The report for programs."""
    from keyhole.studies.report.sentences import by_prefixes, environment, headlines, state, warnings

    found: dict[str, Any] = {
        "study": result.name,
        "path": str(result.path),
        "measure": result.measure,
        "baseline": result.plan.baseline,
        "seeds": list(result.plan.seeds),
        "complete": result.complete,
        "state": state(result) or "complete",
        "arms": [_arm(result, arm) for arm in result.arms],
        "differences": {name: one.to_dict() for name, one in result.differences.items()},
        "differences_by_prefixes": {name: one.to_dict() for name, one in by_prefixes(result).items()},
        "verdicts": result.verdicts,
        "in_words": headlines(result),
        "pairing": result.paired.to_dict(),
        "warnings": warnings(result),
        "notes": result.notes,
        "environment": environment(result),
        "command": result.command,
    }
    if written is not None:
        charts = {key: str(path) for key, path in written.charts.items()}
        found["files"] = {"html": str(written.html), "markdown": str(written.markdown), "charts": charts}
        found["files"]["notes"] = written.notes
    return found


def _arm(result: StudyResult, arm: ArmResult) -> dict[str, Any]:
    from dataclasses import asdict

    from keyhole.studies.report.tables import SPENT, prefix_mean

    estimate = arm.estimate(result.measure)
    return {
        "name": arm.name,
        "note": arm.note,
        "changes": arm.changes,
        "honest": arm.honest,
        "estimate": None if estimate is None else asdict(estimate),
        "prefix": {key: prefix_mean(arm, key) for key in ("full", "prefix", "gap")},
        "by_seed": arm.by_seed(result.measure),
        "states": {trial.seed: trial.state for trial in arm.trials},
        "spent": {key: arm.mean(key) for key in SPENT} | {"parameters": arm.parameters},
        "rates": arm.rates,
        "rate": arm.rate,
        "findings": [finding.to_dict() for finding in arm.findings],
    }
