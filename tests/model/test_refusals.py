"""What is wrong with a part is said in one sentence that names the part."""

import sys
from pathlib import Path

import pytest
import torch
from model_helpers import VOCAB, small

from keyhole.core.errors import InputError
from keyhole.model.lm import build
from keyhole.model.registry import CATALOGUE

sys.path.insert(0, str(Path(__file__).parents[1] / "parts"))
from user_part_files import RIGHT, WRONG


@pytest.fixture
def refusal(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)

    def refused(changes) -> str:
        with pytest.raises(InputError) as caught:
            build(small(changes, tmp_path), VOCAB)
        sentence = str(caught.value)
        assert "\n" not in sentence
        return sentence.replace(str(tmp_path), "FOLDER")

    return refused


OWN = 'a {} of your own is written "my.py:Mine"'
NAMES = {
    "a near miss": (
        {"model.position": "ropee"},
        "there is no position 'ropee'; did you mean 'rope'? (allowed: alibi, learned, none, rope, sinusoidal); "
        + OWN.format("position"),
    ),
    "no miss at all": (
        {"model.feed": "xyz"},
        "there is no feed 'xyz' (allowed: gelu, relu-squared, swiglu); " + OWN.format("feed"),
    ),
    "a file without a class": (
        {"model.mixer": "right.py"},
        f"there is no mixer 'right.py' (allowed: {', '.join(sorted(CATALOGUE['mixer']))}); " + OWN.format("mixer"),
    ),
    "a class that is not there": (
        {"model.feed": "right.py:Hlaf"},
        "right.py has no 'Hlaf'; did you mean 'Half'? "
        "(allowed: Adding, Constant, Distance, Half, Layered, Mine, Stepping, Turning, Whole)",
    ),
    "a class that is no module": (
        {"model.feed": "wrong.py:NoModule"},
        "wrong.py:NoModule is not a torch.nn.Module class; write class NoModule(nn.Module): ...",
    ),
    "a function": (
        {"model.feed": "wrong.py:function"},
        "wrong.py:function is not a torch.nn.Module class; write class function(nn.Module): ...",
    ),
    "a package that is not installed": (
        {"model.feed": "no_such_package.deep:Thing"},
        "no_such_package.deep:Thing: the module 'no_such_package.deep' could not be imported "
        "(No module named 'no_such_package'); is it installed?",
    ),
    "no package at all": (
        {"model.feed": ":Thing"}, ":Thing: the module '' could not be loaded: ValueError: Empty module name",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), NAMES.values(), ids=NAMES)
def test_a_name_with_nothing_behind_it(changes, sentence, refusal):
    assert refusal(changes) == sentence


def test_a_file_that_is_not_there_names_where_it_was_looked_for(refusal):
    assert refusal({"model.feed": "gone.py:X"}) == f"there is no file gone.py in FOLDER or in {Path.cwd()}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("def (", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nope", "ModuleNotFoundError: "),
    ],
)
def test_a_file_that_cannot_be_loaded(content, reason, refusal, tmp_path):
    (tmp_path / "bad.py").write_text(content)
    assert refusal({"model.feed": "bad.py:X"}).startswith(f"FOLDER/bad.py could not be loaded: {reason}")


def test_a_package_that_raises_while_it_is_imported(refusal, tmp_path, monkeypatch):
    (tmp_path / "raising_package.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal({"model.feed": "raising_package:X"}) == (
        "raising_package:X: the module 'raising_package' could not be loaded: ZeroDivisionError: division by zero"
    )


