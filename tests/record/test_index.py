"""The index of runs: quick, never the truth, and never in the way."""

import json
import os
import random
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from many_runs import make_runs, metrics

from keyhole.core.errors import InputError
from keyhole.record import index, summary
from keyhole.record.columns import COLUMNS, column_table
from keyhole.record.index import NAME, list_runs

COUNT = 24
FIRST = "study-0/runs/softmax-0.0003/seed-0"


@pytest.fixture
def runs(tmp_path):
    make_runs(tmp_path / "runs", COUNT)
    return tmp_path / "runs"


@pytest.fixture
def read(monkeypatch):
    """The runs that were read, rather than taken from the index, since the last look."""
    found = []
    kept = summary.summarise
    monkeypatch.setattr(summary, "summarise", lambda path: found.append(str(path)) or kept(path))

    def look():
        seen, found[:] = sorted(found), []
        return seen

    return look


def by_place(rows, folder):
    return {os.path.relpath(row["run"], folder): row for row in rows}


def test_a_listing_reads_only_what_is_new_or_changed_and_forgets_what_is_gone(runs, read):
    before = list_runs(runs)
    assert len(before) == len(read()) == COUNT
    assert list_runs(runs) == before
    assert read() == []
    with (runs / FIRST / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2000, "loss": 0.5, "dev_loss": 0.25}\n')
    (row,) = list_runs(runs, where=[f"run={FIRST}"])
    assert (row["step"], row["train_loss"], row["dev_loss"]) == (2000, 0.5, 0.25)
    assert read() == [str(runs / FIRST)]
    shutil.copytree(runs / FIRST, runs / "new")
    shutil.rmtree(runs / FIRST)
    after = by_place(list_runs(runs), runs)
    assert read() == [str(runs / "new")]
    assert len(after) == COUNT
    assert FIRST not in after
    assert after["new"]["dev_loss"] == 0.25


@pytest.mark.parametrize(
    ("file", "content", "column", "value"),
    [
        ("recipe.toml", None, "state", "damaged: "),
        ("findings.json", '[{"verdict": "fails"}]', "state", "stopped by a finding"),
        ("findings.json", '[{"verdict": "fails"}]', "honest", "-"),
        ("findings.json", '[{"name": "suffix", "verdict": "fails"}]', "state", "done"),
        ("findings.json", '[{"name": "suffix", "verdict": "fails"}]', "honest", "fails"),
        ("findings.json", '[{"name": "suffix", "verdict": "holds"}]', "honest", "yes"),
        ("trial.json", '{"arm": "another", "seed": 77}', "arm", "another"),
        ("environment.json", '{"parameters": 12}', "parameters", "12"),
        ("checkpoints/step-00001000/state.json", "{}", "state", "newest checkpoint damaged"),
        ("checkpoints/step-00001000/weights.safetensors", "torn", "state", "newest checkpoint damaged"),
        ("checkpoints/step-00001000/optimizer.safetensors", "torn", "state", "newest checkpoint damaged"),
    ],
)
def test_a_change_of_any_file_that_a_row_is_read_from_is_seen(runs, read, file, content, column, value):
    list_runs(runs)
    read()
    path = runs / FIRST / file
    if path.exists():
        path.unlink()  # what is alike is linked
    path.write_text("[" if content is None else content)
    assert str(by_place(list_runs(runs), runs)[FIRST][column]).startswith(value)
    assert read() == [str(runs / FIRST)]


def test_a_newer_checkpoint_is_seen_and_so_is_its_removal(runs):
    steps = runs / FIRST / "checkpoints"
    assert by_place(list_runs(runs), runs)[FIRST]["saved"] == 1000
    shutil.copytree(steps / "step-00001000", steps / "step-00002000")
    state = json.loads((steps / "step-00002000/state.json").read_text())
    (steps / "step-00002000/state.json").write_text(json.dumps({**state, "step": 2000, "done": False}))
    row = by_place(list_runs(runs), runs)[FIRST]
    assert (row["saved"], row["state"]) == (2000, "unfinished")
    shutil.rmtree(steps)
    row = by_place(list_runs(runs), runs)[FIRST]
    assert (row["saved"], row["state"]) == (0, "no checkpoint")


def test_what_is_damaged_is_looked_at_each_time(runs, read):
    target = runs / FIRST / "recipe.toml"
    kept, seen = target.read_text(), target.stat()
    target.unlink()
    target.write_text("x" * len(kept))
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert by_place(list_runs(runs), runs)[FIRST]["state"].startswith("damaged: ")
    target.write_text(kept)
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    read()
    assert by_place(list_runs(runs), runs)[FIRST]["state"] == "done"
    assert read() == [str(runs / FIRST)]


