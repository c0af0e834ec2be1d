"""Writing the report: report.md, report.html and the charts, into the study's directory where nothing else is said."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.core.errors import InputError
from keyhole.core.files import write_atomically

if TYPE_CHECKING:
    from keyhole.studies.result import StudyResult

MARKDOWN, HTML, CHARTS = "report.md", "report.html", "charts"


@dataclass(frozen=True)
class Report:
    """Where a report was written."""

    markdown: Path
    html: Path
    charts: dict[str, Path] = field(default_factory=dict)
    """The SVG files by key; a PNG stands beside each."""
    notes: list[str] = field(default_factory=list)
    """What could not be made, and why."""

    def __str__(self) -> str:
        return "\n".join([str(self.html), str(self.markdown), *map(str, self.charts.values()), *self.notes])


def write_report(
    result: StudyResult, html: str | Path | None = None, md: str | Path | None = None, *, charts: bool = True
) -> Report:
    """Write the whole report of a study, however far it has come."""
    from keyhole.studies.report.charts import draw, save_pictures
    from keyhole.studies.report.html import to_html
    from keyhole.studies.report.markdown import to_markdown

    markdown, page = Path(md or result.path / MARKDOWN), Path(html or result.path / HTML)
    for path in (markdown, page):
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of a file, for example {path / path.name}{path.suffix}")
    pictures, written, notes = [], {}, []
    if charts:
        try:
            pictures = draw(result)
            written = save_pictures(pictures, result.path / CHARTS)
        except InputError as error:  # what draws is an extra; the text is whole without it
            notes.append(str(error))
    linked = {
        picture.key: (picture, Path(os.path.relpath(written[picture.key], markdown.parent)).as_posix())
        for picture in pictures
    }
    write_atomically(markdown, to_markdown(result, linked))
    write_atomically(page, to_html(result, pictures))
    return Report(markdown, page, written, notes)
