"""The report as one HTML file that needs nothing else: no script, no font, no picture is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from keyhole.studies.report.grammar import BASELINE, Look, arm_looks
from keyhole.studies.report.sentences import (
    environment,
    findings,
    headlines,
    reading,
    state,
    tally,
    warnings,
)
from keyhole.studies.report.style import STYLE
from keyhole.studies.report.tables import Cell, Table, tables, verdicts

if TYPE_CHECKING:
    from keyhole.core.findings import Finding
    from keyhole.studies.report.charts import Picture
    from keyhole.studies.result import StudyResult


def to_html(result: StudyResult, pictures: Sequence[Picture] = ()) -> str:
    """The whole report."""
    found = arm_looks(result)
    tabled = {table.key: table for table in tables(result)}
    folded = tabled.pop("seeds", None)
    first = tabled.pop("verdicts")
    body = [
        f"<header><p class='kind'>study</p><h1>{escape(result.name)}</h1>{_subtitle(result)}</header>",
        _unfinished(result),
        _section("In words", _headlines(result, found) + _warnings(result)),
        _section(first.title, _table(first, found)),
        _section("Charts", "<div class='charts'>" + "".join(map(_figure, pictures)) + "</div>") if pictures else "",
        *(_section(table.title, _table(table, found)) for table in tabled.values()),
        _section("Audits", _audits(result, found)),
        _section(folded.title, _folded(f"all {len(folded.rows)} arms", _table(folded, found))) if folded else "",
        _section("How to read this", "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in reading(result)) + "</ul>"),
        _section("To repeat it", f"<pre><code>{escape(result.command)}</code></pre>{_environment(result)}"),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escape(result.name)} - a study</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def to_fragment(result: StudyResult) -> str:
    """The verdicts for a notebook: in words and as a table."""
    found = arm_looks(result)
    inside = _unfinished(result) + _headlines(result, found) + _warnings(result) + _table(verdicts(result), found)
    return f"<style>{STYLE.replace('body', '.keyhole')}</style><div class='keyhole fragment'>{inside}</div>"


def _subtitle(result: StudyResult) -> str:
    arms, seeds = len(result.arms), len(result.plan.seeds)
    said = f"{arms} arm{'s' * (arms != 1)} × {seeds} seed{'s' * (seeds != 1)}, each compared with {result.plan.baseline}"
    return f"<p class='faint'>{escape(said)}</p>"


def _unfinished(result: StudyResult) -> str:
    said = state(result)
    return f"<p class='mind' role='status'><strong>Not finished.</strong> {escape(said)}</p>" if said else ""


def _section(title: str, inside: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>"


def _headlines(result: StudyResult, found: dict[str, Look]) -> str:
    items = "".join(f"<dt>{_arm(name, found)}</dt><dd>{escape(said)}</dd>" for name, said in headlines(result).items())
    return f"<dl class='words'>{items}</dl>" if items else "<p>There is one arm, and nothing to compare it with.</p>"


def _warnings(result: StudyResult) -> str:
    return "".join(f"<p class='mind'><strong>Mind:</strong> {escape(warning)}</p>" for warning in warnings(result))


def _arm(name: str, found: dict[str, Look]) -> str:
    """An arm's name with its colour beside it."""
    look = found[name]
    # The baseline's near-black would be lost on a dark page.
    colour = "var(--ink)" if look.colour == BASELINE else look.colour
    style = f"border-top:3px {'dashed' if look.dashed else 'solid'} {colour}"
    return f"<span class='swatch' style='{style}' aria-hidden='true'></span>{escape(name)}"


def _table(table: Table, found: dict[str, Look]) -> str:
    head = "".join(
        f"<th scope='col' class='{'right' if column.right else ''}'>{escape(column.name)}</th>" for column in table.columns
    )
    rows = []
    for first, *others in table.rows:
        cells = "".join(
            f"<td class='{'right ' if column.right else ''}{cell.tone}'>{_text(cell)}</td>"
            for cell, column in zip(others, table.columns[1:], strict=True)
        )
        rows.append(f"<tr><th scope='row' class='{first.tone}'>{_arm(first.text, found)}</th>{cells}</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f"<div class='scroll' tabindex='0' role='group' aria-label='{escape(table.title, quote=True)}'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        + (f"<ul class='notes'>{notes}</ul>" if notes else "")
    )


def _text(cell: Cell) -> str:
    # Where a reader is read to, the line through a number must be said.
    return f"<s><span class='unseen'>struck out: </span>{escape(cell.text)}</s>" if cell.struck else escape(cell.text)


def _figure(picture: Picture) -> str:
    return (
        f"<figure id='chart-{picture.key}'><h3>{escape(picture.title)}</h3><div class='chart'>{picture.svg}</div>"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _audits(result: StudyResult, found: dict[str, Look]) -> str:
    shown = []
    for name, every in findings(result).items():
        fails = any(one.verdict == "fails" for one in every)
        inside = "".join(map(_finding, every))
        head = f"{_arm(name, found)} <span class='{'worse' if fails else 'faint'}'>{tally(every)}</span>"
        shown.append(f"<details{' open' if fails else ''}><summary>{head}</summary>{inside}</details>")
    return "".join(shown)


def _finding(found: Finding) -> str:
    tone = {"fails": "worse", "holds": "better", "undecided": "unsure"}[found.verdict]
    said = f"{found.statement}: expected {found.expected}, measured {found.measured}"
    if found.verdict == "holds":
        return f"<p class='finding'><b class='{tone}'>holds</b> {escape(found.name)}: {escape(said)}</p>"
    more = "".join(
        f"<p><b>{label}</b> {escape(text)}</p>"
        for label, text in (("why it matters", found.why), ("what to do", found.remedy))
        if text
    )
    code = f"<pre><code>{escape(found.code)}</code></pre>" if found.code else ""
    head = f"<p><b class='{tone}'>{found.verdict}</b> <b>{escape(found.name)}</b>: {escape(said)}</p>"
    return f"<div class='finding {found.verdict}'>{head}{more}{code}</div>"


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def _environment(result: StudyResult) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in environment(result).items())
    return f"<dl class='pairs'>{rows}</dl>"
