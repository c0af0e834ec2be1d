"""Which runs a condition chooses, in what order, and what is no condition."""

import json

import pytest
from many_runs import make_runs

from keyhole.core.errors import InputError
from keyhole.record.index import list_runs
from keyhole.record.metrics import BLOCK, NAME, last_rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "runs"
    made = make_runs(folder, 80, rows=5)
    (made[7] / "metrics.jsonl").write_text("")
    return folder


@pytest.fixture(scope="module")
def everything(runs):
    return list_runs(runs)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("dev_loss<1.57", lambda row: row["dev_loss"] is not None and row["dev_loss"] < 1.57),
        ("dev_loss <= 1.56", lambda row: row["dev_loss"] is not None and row["dev_loss"] <= 1.56),
        ("rate=1e-3", lambda row: row["rate"] == 0.001),
        ("rate == .001", lambda row: row["rate"] == 0.001),
        ("rate!=1e-3", lambda row: row["rate"] != 0.001),
        ("parameters>=810,000", lambda row: row["parameters"] >= 810_000),
        ("seed>17", lambda row: row["seed"] > 17),
        ("mixer=linear", lambda row: row["mixer"] == "linear"),
        ("mixer!=linear", lambda row: row["mixer"] != "linear"),
        ("run~SOFTMAX-0.001", lambda row: "softmax-0.001" in row["run"]),
        ("mixer~%", lambda _: False),
        ("arm~_", lambda _: False),
        ("dev_loss=-", lambda row: row["dev_loss"] is None),
        ("dev_loss!=-", lambda row: row["dev_loss"] is not None),
        ("honest=-", lambda _: True),
        ("modified>2001-01-01", lambda _: True),
        ("modified<2001-01-01", lambda _: False),
        ("mixer=x' OR '1'='1", lambda _: False),
    ],
)
def test_a_condition_chooses_the_runs_of_which_it_is_true(runs, everything, condition, holds):
    assert list_runs(runs, where=condition) == [row for row in everything if holds(row)]


def test_all_conditions_must_hold(runs, everything):
    chosen = list_runs(runs, where=["mixer=linear", "seed<3", "rate>1e-4"])
    assert chosen == [row for row in everything if row["mixer"] == "linear" and row["seed"] < 3]
    assert 0 < len(chosen) < len(list_runs(runs, where="mixer=linear")) < len(everything)


def test_a_run_is_named_with_or_without_the_listed_folder(runs, everything):
    name = everything[5]["run"]
    for given in (name, name.removeprefix(f"{runs}/")):
        assert list_runs(runs, where=f"run={given}") == [everything[5]]


def test_folders_are_listed_as_people_count(everything, runs):
    names = [row["run"].removeprefix(f"{runs}/study-0/runs/") for row in everything]
    assert names[:3] == ["linear-0.0003/seed-0", "linear-0.0003/seed-1", "linear-0.0003/seed-2"]
    assert names[19] == "linear-0.0003/seed-19"
    assert [name.split("/")[0] for name in names[::20]] == [
        "linear-0.0003", "softmax-0.0003", "softmax-0.001", "softmax-0.003",
    ]  # fmt: skip
    assert [row["run"] for row in list_runs(runs, sort="run", descending=True)] == [row["run"] for row in everything][::-1]


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_puts_runs_without_the_value_last(runs, descending):
    losses = [row["dev_loss"] for row in list_runs(runs, sort="dev_loss", descending=descending)]
    assert losses[-1] is None
    assert losses[:-1] == sorted(losses[:-1], reverse=descending)


def test_a_limit_takes_the_first(runs):
    assert list_runs(runs, sort="dev_loss", limit=3) == list_runs(runs, sort="dev_loss")[:3]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"where": "los<1"}, r"no column 'los'.*did you mean '\w*loss'"),
        ({"where": "mixr=linear"}, "did you mean 'mixer'"),
        ({"where": "dev_loss"}, "'dev_loss' is no condition.*for example dev_loss<1.5"),
        ({"where": "dev_loss<"}, "is no condition"),
        ({"where": "=3"}, "is no condition"),
        ({"where": ""}, "is no condition"),
        ({"where": "dev_loss<low"}, "dev_loss is a number, and 'low' is none"),
        ({"where": "dev_loss<nan"}, "'nan' is none"),
        ({"where": "dev_loss~1"}, "dev_loss is a number; compare it with"),
        ({"where": "mixer<linear"}, r"mixer is text; compare it with =, != or ~"),
        ({"where": 'run"OR"1=1'}, "runs have no column"),
        ({"sort": "dev_los"}, "did you mean 'dev_loss'"),
        ({"sort": "run; DROP TABLE runs"}, "runs have no column"),
        ({"limit": 0}, "limit is 0; give a number of runs, 1 or more"),
    ],
)
def test_what_cannot_be_asked_is_said_with_what_can(runs, everything, asked, said):
    with pytest.raises(InputError, match=said):
        list_runs(runs, **asked)
    assert list_runs(runs) == everything


def row(step, **more):
    return (
        f'{{"step": {step}, "loss": 1.5{"".join(f", {chr(34)}{key}{chr(34)}: {value}" for key, value in more.items())}}}\n'
    )


@pytest.mark.parametrize("block", [1, 7, 40, BLOCK])
def test_the_last_rows_are_found_from_the_end_whatever_the_block(tmp_path, monkeypatch, block):
    monkeypatch.setattr("keyhole.record.metrics.BLOCK", block)
    file = tmp_path / NAME
    assert last_rows(tmp_path, "dev_loss") == ({}, {})
    for text, step, dev in (
        ("", None, None),
        (row(1), 1, None),
        (row(1, dev_loss=2), 1, 1),
        (row(1, dev_loss=2) + row(2, dev_loss=1) + row(3) + row(4), 4, 2),
        (row(1, dev_loss=2) + row(2) + '{"step": 3, "dev_lo', 2, 1),
        (row(1, dev_loss=2) + row(2).rstrip(), 2, 1),
        (row(1) + "[1]\n\n" + "\udcff\n", 1, None),
    ):
        file.write_text(text, errors="surrogateescape")
        last, found = last_rows(tmp_path, "dev_loss")
        assert (last.get("step"), found.get("step")) == (step, dev), text


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    (tmp_path / NAME).write_text(
        "".join(map(row, range(49_000))) + row(49_000, dev_loss=1) + "".join(map(row, range(49_001, 50_001)))
    )
    kept, parsed = json.loads, []
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or kept(text))
    last, found = last_rows(tmp_path, "dev_loss")
    assert (last, found) == ({"step": 50_000, "loss": 1.5}, {"step": 49_000, "loss": 1.5, "dev_loss": 1})
    assert len(parsed) in (2, 3)
