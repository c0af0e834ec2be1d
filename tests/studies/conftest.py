from __future__ import annotations

from pathlib import Path

import pytest
from fabricated import make_study

from keyhole.studies.report import Report
from keyhole.studies.result import StudyResult, open_study


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """Seven arms: one dishonest, one with a diverged seed, one not trained yet."""
    return open_study(make_study(tmp_path_factory.mktemp("report") / "study"))


@pytest.fixture(scope="session")
def written(result: StudyResult) -> Report:
    """Its report, with charts."""
    return result.report()


@pytest.fixture(scope="session")
def page(written: Report) -> str:
    """The HTML file."""
    return Path(written.html).read_text()


@pytest.fixture(scope="session")
def text(written: Report) -> str:
    """The Markdown file."""
    return Path(written.markdown).read_text()
