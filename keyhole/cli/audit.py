"""`keyhole audit`: is it honest, and does it do what it says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.output import Json, cell, console, print_json, speaks_unicode, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from keyhole.core.findings import Finding

_STYLES = {"holds": "green", "fails": "bold red", "undecided": "yellow"}
_SIGNS = {"holds": "✓ holds", "fails": "✗ fails", "undecided": "· not asked"}
_ASCII = {"holds": "holds", "fails": "FAILS", "undecided": "- not asked"}
HEADS = {"honesty": "Is it honest?", "faithfulness": "Does it do what it says?"}


def audit(
    target: Annotated[
        str,
        typer.Argument(help="A part (built in, or my.py:Mine), a run, or a Hugging Face model's folder.", metavar="TARGET"),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="mixer, merge, position, norm or feed.", show_default="what it looks like"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the part; may be given many times."),
    ] = None,
    no_canary: Annotated[
        bool,
        typer.Option("--no-canary", metavar="", help="Do not train the canary on random tokens (a part's slowest probe)."),
    ] = False,
    json: Json = False,
) -> None:
    """Ask whether a part or a model reads what it may not, and whether its fast forms are what they stand for.

    Every probe is asked in float64 and proves that it could have seen something. Exits 1 when one fails.
    """
    from keyhole.core.config import parse_setting

    options = dict(parse_setting(setting) for setting in settings or [])
    if sys.stderr.isatty():
        sys.stderr.write(f"auditing {target} ...\r")
        sys.stderr.flush()
    from keyhole.audits import audit as ask

    found = ask(target, kind=kind, options=options or None, canary=not no_canary)
    if sys.stderr.isatty():
        sys.stderr.write(" " * (len(target) + 13) + "\r")
    failed = [finding for finding in found if finding.verdict == "fails"]
    if json:
        print_json({"target": target, "findings": [finding.to_dict() for finding in found], "failed": len(failed)})
    else:
        _show(target, found, failed)
    if failed:
        raise typer.Exit(1)


def _show(target: str, found: list[Finding], failed: list[Finding]) -> None:
    screen = console()
    for aspect, head in HEADS.items():
        asked = [finding for finding in found if finding.aspect == aspect]
        if asked:
            _table(screen, head, asked)
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in failed:
        # One fault breaks several rules: it is told once.
        kind = finding.evidence.get("diagnosis") or finding.name
        alike.setdefault((_who(finding), kind), []).append(finding)
    for findings in alike.values():
        _fault(screen, findings)
    _not_asked(screen, [finding for finding in found if finding.verdict == "undecided"])
    _verdict(screen, target, failed)


def _verdict(screen: Console, target: str, failed: list[Finding]) -> None:
    """The last line: may its loss be believed?"""
    from rich.text import Text

    if any(finding.aspect == "honesty" for finding in failed):
        said = Text.assemble((f"{target} is not honest", "bold red"), ": do not believe its loss until this is mended")
    elif failed:
        said = Text.assemble((f"{len(failed)} to mend", "bold red"), f": {', '.join(finding.name for finding in failed)}")
    else:
        said = Text.assemble((f"{target} passes", "green"), ": nothing that was asked fails")
    screen.print(said, soft_wrap=True)


def _who(finding: Finding) -> str:
    """What a finding is about."""
    return finding.statement.partition(": ")[0]


def _table(screen: Console, head: str, asked: list[Finding]) -> None:
    from rich.text import Text

    several = len({_who(finding) for finding in asked}) > 1
    screen.print(Text(head, "bold"))
    shown = table(*["of"] * several, "probe", "score", "limit", "verdict", "seen", right=("score", "limit"))
    words = _SIGNS if speaks_unicode() else _ASCII
    for finding in asked:
        verdict = Text(words[finding.verdict], _STYLES[finding.verdict], no_wrap=True)
        numbers = (_number(finding.score), _number(finding.limit))
        who = [cell(_who(finding), "cyan")] * several
        shown.add_row(*who, Text(finding.name, no_wrap=True), *numbers, verdict, _seen(finding))
    screen.print(shown)


def _seen(finding: Finding) -> Text:
    """What stands at the end of a row: where it failed, what was reported, how strongly it was asked."""
    if finding.verdict == "undecided":
        return cell(finding.measured if finding.measured != "nothing" else "", "dim")
    if finding.verdict == "fails":
        return cell(finding.evidence.get("where") or finding.measured, "red")
    said = finding.measured.partition("; ")[2]
    if said or finding.score is None or finding.name in ("canary", "prefix loss"):
        return cell(said or finding.measured, "dim")
    power = finding.evidence.get("power")
    changes = finding.evidence.get("changes", 0)
    reached = f"{changes:,} change{'s' * (changes != 1)}, reaching what they may with up to {power:.2g}" if power else ""
    return cell(reached, "dim")


def _fault(screen: Console, findings: list[Finding]) -> None:
    """One fault in full: which probes saw it, what it is, why it matters, how to mend it."""
    from rich.padding import Padding
    from rich.text import Text

    first = findings[0]
    names = ", ".join(dict.fromkeys(finding.name for finding in findings))
    mark = "✗" if speaks_unicode() else "!"
    screen.print(Text.assemble((f"{mark} {names}", "bold red"), f"  in {_who(first)}"), soft_wrap=True)
    what = first.evidence.get("diagnosis") or first.measured
    for word, said in (("what", what), ("why", first.why), ("remedy", first.remedy)):
        if said:
            screen.print(Padding(Text.assemble((f"{word:<8}", "dim"), said), (0, 0, 0, 2), expand=False))
    if first.code:
        screen.print()
        for line in first.code.splitlines():
            screen.print(Text(f"          {line}", "cyan"), soft_wrap=True)
    screen.print()


def _not_asked(screen: Console, undecided: list[Finding]) -> None:
    from rich.text import Text

    if not undecided:
        return
    screen.print(Text("Could not be asked", "bold"))
    wide = max(len(finding.name) for finding in undecided)
    for finding in undecided:
        screen.print(Text.assemble((f"  {finding.name:<{wide}}  ", "yellow"), finding.remedy))
    screen.print()


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"