HALF = "feed 'right.py:Half': option "
OPTIONS = {
    "unknown": (
        {"model.mixer": {"name": "softmax", "qknorm": True}},
        "unknown option 'qknorm' of mixer 'softmax'; did you mean 'qk_norm'? (allowed: bias, impl, qk_norm)",
    ),
    "unknown where there are none": (
        {"model.merge": {"name": "shift", "by": 2}}, "unknown option 'by' of merge 'shift'; shift has no options",
    ),
    "a fact of the model is no option": (
        {"model.norm": {"name": "rms", "width": 8}},
        "unknown option 'width' of norm 'rms' (allowed: eps)",
    ),
    "text for a switch": (
        {"model.mixer": {"name": "softmax", "bias": "yes"}},
        "mixer 'softmax': option bias = 'yes' is not valid; it takes true or false",
    ),
    "a number for a switch": (
        {"model.feed": {"name": "right.py:Half", "on": 1}}, HALF + "on = 1 is not valid; it takes true or false",
    ),
    "text for a number": (
        {"model.position": {"name": "rope", "base": "big"}},
        "position 'rope': option base = 'big' is not valid; it takes a number such as 10000.0",
    ),
    "a switch for a number": (
        {"model.feed": {"name": "right.py:Half", "factor": True}},
        HALF + "factor = True is not valid; it takes a number such as 0.5",
    ),
    "half for a whole number": (
        {"model.feed": {"name": "right.py:Half", "times": 1.5}},
        HALF + "times = 1.5 is not valid; it takes a whole number such as 1",
    ),
    "a number for text": (
        {"model.feed": {"name": "right.py:Half", "label": 1}},
        HALF + "label = 1 is not valid; it takes a string such as 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_is_wrong(changes, sentence, refusal):
    assert refusal(changes) == sentence


@pytest.mark.parametrize("options", [{"factor": 2}, {"extra": [1, 2]}, {"extra": "x"}, {"times": 3, "on": False}])
def test_options_of_the_right_type_are_taken(options, tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    model = build(small({"model.feed": {"name": "right.py:Half", **options}}, tmp_path), VOCAB)
    assert type(model.blocks[0].feed.part).__name__ == "Half"


SHAPES = {"mixer": "(2, 16, 16)", "norm": "(2, 16, 16)", "feed": "(2, 16, 16)", "merge": "(2, 16, 4, 4)",
          "position": "(2, 16, 16)"}  # fmt: skip
WIDER = {
    kind: shape[:-1].rpartition(" ")[0] + f" {2 * int(shape[:-1].rpartition(' ')[2])})" for kind, shape in SHAPES.items()
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_part_that_fails_when_used(kind, refusal):
    def said(name):
        return refusal({f"model.{kind}": f"wrong.py:{name}"})

    must = f"it was given, and must return, {SHAPES[kind]}"
    assert said("Raises") == f"{kind} wrong.py:Raises raised ValueError: I cannot"
    assert said("Wider") == f"{kind} wrong.py:Wider returned shape {WIDER[kind]}; {must}"
    assert said("Pair") == f"{kind} wrong.py:Pair returned tuple; {must}"
    assert said("NaN") == (
        f"{kind} wrong.py:NaN returned NaN or infinity at its first use; "
        "look for a division by zero, a logarithm of zero or an unset parameter (torch.empty)"
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_a_part_that_cannot_be_built(kind, refusal):
    assert refusal({f"model.{kind}": "wrong.py:BadStart"}) == (
        f"{kind} wrong.py:BadStart could not be built: NameError: name 'undefined' is not defined"
    )
    assert "could not be built: TypeError: " in refusal({f"model.{kind}": "wrong.py:Wants"})


POSITIONS = {
    "AddsWider": "position wrong.py:AddsWider returned shape (2, 16, 32); it was given, and must return, (2, 16, 16)",
    "AddsNaN": "position wrong.py:AddsNaN returned NaN or infinity at its first use",
    "TurnsShort": "position wrong.py:TurnsShort returned shape (2, 4, 15, 4); it was given, and must return, (2, 4, 1",
    "TurnsNaN": "position wrong.py:TurnsNaN returned NaN or infinity at its first use",
    "BiasFlat": "position wrong.py:BiasFlat returned shape (16,); bias must return (heads, 16, 16)",
    "BiasRaises": "position wrong.py:BiasRaises raised KeyError: 'gone'",
}


@pytest.mark.parametrize(("name", "sentence"), POSITIONS.items(), ids=POSITIONS)
def test_a_position_that_fails_when_used_in_any_of_its_ways(name, sentence, refusal):
    assert refusal({"model.position": f"wrong.py:{name}"}).startswith(sentence)


COMBINATIONS = {
    "a position that turns": (
        {"model.position": "rope"},
        "position rope acts on queries and keys, and mixer right.py:Mine does not take it; "
        "give the mixer a `position` argument, or use learned, sinusoidal or none",
    ),
    "a position that adds to scores": (
        {"model.position": "right.py:Distance"},
        "position right.py:Distance acts on queries and keys, and mixer right.py:Mine does not take it; "
        "give the mixer a `position` argument, or use learned, sinusoidal or none",
    ),
    "a merge": (
        {"model.merge": "shift"},
        "merge shift joins heads, and mixer right.py:Mine does not hand its heads out; "
        "give the mixer a `merge` argument, or use concat",
    ),
    "grouped heads": (
        {"model.kv_heads": 2},
        "kv_heads is set, and mixer right.py:Mine has no key-value heads to group; leave it out",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_what_a_mixer_cannot_take_is_not_given_to_it_in_silence(changes, sentence, refusal):
    assert refusal({"model.mixer": "right.py:Mine", **changes}) == sentence


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none", "right.py:Adding", "right.py:Whole"])
def test_every_position_that_adds_goes_with_the_least_mixer(position, tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    model = build(small({"model.mixer": "right.py:Mine", "model.position": position}, tmp_path), VOCAB)
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, VOCAB)


def test_a_refusal_of_our_own_part_reaches_the_user_as_it_is(refusal):
    assert refusal({"model.position": "rope", "model.width": 12}) == (
        "rope turns pairs of channels, but a head of width 3 is odd; use width / heads even"
    )


def test_the_rehearsal_leaves_the_model_in_training_and_without_a_trace(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    model = build(small({"model.feed": "right.py:Half"}, tmp_path), VOCAB)
    assert model.training
    assert not any(getattr(module, "rehearsing", False) for module in model.modules())
