"""`keyhole doctor`: is this machine fit, and what mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from keyhole.cli.output import Json, console, print_json, speaks_unicode

if TYPE_CHECKING:
    from keyhole.core.findings import Finding

_MARKS = {"holds": ("✓", "green"), "fails": ("✗", "bold red"), "undecided": ("-", "yellow")}
_ASCII = {"holds": "ok", "fails": "FAILS", "undecided": "-"}


def doctor(json: Json = False) -> None:
    """Check this machine, and say which command mends what is wrong.

    Looks at versions, extras, known conflicts, threads, precision, memory, disk and cache. Exits 1 when a check fails.
    """
    from keyhole.doctor import examine

    found = examine()
    failed = [finding for finding in found if finding.verdict == "fails"]
    if json:
        print_json({"findings": [finding.to_dict() for finding in found], "failed": len(failed)})
    else:
        _show(found, failed)
    if failed:
        raise typer.Exit(1)


def _show(found: list[Finding], failed: list[Finding]) -> None:
    from rich.text import Text

    screen, unicode = console(), speaks_unicode()
    wide = max(len(finding.statement) for finding in found)
    for finding in found:
        sign, style = _MARKS[finding.verdict]
        mark = sign if unicode else f"{_ASCII[finding.verdict]:5}"
        line = Text.assemble((mark, style), f" {finding.statement:<{wide}}  ")
        indent = " " * len(line.plain)
        line.append(finding.measured)
        if finding.verdict == "fails":
            line.append(f"  (expected {finding.expected})", style="red")
        if finding.verdict != "holds" and finding.why:
            line.append(f"\n{indent}{finding.why}", style="dim")
        if finding.remedy:
            line.append(f"\n{indent}{finding.remedy}", style="cyan")
        screen.print(line, soft_wrap=True)
    screen.print()
    if failed:
        screen.print(f"[bold red]{len(failed)} to mend[/]: {', '.join(finding.statement for finding in failed)}")
    else:
        screen.print("[green]fit to train[/]; next: keyhole train recipes/first.toml")