def test_reindex_reads_every_run_anew_and_gives_the_same(runs, read):
    before = list_runs(runs)
    base = sqlite3.connect(runs / NAME)
    base.execute("UPDATE runs SET dev_loss = 0")
    base.commit()
    base.close()
    assert {row["dev_loss"] for row in list_runs(runs)} == {0}  # the control: the index is believed
    read()
    assert list_runs(runs, reindex=True) == before
    assert len(read()) == COUNT
    assert list_runs(runs) == before


def test_the_folder_may_be_moved_with_its_index(runs, read, tmp_path):
    before = by_place(list_runs(runs), runs)
    read()
    moved = tmp_path / "elsewhere"
    shutil.move(runs, moved)
    after = by_place(list_runs(moved), moved)
    assert read() == []
    assert {name: {**row, "run": ""} for name, row in after.items()} == {
        name: {**row, "run": ""} for name, row in before.items()
    }
    assert all(Path(row["run"]).is_relative_to(moved) for row in after.values())


def test_paths_are_as_the_folder_was_named(runs, monkeypatch):
    assert list_runs(runs, limit=1)[0]["run"] == str(runs / FIRST)
    monkeypatch.chdir(runs.parent)
    assert list_runs(limit=1)[0]["run"] == f"runs/{FIRST}"
    monkeypatch.chdir(runs)
    assert list_runs(".", limit=1)[0]["run"] == FIRST
    assert [row["run"] for row in list_runs(FIRST)] == [FIRST]
    monkeypatch.chdir(FIRST)
    assert [row["run"] for row in list_runs(".")] == ["."]


def test_a_run_keeps_its_record_alone_and_an_empty_folder_stays_empty(runs, tmp_path):
    assert len(list_runs(runs / FIRST)) == 1
    assert NAME not in {path.name for path in (runs / FIRST).iterdir()}
    (tmp_path / "none").mkdir()
    assert list_runs(tmp_path / "none") == []
    list_runs(runs)
    assert (runs / NAME).is_file()
    shutil.rmtree(runs / "study-0")
    shutil.rmtree(runs / "study-1", ignore_errors=True)
    shutil.rmtree(runs / ".alike")
    assert list_runs(runs) == []
    assert list(runs.iterdir()) == []


def test_checkpoints_copied_code_hidden_folders_and_links_are_not_searched(runs):
    for place in (f"{FIRST}/code", f"{FIRST}/checkpoints/step-00001000", ".hidden/run"):
        (runs / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(runs / FIRST / "recipe.toml", runs / place / "recipe.toml")
    os.symlink(runs / FIRST, runs / "link")
    os.symlink(runs, runs / "study-0" / "round")
    assert len(list_runs(runs)) == COUNT


def damage(file):
    with file.open("r+b") as raw:
        raw.seek(100)
        raw.write(random.Random(0).randbytes(file.stat().st_size - 100))


HARM = {
    "no database": lambda file: file.write_text("this is no database, and it is longer than a header " * 9),
    "cut short": lambda file: os.truncate(file, 5000),
    "empty": lambda file: os.truncate(file, 0),
    "overwritten": damage,
    "table missing": lambda file: change(file, "DROP TABLE runs"),
    "another table": lambda file: change(file, "DROP TABLE runs", "CREATE TABLE runs (path TEXT)"),
    "another version": lambda file: change(file, "PRAGMA user_version = 3"),
    "a view of another program": lambda file: change(
        file, "DROP TABLE runs", "CREATE VIEW runs AS SELECT 1", "PRAGMA user_version = 3"
    ),
    "not text": lambda file: change(file, "UPDATE runs SET stamp = CAST(x'ff00' AS TEXT)"),
}


def change(file, *statements):
    base = sqlite3.connect(file)
    for statement in statements:
        base.execute(statement)
    base.commit()
    base.close()


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_or_foreign_index_is_made_anew_with_one_note(runs, read, capsys, harm):
    before = list_runs(runs)
    HARM[harm](runs / NAME)
    assert list_runs(runs) == before
    said = capsys.readouterr().err.splitlines()
    if harm != "empty":  # which is what a new one is
        (line,) = said
        assert line.startswith(f"note: the index {runs / NAME} is ")
        assert line.endswith("is made anew")
    read()
    assert list_runs(runs) == before
    assert read() == []
    assert capsys.readouterr().err == ""


def test_a_locked_index_costs_a_note_and_its_use(runs, read, capsys, monkeypatch):
    before = list_runs(runs)
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.0)
    other = sqlite3.connect(runs / NAME)
    other.execute("BEGIN EXCLUSIVE")
    read()
    assert list_runs(runs) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"note: listing without the index {runs / NAME}, which cannot be used (database is locked)"
    assert len(read()) == COUNT
    other.close()
    assert list_runs(runs) == before
    assert read() == []


