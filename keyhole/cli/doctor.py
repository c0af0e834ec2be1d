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
    """Check versions, extras, conflicts, precision, memory and disk, and say which command mends what is wrong."""
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
        mark, style = _MARKS[finding.verdict]
        line = Text.assemble((mark if unicode else f"{_ASCII[finding.verdict]:5}", style), f" {finding.statement:<{wide}}  ")
        line.append(finding.measured)
        indent = " " * len(line.plain[: wide + (4 if unicode else 8)])
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
