"""A finding: what was expected, what was measured, and what follows. Audits, claims, studies and runs all speak it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "fails", "undecided"]

_MARK = {"holds": "✓", "fails": "✗", "undecided": "?"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statement, measured. `undecided` is a result: `remedy` then says what would decide it."""

    name: str = ""
    """The rule or claim, in a word or two: what a table lists and a script looks for."""
    statement: str
    expected: str
    measured: str
    tolerance: str = "exact"
    score: float | None = None
    """What was measured as one number, and ..."""
    limit: float | None = None
    """... the largest with which the statement holds, where it is that simple."""
    verdict: Verdict
    why: str = ""
    remedy: str = ""
    code: str = ""
    """The remedy as code to copy, where there is such."""
    aspect: str = ""
    """What kind of statement it is: "honesty" or "faithfulness" in audits."""
    evidence: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The finding in one line, as the terminal shows it."""
        return f"{self._measured()}; {self.remedy}" if self.remedy and self.verdict != "holds" else self._measured()

    def paragraph(self) -> str:
        """The finding in full: what was measured, then why it matters and what to do."""
        parts = [self._measured(), f"  tolerance: {self.tolerance}"]
        parts += [f"  why: {self.why}"] if self.why else []
        parts += [f"  remedy: {self.remedy}"] if self.remedy else []
        parts += [f"    {line}" for line in self.code.splitlines()]
        return "\n".join(parts)

    def _measured(self) -> str:
        return f"{_MARK[self.verdict]} {self.statement}: expected {self.expected}, measured {self.measured}"

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain JSON types."""
        return asdict(self)
