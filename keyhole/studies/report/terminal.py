"""The report in a terminal: the verdicts in words and as tables, for 80 columns or more, in colour or plain ASCII."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from keyhole.studies.report.sentences import findings, headlines, state, tally, warnings
from keyhole.studies.report.tables import Cell, Column, Table, tables

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable
    from rich.text import Text

    from keyhole.core.findings import Finding
    from keyhole.studies.result import StudyResult

STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "unsure": "yellow",
    "unfair": "dim",
    "faint": "dim",
    "": "",
}
ROOMY = 120
"""From so many columns on, nothing is left out."""
ASCII = str.maketrans({"±": "+-", "×": "x", "·": "-", "…": "...", "✓": "+", "✗": "x", "─": "-", "→": "->", "←": "<-"})


def render(result: StudyResult, width: int, *, unicode: bool = True, styled: bool = True) -> Iterator[RenderableType]:
    """What is to be printed, one after the other. Where nothing can be `styled`, what is struck out stands in ~~ ~~."""
    write = _Writer(width, unicode, styled)
    arms, seeds = len(result.arms), len(result.plan.seeds)
    head = f"{result.name}: {arms} arms × {seeds} seed{'s' * (seeds != 1)}, compared with {result.plan.baseline}"
    yield write.text(head, "bold")
    if unfinished := state(result):
        yield write.text(f"not finished: {unfinished}", "yellow")
    first, *others = tables(result)
    yield from write.table(first)
    yield write.text("\nIn words", "bold")
    yield write.pairs({name: (said, "") for name, said in headlines(result).items()})
    for warning in warnings(result):
        yield write.text(f"mind: {warning}", "yellow")
    for table in others:
        if table.key != "seeds":
            yield from write.table(table)
    yield write.text("\nAudits", "bold")
    yield write.pairs({name: _audited(found) for name, found in findings(result).items()})


def _audited(found: list[Finding]) -> tuple[str, str]:
    """The tally of an arm's findings, and which fail; with a style."""
    fails = dict.fromkeys(one.name for one in found if one.verdict == "fails")
    return (f"{tally(found)}: {', '.join(fails)}", "red") if fails else (tally(found), "")


class _Writer:
    """Text and tables as this terminal can show them."""

    def __init__(self, width: int, unicode: bool, styled: bool) -> None:
        self.width, self.unicode, self.styled = width, unicode, styled

    def plain(self, text: str) -> str:
        return text if self.unicode else text.translate(ASCII).encode("ascii", "replace").decode()

    def text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(self.plain(text), style)

    def table(self, table: Table) -> Iterator[RenderableType]:
        from rich.padding import Padding

        made = self._grid()
        kept = [place for place, column in enumerate(table.columns) if self.width >= ROOMY or not column.spare]
        for place in kept:
            column = table.columns[place]
            # Words may go over several lines; names and numbers stay whole, and their heads give way.
            whole = self.width < ROOMY or place == 0 or column.right
            made.add_column(
                self._head(column, [row[place] for row in table.rows]),
                justify="right" if column.right else "left",
                no_wrap=whole,
            )
        for row in table.rows:
            made.add_row(*(self._cell(row[place]) for place in kept))
        yield self.text(f"\n{table.title}", "bold")
        yield made
        for note in table.notes:
            yield Padding(self.text(note, "dim"), (0, 0, 0, 2))

    def pairs(self, pairs: dict[str, tuple[str, str]]) -> RichTable:
        from rich.table import Table as RichTable

        made = RichTable.grid(padding=(0, 2))
        made.add_column(style="bold", max_width=28, overflow="fold")
        made.add_column()
        for name, (said, style) in pairs.items():
            made.add_row(self.text(name), self.text(said, style))
        return made

    def _grid(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable

        lines = box.SIMPLE_HEAD if self.unicode else box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
        return RichTable(box=lines, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")

    def _head(self, column: Column, cells: list[Cell]) -> str:
        """A column's name in lines as wide as what stands below it."""
        name = self.plain(column.name)
        if not column.right:
            return name
        below = max(len(line) for cell in cells for line in self._cell(cell).plain.splitlines() or [""])
        return "\n".join(wrap(name, max(below, *map(len, name.split()))))

    def _cell(self, cell: Cell) -> Text:
        from rich.text import Text

        text = self.plain(cell.brief if cell.brief and self.width < ROOMY else cell.text)
        if cell.struck:
            return Text(text, "dim strike") if self.styled else Text(f"~~{text}~~")
        return Text(text, STYLES[cell.tone])
