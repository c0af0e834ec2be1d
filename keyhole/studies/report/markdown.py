"""The report as Markdown, for a repository or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keyhole.studies.report.sentences import (
    environment,
    findings,
    headlines,
    reading,
    state,
    tally,
    warnings,
)
from keyhole.studies.report.tables import Cell, Table, tables

if TYPE_CHECKING:
    from keyhole.core.findings import Finding
    from keyhole.studies.report.charts import Picture
    from keyhole.studies.result import StudyResult


def to_markdown(result: StudyResult, pictures: Mapping[str, tuple[Picture, str]] | None = None) -> str:
    """The whole report; `pictures` are charts by key, each with the path that leads to it."""
    blocks = [f"# {plain(result.name)}"]
    if unfinished := state(result):
        blocks.append(f"**Not finished:** {plain(unfinished)}")
    blocks.append("\n".join(_headline(name, said) for name, said in headlines(result).items()))
    blocks += [f"> **Mind:** {plain(warning)}" for warning in warnings(result)]
    first, *others = tables(result)
    blocks.append(_table(first))
    for picture, place in (pictures or {}).values():
        blocks += [f"## {plain(picture.title)}", f"![{plain(picture.title)}]({_link(place)})", plain(picture.caption)]
    blocks += map(_table, others)
    blocks += ["## Audits", *_audits(result)]
    blocks += ["## How to read this", "\n".join(f"- {plain(line)}" for line in reading(result))]
    blocks += ["## To repeat it", f"```\n{result.command}\n```"]
    blocks.append("\n".join(f"- {name}: {plain(value)}" for name, value in environment(result).items()))
    return "\n\n".join(block for block in blocks if block) + "\n"


def plain(text: str) -> str:
    """Text that stands in Markdown as it is: nothing in it is a sign, a link or HTML, and it is one line."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", flat)


def _headline(name: str, said: str) -> str:
    return f"- **{plain(name)}**: {plain(said)}"


def _table(table: Table) -> str:
    head = " | ".join(plain(column.name) for column in table.columns)
    rule = " | ".join("---:" if column.right else "---" for column in table.columns)
    rows = [" | ".join(map(_cell, row)) for row in table.rows]
    lines = [f"| {line} |" for line in (head, rule, *rows)]
    notes = "\n".join(f"- {plain(note)}" for note in table.notes)
    return "\n\n".join(part for part in (f"## {plain(table.title)}", "\n".join(lines), notes) if part)


def _cell(cell: Cell) -> str:
    text = plain(cell.text)
    return f"~~{text}~~" if cell.struck else f"**{text}**" if cell.tone in ("better", "worse") else text


def _audits(result: StudyResult) -> list[str]:
    """One line for each arm, and every finding that does not hold in full."""
    return [
        "\n".join([f"- **{plain(name)}**: {tally(found)}", *(_finding(one) for one in found if one.verdict != "holds")])
        for name, found in findings(result).items()
    ]


def _finding(found: Finding) -> str:
    said = [f"{found.statement}: expected {found.expected}, measured {found.measured}", found.why, found.remedy]
    line = f"  - {plain(found.name or 'finding')} {found.verdict}: {'; '.join(plain(part) for part in said if part)}"
    if not found.code:
        return line
    code = "\n".join(f"    {row}" for row in found.code.splitlines())
    # The fence is longer than any in the code, so that nothing in it can end it.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", found.code)), default=0))
    return f"{line}\n\n    {fence}python\n{code}\n    {fence}"


def _link(path: str) -> str:
    """A path within round brackets."""
    return f"<{path}>" if set(path) & set(" ()") else path
