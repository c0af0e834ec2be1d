from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_helpers import Ask
from hypothesis import given
from hypothesis import strategies as st

from keyhole.cli.curve import Series, plot
from keyhole.cli.output import number, print_json
from keyhole.core.errors import StorageError
from keyhole.core.files import whole_folder
from keyhole.record.run import open_run
from keyhole.use.sample import stream_sample

points = st.lists(st.tuples(st.integers(1, 10_000), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=40)


@given(points, points, st.integers(16, 100), st.integers(3, 20), st.booleans())
def test_a_plot_is_never_wider_than_asked_and_degrades_to_ascii(
    train: list[tuple[int, float]], dev: list[tuple[int, float]], width: int, height: int, unicode: bool
) -> None:
    lines = plot([Series("train", "", sorted(train)), Series("dev", "", sorted(dev), dots=True)], width, height, unicode)
    for line in lines[:height]:
        assert len("".join(text for text, _ in line)) == len("   1.000 + ") - 1 + width
    if not unicode:
        "".join(text for line in lines for text, _ in line).encode("ascii")


def test_a_falling_line_falls() -> None:
    lines = plot([Series("train", "", [(1, 4.0), (50, 2.0), (100, 1.0)])], 40, 8, unicode=False)
    rows = ["".join(text for text, _ in line)[10:] for line in lines[:8]]
    first = [row.find("*") for row in rows if "*" in row]
    assert first == sorted(first)
    assert rows[-1].rstrip().endswith("*")


def test_nothing_to_draw_draws_nothing() -> None:
    assert plot([Series("train", "", [(1, 2.0)])], 40, 8) == []
    assert plot([Series("train", "", [(1, math.nan), (2, math.nan)])], 40, 8) == []


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.inf, "b": [math.nan, 1.5], "c": "ü"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": "ü"}


def test_numbers_are_short_at_any_size() -> None:
    assert [number(x) for x in (None, 1.5, 123456.0, 1e30, math.inf)] == [
        "-",
        "1.5000",
        "123,456.0000",
        "1e+30",
        "infinite",
    ]


@pytest.mark.parametrize(("drawn", "pieces"), [([0xE2, 0x82, 0xAC, 65], ["€", "A"]), ([65, 0xE2, 0x82], ["A", "\ufffd"])])
def test_half_a_character_waits_for_the_rest_and_is_told_at_the_end(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, drawn: list[int], pieces: list[str]
) -> None:
    assert ask("train", "tiny.toml", "--quiet", "--set", "data.tokenizer=bytes").code == 0
    monkeypatch.setattr("keyhole.use.sample.generate", lambda *_, **__: iter(drawn))
    assert list(stream_sample(open_run("runs/tiny"), "the ")) == pieces


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole_folder(tmp_path / "new", "making") as folder:
            (folder / "file").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        interrupted()
    assert list(tmp_path.glob("*new*")) == []
    with whole_folder(tmp_path / "new", "making") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "whole"
