"""`keyhole report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fabricated import ARMS, make_study

from keyhole.cli.main import run
from keyhole.studies.result import open_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("command") / "study", ARMS[:5], seeds=3, search=False)


def test_report_prints_the_verdicts_writes_the_files_and_says_where(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(study)]) == 0
    shown = capsys.readouterr().out
    assert "not comparable (suffix," in shown
    assert "~~1.3" in shown
    for name in ("report.html", "report.md", "charts"):
        assert (study / name).exists()
        assert str(study / name) in shown
    text = (study / "report.md").read_text()
    assert "](charts/curves.svg)" in text


def test_files_go_where_they_are_asked_to_and_links_still_lead_to_the_charts(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, text = tmp_path / "a b" / "x.html", tmp_path / "a b" / "x.md"
    assert run(["report", str(study), "--html", str(page), "--md", str(text)]) == 0
    assert str(page) in capsys.readouterr().out
    links = [line.split("](")[1].strip("<>)") for line in text.read_text().splitlines() if line.startswith("![")]
    assert len(links) == 5
    for link in links:
        assert (text.parent / link).is_file()
    assert page.read_text().startswith("<!doctype html>")


def test_json_has_the_numbers_of_the_statistics(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(study), "--json"]) == 0
    told, result = json.loads(capsys.readouterr().out), open_study(study)
    assert told["verdicts"] == result.verdicts
    assert told["differences"]["rope"] == result.differences["rope"].to_dict()
    arm = next(arm for arm in told["arms"] if arm["name"] == "reweight")
    assert arm["honest"] is False
    assert arm["estimate"]["mean"] == result.arm("reweight").estimate("dev_loss").mean
    assert told["differences_by_prefixes"]["reweight"]["verdict"] == "worse"
    assert Path(told["files"]["html"]).is_file()
    assert set(told["files"]["charts"]) == {"differences", "prefix", "curves", "positions", "past"}


def test_a_folder_that_is_no_study_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "is no study: it has no study.toml" in capsys.readouterr().err


def test_a_notebook_shows_the_verdicts(study: Path) -> None:
    shown = open_study(study)._repr_html_()
    assert "<table>" in shown
    assert "struck out: " in shown
    assert "http" not in shown