def test_a_folder_that_takes_no_index_is_listed_all_the_same(runs, capsys):
    before = list_runs(runs)
    (runs / NAME).unlink()
    (runs / NAME).mkdir()  # even root cannot write a database there
    assert list_runs(runs) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert "listing without the index" in line


def test_an_index_that_can_only_be_read_is_still_used(runs, read, capsys, monkeypatch):
    list_runs(runs)
    kept = sqlite3.connect

    def reader(file, **options):
        if str(file).startswith((":", "file:")):
            return kept(file, **options)
        return kept(f"file:{file}?mode=ro", uri=True, timeout=options["timeout"])

    monkeypatch.setattr(sqlite3, "connect", reader)
    read()
    assert len(list_runs(runs)) == COUNT
    assert (read(), capsys.readouterr().err) == ([], "")
    shutil.copytree(runs / FIRST, runs / "new")
    assert len(list_runs(runs)) == COUNT + 1
    assert read() == [str(runs / "new")]
    (line,) = capsys.readouterr().err.splitlines()
    assert "which cannot be used (attempt to write a readonly database)" in line


def test_two_at_once_both_list_everything(runs):
    with ThreadPoolExecutor(4) as together:
        for _ in range(3):
            (runs / NAME).unlink(missing_ok=True)
            answers = list(together.map(list_runs, [runs] * 4))
            assert all(answer == answers[0] and len(answer) == COUNT for answer in answers)
    assert not list(runs.glob(f"{NAME}-*"))
    assert list_runs(runs) == answers[0]


def test_names_that_are_no_text_and_numbers_too_large_are_listed(runs):
    odd = os.fsdecode(b"odd-\xff'; DROP TABLE runs; --")
    (runs / FIRST).rename(runs / odd)
    (runs / odd / "trial.json").write_text(json.dumps({"seed": 10**400, "arm": ["a"], "study": None}))
    for _ in range(2):
        row = by_place(list_runs(runs), runs)[odd]
        assert (row["state"], row["arm"]) == ("done", "['a']")
    assert len(list_runs(runs)) == COUNT


@pytest.mark.parametrize("content", ["[]", "3", "{", '["a"]', '[{"name": "x"}]', "\udcff"])
@pytest.mark.parametrize("file", ["environment.json", "findings.json", "trial.json"])
def test_a_file_that_holds_something_else_damages_one_row_only(runs, file, content):
    path = runs / FIRST / file
    path.unlink(missing_ok=True)
    path.write_text(content, errors="surrogateescape")
    rows = by_place(list_runs(runs), runs)
    legal = file == "findings.json" and content == "[]"
    assert (rows.pop(FIRST)["state"] == "done") is legal
    assert {row["state"] for row in rows.values()} == {"done"}


def test_every_row_has_every_column_and_what_it_says_is_so(runs):
    rows = by_place(list_runs(runs), runs)
    assert all(list(row) == list(COLUMNS) for row in rows.values())
    row, last = rows["study-0/runs/softmax-0.001/seed-3"], metrics(23, 20)[-1]
    assert (row["study"], row["arm"], row["seed"], row["mixer"], row["rate"]) == (
        "study-0",
        "softmax-0.001",
        3,
        "softmax",
        1e-3,
    )
    assert [row[name] for name in ("step", "tokens", "seconds", "dev_loss")] == [
        last[name] for name in ("step", "tokens", "seconds", "dev_loss")
    ]
    assert (row["train_loss"], row["parameters"], row["honest"], row["state"]) == (last["loss"], 810_000, "-", "done")
    assert row["modified"].endswith("Z")
    assert row["modified"][:4] >= "2025"


def test_the_columns_in_the_documentation_are_the_code_s_own():
    text = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    assert column_table() in text, f"docs/runs.md should hold this table:\n{column_table()}"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        list_runs(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.alone
def test_two_thousand_runs_are_listed_again_within_a_fifth_of_a_second_each_thousand(tmp_path):
    make_runs(tmp_path / "runs", 2000, rows=2)
    list_runs(tmp_path / "runs")
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert len(list_runs(tmp_path / "runs")) == 2000
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2, seconds
