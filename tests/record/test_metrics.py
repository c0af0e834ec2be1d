import json
import math

import pytest

from keyhole.core.errors import StorageError
from keyhole.record.metrics import NAME, MetricsWriter, read_metrics


@pytest.fixture
def writer(tmp_path):
    opened = []

    def make(offset=0):
        opened.append(MetricsWriter(tmp_path / NAME, offset))
        return opened[-1]

    yield make
    for writer in opened:
        writer.close()


def write(writer, *steps):
    for step in steps:
        writer.write({"step": step, "loss": 1 / step})


def steps(folder):
    return [row["step"] for row in read_metrics(folder)]


def test_rows_come_back_as_they_were(tmp_path, writer):
    write(writer(), 1, 2, 3)
    assert read_metrics(tmp_path) == [{"step": n, "loss": 1 / n} for n in (1, 2, 3)]


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path, writer):
    open_writer = writer()
    write(open_writer, 1)
    assert steps(tmp_path) == [1]
    assert open_writer.offset == (tmp_path / NAME).stat().st_size


def test_rows_after_the_offset_are_cut_off_and_new_ones_follow(tmp_path, writer):
    first = writer()
    write(first, 1, 2)
    offset = first.offset
    write(first, 3, 4)
    first.close()
    second = writer(offset)
    assert not second.lost
    assert second.offset == offset
    write(second, 30)
    assert steps(tmp_path) == [1, 2, 30]
    assert second.offset == (tmp_path / NAME).stat().st_size


def test_an_offset_of_nothing_begins_anew(tmp_path, writer):
    write(writer(), 1, 2)
    write(writer(0), 7)
    assert steps(tmp_path) == [7]


@pytest.mark.parametrize("kept", [0, 5, 30])
def test_a_file_that_ended_before_the_offset_is_cut_to_whole_rows_and_never_padded(tmp_path, writer, kept):
    first = writer()
    write(first, 1, 2, 3)
    offset = first.offset
    first.close()
    path = tmp_path / NAME
    whole = len(path.read_bytes().split(b"\n")[0]) + 1
    path.write_bytes(path.read_bytes()[:kept])
    second = writer(offset)
    assert second.lost
    write(second, 9)
    assert b"\0" not in path.read_bytes()
    assert steps(tmp_path) == ([1, 9] if kept >= whole else [9])


def test_a_row_cut_off_by_a_kill_is_left_out(tmp_path, writer):
    write(writer(), 1, 2)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps(tmp_path) == [1, 2]


def test_a_run_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_a_place_that_cannot_be_written_is_told_in_a_sentence(tmp_path):
    with pytest.raises(StorageError, match=r"opening .*metrics.jsonl failed: No such file or directory"):
        MetricsWriter(tmp_path / "nowhere" / NAME)


def test_every_row_is_strict_json(tmp_path, writer):
    writer().write({"step": 1, "dev_loss": 2.5, "dev_sentence_perplexity": math.inf})

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [row["dev_loss"] for row in rows] == [2.5]
