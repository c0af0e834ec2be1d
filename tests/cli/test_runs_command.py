"""`keyhole runs`: what is shown of many runs at any width, and of a few side by side."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import Ask

from keyhole.cli import listing
from keyhole.record.columns import COLUMNS


@pytest.fixture
def several(trained: Path) -> Path:
    """Three runs, one of which fails an audit."""
    for name in ("dishonest", "a/rather/long/way/down/to/the/run/seed-10"):
        shutil.copytree(trained, trained.parent / name)
    (trained.parent / "dishonest/findings.json").write_text('[{"name": "suffix", "verdict": "fails"}]')
    return trained.parent


def test_runs_are_chosen_sorted_and_cut(ask: Ask, several: Path) -> None:
    def names(*options: str) -> list[str]:
        return [row["run"] for row in ask("runs", *options, "--json").json["runs"]]

    assert names() == ["runs/a/rather/long/way/down/to/the/run/seed-10", "runs/dishonest", "runs/tiny"]
    assert names("--where", "run~tiny") == ["runs/tiny"]
    assert names("--where", "honest!=fails", "--where", "step>=6", "--sort", "run", "--descending", "--limit", "1") == [
        "runs/tiny"
    ]
    assert names("--where", "dev_loss<0") == []
    assert ask("runs", "--where", "dev_loss<0").out == "no run in runs is so: dev_loss<0\n"
    assert names("--reindex") == names()
    (row,) = ask("runs", "--limit", "1", "--columns", "seed, mixer", "--json").json["runs"]
    assert row == {"seed": 0, "mixer": "softmax"}


def test_json_has_every_column_and_one_line_a_run(ask: Ask, several: Path) -> None:
    answer = ask("runs", "--json")
    assert all(list(row) == list(COLUMNS) for row in answer.json["runs"])
    assert len(answer.out.splitlines()) == 3 + 2


@pytest.mark.parametrize("width", [40, 80, 120, 160])
def test_a_listing_fits_its_terminal_and_keeps_the_end_of_a_path(
    ask: Ask, several: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(listing.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("keyhole.cli.output.PIPE_WIDTH", width)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in ask("runs").out.splitlines()]
    assert len(lines) == 3 + 3
    if width >= 80:
        assert max(map(len, lines)) <= width
        assert "dev" in lines[0]
        assert "fails" in lines[4]
    assert ("source" in lines[1]) is (width >= 160)
    assert lines[3].split("  ")[0].endswith("seed-10")


def test_in_a_pipe_a_path_is_whole(ask: Ask, trained: Path) -> None:
    deep = "/".join(["a-folder-with-a-rather-long-name"] * 6)
    shutil.copytree(trained, trained.parent / deep)
    assert f"runs/{deep} " in ask("runs").out


def test_asked_for_columns_are_shown_in_their_order_with_a_dash_where_there_is_nothing(ask: Ask, several: Path) -> None:
    head, names, _, *lines = ask("runs", "--columns", "seed,arm,run,honest,started").out.splitlines()
    assert head.strip() == ""
    assert names.split() == ["seed", "arm", "run", "honest", "started"]
    assert [line.split()[:2] for line in lines] == [["0", "-"]] * 3
    assert re.search(r"fails +\d{4}-\d\d-\d\d \d\d:\d\d$", lines[1])


def test_nothing_in_a_name_reaches_the_terminal_as_a_command(ask: Ask, trained: Path) -> None:
    shutil.copytree(trained, trained.parent / "red\x1b[31m[bold]x")
    assert "runs/red?[31m[bold]x" in ask("runs").out
    compared = ask("runs", "--compare", "runs/tiny", "runs/red\x1b[31m[bold]x").out
    assert "[bold]x" in compared
    assert "\x1b" not in compared


def test_runs_are_compared_side_by_side(ask: Ask, trained: Path) -> None:
    made = ask("train", "tiny.toml", "--quiet", "--set", "model.position=rope", "--out", "runs/rope", "--json")
    assert made.code == 0
    answer = ask("runs", "--compare", "runs/tiny", "runs/rope")
    assert answer.code == 0
    rows = {line.split("  ")[0].strip(): line.split() for line in answer.out.splitlines()}
    assert rows["model.position"] == ["model.position", "learned", "rope"]
    losses = [f"{row['dev_loss']:.4f}" for row in ask("runs", "--compare", "runs/tiny", "runs/rope", "--json").json["runs"]]
    assert rows["dev_loss"] == ["dev_loss", *losses]
    assert "model.width" not in answer.out
    assert "in runs\n" in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare"], "two runs or more, not 0"),
        (["--compare", "runs/tiny"], "two runs or more, not 1"),
        (["--compare", "runs/tiny", "runs/tony"], "runs/tony is not there; keyhole runs lists"),
        (["--compare", "runs/tiny", "runs/tiny", "--sort", "run"], "--compare takes runs and --json alone"),
        (["--where", "dev_lss<1"], "did you mean 'dev_loss'"),
        (["--sort", "speed"], "runs have no column 'speed'"),
        (["--columns", "run,losss"], "runs have no column 'losss'"),
        (["--columns", ""], "runs have no column ''"),
        (["--limit", "0"], "give a number of runs, 1 or more"),
        (["--limit", "few"], "takes a whole number"),
    ],
)
def test_wrong_use_is_one_sentence(ask: Ask, trained: Path, words: list[str], said: str) -> None:
    answer = ask("runs", *words)
    assert answer.code == 2
    assert said in answer.complaint


def test_a_listing_from_the_index_waits_for_nothing_that_reads_runs(ask: Ask, several: Path) -> None:
    code = "from keyhole.cli.main import run; run(['runs'])"
    code += "; print({'torch', 'keyhole.record.summary'} & sys.modules.keys())"

    def last() -> str:
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = [{root!r}]; {code}"], capture_output=True, text=True
        )
        return done.stdout.splitlines()[-1]

    assert last() == "{'keyhole.record.summary'}"
    assert last() == "set()"
