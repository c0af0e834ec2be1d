"""Measure, print the tables, and keep them: `python -m bench [SECTION|all]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from bench.report import Busy, Section, Settings, keep, machine

SECTIONS = (
    "matrix",
    "training",
    "generation",
    "attention",
    "forms",
    "lengths",
    "decoding",
    "ridge",
    "statespace",
    "speedrun",
    "transfer",
    "index",
    "throughput",
)
ROUNDS = {"transfer": 3}
"""Where the usual five would take too long."""
NOISY = 0.1
"""Cores kept busy by others; barriers between two threads then wait for the slower, and small steps suffer most."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("section", nargs="?", choices=[*SECTIONS, "all"], default="all")
    parser.add_argument(
        "--rounds", type=int, help="how often the contenders alternate, or how many seeds (default 5; transfer 3)"
    )
    parser.add_argument("--quick", action="store_true", help="two short rounds: only to see that everything runs")
    parser.add_argument("--seconds", type=float, help="of training in the speedrun, instead of the recipe's own budget")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this call here as well")
    chosen = parser.parse_args(arguments)
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {chosen.rounds}")
    return chosen


def measure(name: str, settings: Settings) -> Section:
    """One section; whatever it fails of is part of its result, so that the others go on."""
    try:
        return importlib.import_module(f"bench.{name}").measure(settings)
    except Exception as error:
        last = traceback.format_exc().strip().splitlines()[-4:]
        return Section([], {}, ["\n    ".join([f"{name}: {type(error).__name__}: {error}", *last])])


def show(section: Section, console: Console) -> None:
    """Tables, then what failed."""
    for table in section.tables:
        table.show(console)
    for failure in section.failures:
        console.print(f"[red]failed:[/] {escape(failure)}", highlight=False)


def main() -> int:
    """Run what was asked for; 1 if anything failed, 130 after Ctrl-C."""
    chosen = parse()
    quick = chosen.quick
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Any] = {}
    for name in SECTIONS if chosen.section == "all" else (chosen.section,):
        rounds = chosen.rounds or (2 if quick else ROUNDS.get(name, 5))
        settings = Settings(rounds, 0.5 if quick else 4.0, quick, chosen.seconds)
        facts = machine()
        console.rule(f"{name}, {settings.rounds} rounds")
        start = Busy.now()
        try:
            section = measure(name, settings)
        except KeyboardInterrupt:
            console.print("stopped; what was measured before is kept")
            return 130
        facts["others_busy"] = Busy.now().others_since(start)
        show(section, console)
        quiet = "[green]quiet[/]" if facts["others_busy"] < NOISY else "[red]not quiet: repeat these figures[/]"
        console.print(f"other programs kept {facts['others_busy']:.2f} of {facts['cores']} cores busy: {quiet}")
        results[name] = keep(name, section, settings, facts)
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["failures"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
