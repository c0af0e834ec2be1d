"""Errors, findings, seeds and TOML values: the words every folder uses."""

import datetime
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.errors import InputError, KeyholeError, RunStopped, StorageError, nearest
from keyhole.core.findings import Finding
from keyhole.core.seeds import derive, stream
from keyhole.core.toml import to_toml

MANY = [f"{letter}{letter}" for letter in "abcdefghijklm"]


def test_the_nearest_word_is_named_and_a_few_are_listed():
    assert nearest("rop", ["rope", "alibi"]) == "; did you mean 'rope'? (allowed: alibi, rope)"
    assert nearest("xyz", ["rope", "alibi"]) == " (allowed: alibi, rope)"


def test_many_words_are_listed_only_when_none_is_near():
    assert nearest("ab", MANY) == "; did you mean 'bb'?"
    assert nearest("?", MANY) == f" (allowed: {', '.join(MANY)})"


def test_what_a_person_did_wrong_exits_2_and_what_a_finding_stopped_exits_1():
    finding = Finding(statement="the loss falls", expected="below 4", measured="nan", verdict="fails")
    stopped = RunStopped(finding)
    assert (InputError("x").exit_code, StorageError("x").exit_code, stopped.exit_code) == (2, 2, 1)
    assert all(issubclass(kind, KeyholeError) for kind in (InputError, StorageError, RunStopped))
    assert stopped.finding is finding
    assert str(stopped) == finding.line()


@pytest.fixture
def failing() -> Finding:
    return Finding(
        statement="the loss is finite",
        expected="a number",
        measured="NaN at step 3",
        tolerance="exact",
        verdict="fails",
        why="weights are NaN from here on",
        remedy="lower train.rate",
        evidence={"step": 3},
    )


def test_a_finding_in_one_line_ends_with_the_remedy(failing):
    assert failing.line() == "✗ the loss is finite: expected a number, measured NaN at step 3; lower train.rate"


def test_a_finding_that_holds_needs_no_remedy():
    finding = Finding(statement="s", expected="1", measured="1", verdict="holds", remedy="never mind")
    assert finding.line() == "✓ s: expected 1, measured 1"


def test_an_undecided_finding_says_what_would_decide_it():
    finding = Finding(statement="s", expected="1", measured="1 ± 2", verdict="undecided", remedy="train 5 seeds")
    assert finding.line() == "? s: expected 1, measured 1 ± 2; train 5 seeds"


def test_a_finding_in_full_says_tolerance_why_and_remedy(failing):
    assert failing.paragraph().splitlines() == [
        "✗ the loss is finite: expected a number, measured NaN at step 3",
        "  tolerance: exact",
        "  why: weights are NaN from here on",
        "  remedy: lower train.rate",
    ]
    bare = Finding(statement="s", expected="1", measured="1", verdict="holds", tolerance="1e-5")
    assert bare.paragraph().splitlines() == [bare.line(), "  tolerance: 1e-5"]


def test_a_finding_survives_json(failing):
    assert Finding(**json.loads(json.dumps(failing.to_dict()))) == failing


def test_seeds_are_what_they_always_were():
    """Pinned: another value here would change every run of every recipe."""
    assert derive(0) == 3456079177858693020
    assert derive(0, "init", "embedding") == 7300598856045699588
    assert derive(7, "epoch", 3, "order") == 6932989671123720102
    assert stream(0, "x").integers(1 << 30, size=3).tolist() == [1068567353, 347383826, 431058229]


@given(st.integers(0, 2**63), st.lists(st.integers(0, 99) | st.text(max_size=5), max_size=3))
def test_a_seed_fits_63_bits_and_depends_on_nothing_else(seed, names):
    assert 0 <= derive(seed, *names) < 2**63
    assert derive(seed, *names) == derive(seed, *names)


def test_streams_of_different_names_and_seeds_are_different():
    found = {derive(seed, *names) for seed in range(50) for names in ((), ("a",), ("b",), ("a", "b"), ("a", 1), ("a", 11))}
    assert len(found) == 300


def test_what_toml_has_no_form_for_is_refused_and_none_is_left_out():
    assert tomllib.loads(to_toml({"a": {"x": None, "y": {"z": None, "k": 1}}})) == {"a": {"y": {"k": 1}}}
    with pytest.raises(TypeError, match="no TOML form"):
        to_toml({"a": {"x": object()}})


@pytest.mark.parametrize("key", ["😀", "\x7f", "a b", "ä", "", 'quo"te', "back\\slash", "new\nline"])
def test_keys_that_are_not_bare_are_quoted(key):
    assert tomllib.loads(to_toml({"a": {"x": {key: 1}}})) == {"a": {"x": {key: 1}}}


@pytest.mark.parametrize(
    "value",
    [1e16, 1e-7, -0.0, float("inf"), -(2**62), datetime.date(2020, 1, 2), datetime.time(3, 4, 5),
     datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)],
)  # fmt: skip
def test_numbers_and_dates_are_read_back_equal(value):
    found = tomllib.loads(to_toml({"a": {"x": value}}))["a"]["x"]
    assert (found, repr(found)) == (value, repr(value))
