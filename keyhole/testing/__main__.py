"""Ask the battery from a shell: `python -m keyhole.testing [PART ...] [--kind mixer]`; without a part, all built-in ones.

Exit code 1 when a rule fails; a built-in part that is kept because it fails does not count in the round of all. Options
of a part are given in Python: `keyhole.testing.check("window", options={"window": 4})`.
"""

from __future__ import annotations

import argparse
import sys

from keyhole.core.errors import KeyholeError
from keyhole.core.findings import Finding
from keyhole.model.registry import CATALOGUE, warning
from keyhole.testing.battery import check


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m keyhole.testing", description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help='a name, or "my.py:Mine"; without one, every built-in part'
    )
    parser.add_argument("--kind", choices=list(CATALOGUE), default="mixer", help="what kind of part it is (default mixer)")
    return parser.parse_args(arguments)


def summary(kind: str, name: str, findings: list[Finding]) -> str:
    """One line a part, and below it what failed or could not be asked."""
    held = sum(finding.verdict == "holds" for finding in findings)
    lines = [f"{kind:>8}  {name:<18} {held} of {len(findings)} rules hold"]
    for finding in findings:
        if finding.verdict == "fails":
            lines.append(f"{'':>10}✗ {finding.name}: {finding.measured}; {finding.remedy}")
        elif finding.verdict == "undecided":
            lines.append(f"{'':>10}? {finding.name}: {finding.remedy}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Check and print."""
    chosen = parse(arguments)
    asked = [(chosen.kind, part) for part in chosen.parts] or [
        (kind, name) for kind in CATALOGUE for name in CATALOGUE[kind]
    ]
    failed = False
    everything = not chosen.parts
    for kind, name in asked:
        try:
            findings = check(name, kind)
        except KeyholeError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        told = warning(kind, name) if everything else None
        failed = failed or (told is None and any(finding.verdict == "fails" for finding in findings))
        sys.stdout.write(f"{summary(kind, name, findings)}\n" + (f"{'':>10}  as it must: {told}\n" if told else ""))
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
