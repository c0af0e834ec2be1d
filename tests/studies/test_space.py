import re
from pathlib import Path

import numpy as np
import pytest
from search_helpers import plan

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError
from keyhole.studies.search.plan import SearchPlan
from keyhole.studies.search.space import Space, apply, flatten

ROOT = Path(__file__).parents[2]
FILE = """
[search]
recipe = "base.toml"
sampler = "grid"

[space]
train.rate = { low = 1e-3, high = 1e-1, log = true, points = 3 }
"model.mixer" = ["ridge", { name = "ridge", learn_lam = false }]
model.mixer.lam = [0.1, 1.0]

[set]
train.steps = 50
"model.position" = { name = "rope" }
"""


def parse(table, recipe=None):
    return Space.parse(flatten(table), recipe or Recipe())


def test_a_grid_takes_both_ends_and_even_steps_between_in_the_logarithm():
    (rate,) = parse({"train.rate": {"low": 1e-3, "high": 1e-1, "log": True, "points": 5}}).axes
    assert rate.values() == (1e-3, 0.00316228, 0.01, 0.0316228, 1e-1)
    (warmup,) = parse({"train.warmup": {"low": 0, "high": 1, "points": 3}}).axes
    assert (warmup.values(), warmup.whole) == ((0.0, 0.5, 1.0), False), "a fraction, though its ends are written whole"
    (layers,) = parse({"model.layers": {"low": 2, "high": 8, "step": 3}}).axes
    assert layers.values() == (2, 5, 8)
    (width,) = parse({"model.width": {"low": 16, "high": 256, "log": True, "points": 5}}).axes
    assert width.values() == (16, 32, 64, 128, 256)
    assert all(type(value) is int for value in width.values())


def test_keys_may_stand_with_or_without_quotes():
    plain = {"train": {"rate": {"low": 0.1, "high": 0.2}}, "model": {"position": ["rope", "learned"]}}
    quoted = {"train.rate": {"low": 0.1, "high": 0.2}, "model.position": ["rope", "learned"]}
    assert parse(plain) == parse(quoted)


@pytest.mark.parametrize(
    ("axis", "low", "high"),
    [
        ({"train.rate": {"low": 1e-4, "high": 1.0, "log": True}}, 1e-4, 1.0),
        ({"model.layers": {"low": 2, "high": 5}}, 2, 5),
        ({"model.layers": {"low": 2, "high": 8, "step": 3}}, 2, 8),
        ({"model.layers": {"low": 1, "high": 4, "log": True}}, 1, 4),
    ],
)
def test_what_is_drawn_lies_in_the_range_and_reaches_all_of_it(axis, low, high):
    (found,) = parse(axis).axes
    random = np.random.default_rng(0)
    drawn = [found.draw(random) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    if found.whole:
        assert set(drawn) == set(found.values())
        assert min(drawn.count(value) for value in found.values()) > 150
    else:
        assert 0.45 < sum(value < 1e-2 for value in drawn) / 2000 < 0.55, "half of it below the middle of the logarithm"


def test_a_search_file_is_read_with_its_recipe_beside_it(tmp_path):
    (tmp_path / "base.toml").write_text("[model]\nlayers = 3\n")
    (tmp_path / "search.toml").write_text(FILE)
    found = SearchPlan.load(tmp_path / "search.toml")
    assert (found.recipe.model.layers, found.recipe.train.steps, found.trials) == (3, 50, 3 * 2 * 2)
    points = list(found.axes.grid())
    assert points[0] == {"train.rate": 1e-3, "model.mixer": "ridge", "model.mixer.lam": 0.1}
    recipe = found.settings_of(points[-1])
    assert recipe.model.mixer.options == {"learn_lam": False, "lam": 1.0}
    assert recipe.model.position.name == "rope"
    assert recipe.train.rate == 1e-1


def test_the_search_file_of_the_documentation_is_valid(tmp_path):
    text = (ROOT / "docs" / "search.md").read_text()
    (tmp_path / "search.toml").write_text(
        re.search(r"```toml\n(.*?)```", text, re.S)[1].replace("recipes/", f"{ROOT}/recipes/")
    )
    found = SearchPlan.load(tmp_path / "search.toml")
    keys = {axis.key for axis in found.axes.axes}
    assert keys == {"train.rate", "model.layers", "model.position", "train.optimizer.adam_rate"}


def test_an_option_of_a_part_is_set_and_the_others_stay():
    base = Recipe().replace({"train.optimizer": {"name": "muon", "adam_rate": 0.01}})
    found = apply(base, {"train.optimizer.momentum": 0.9, "train.rate": 0.5})
    assert found.train.optimizer.options == {"adam_rate": 0.01, "momentum": 0.9}
    assert found.train.rate == 0.5


RANGE = {"low": 1e-3, "high": 1e-1}


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, ["[space] is empty", '"train.rate" = { low']),
        ({"train.rte": RANGE}, ["unknown key 'train.rte'", "did you mean 'train.rate'"]),
        ({"trian": {"rate": RANGE}}, ["'trian.rate'", "did you mean 'train.rate'"]),
        ({"rate": RANGE}, ["unknown key 'rate'", "did you mean 'train.rate'"]),
        ({"train.rate": 0.1}, ['"train.rate" = 0.1 does not say what to vary', "low = 1e-3"]),
        ({"train.rate": {"low": 1e-3}}, ["needs two numbers, low and high"]),
        ({"train.rate": {"low": "a", "high": 1}}, ["needs two numbers"]),
        ({"train.rate": {"low": 1e-3, "high": float("inf")}}, ["needs two numbers"]),
        ({"train.rate": {**RANGE, "lgo": True}}, ["unknown word 'lgo'", "allowed: high, log, low"]),
        ({"train.rate": {**RANGE, "log": 1}}, ["log is true or false"]),
        ({"train.rate": {"low": 1.0, "high": 0.1}}, ["low = 1.0 is not below high = 0.1"]),
        ({"train.rate": {"low": -1.0, "high": 0.1}}, ["-1.0 is not a value of this key", "greater than 0"]),
        ({"train.warmup": {"low": 0.0, "high": 0.1, "log": True}}, ["begins above 0"]),
        ({"train.rate": {**RANGE, "points": 1}}, ["points = 1", "both ends"]),
        ({"train.rate": {**RANGE, "step": 2}}, ["step = 2 must lead"]),
        ({"model.layers": {"low": 2, "high": 5, "step": 2}}, ["step = 2 must lead from low = 2 to high = 5"]),
        ({"model.layers": {"low": 1.5, "high": 6.0}}, ["takes whole numbers; write low = 2, high = 6"]),
        ({"model.layers": [2, "3"]}, ["'3' is not a value of this key", "integer"]),
        ({"model.layers": [2]}, ["has 1 choice", "under [set]"]),
        ({"model.position": ["rope", "rope"]}, ["lists rope more than once"]),
        ({"model.position": ["rope", "lerned"]}, ["no position 'lerned'", "did you mean 'learned'"]),
        ({"model.position": {"low": 1, "high": 2}}, ["1 is not a value of this key", "give a name"]),
        ({"model.mixer": ["softmax", {"name": "ridge", "lamb": 1.0}]}, ["unknown option 'lamb'", "did you mean 'lam'"]),
        ({"model.mixer.lam": RANGE}, ["model.mixer.lam", "unknown option 'lam' of mixer 'softmax'"]),
        ({"model.mixer": ["ridge", "softmax"], "model.mixer.lam": [0.1, 1.0]}, ["option 'lam' of mixer 'softmax'"]),
        ({"model.width.half": RANGE}, ["model.width is no part and has no options"]),
        ({"train.optimizer": ["adamw", "adamv"]}, ["no optimizer 'adamv'", "did you mean 'adam'"]),
        ({"train.optimizer.momentum": [0.5, 1.5]}, ["momentum"]),
        ({"train.schedule": ["cosine", "cosin"]}, ["no schedule 'cosin'", "did you mean 'cosine'"]),
        ({"data.tokenizer": ["chars", "words"]}, ["different text", "could not be compared"]),
        ({"train.seed": {"low": 0, "high": 9}}, ["luck", "`repeats`"]),
    ],
)
def test_a_wrong_space_is_refused_in_one_sentence_that_helps(space, words):
    with pytest.raises(InputError) as caught:
        parse(space)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"smapler": "grid"}, ["unknown key 'search.smapler'", "did you mean 'sampler'"]),
        ({"sampler": "bayes"}, ["search.sampler = 'bayes'", "'grid', 'random' or 'tpe'"]),
        ({"trials": 0}, ["search.trials = 0", "greater than or equal to 1"]),
        ({"sampler": "grid", "trials": 7}, ["this grid has 30 points and trials = 7", 'sampler = "random"']),
        ({"sampler": "grid", "space": {"train.rate": RANGE}}, ['how many values of "train.rate"', "points = 5"]),
        ({"given": {"model.layers": 3}}, ["model.layers stands under [space] and under [set]"]),
        ({"given": {"train.stepps": 3}}, ["unknown key 'train.stepps'", "did you mean 'steps'"]),
        ({"given": {"train.seed": 3}, "repeats": 2}, ["train.seed is set, and repeats = 2"]),
        ({"given": {"data.seed": 3}, "repeats": 2}, ["data.seed is set, and repeats = 2"]),
        ({"objective": "dev_los"}, ["objective = 'dev_los' is not measured", "did you mean 'dev_loss'"]),
        ({"objective": "accuracy", "pruner": "median"}, ["pruner = 'median' ends trials by their dev loss", "accuracy"]),
        ({"goal": "highest", "pruner": None}, ["median pruning keeps the lowest losses", 'pruner = "none"']),
        (
            {"sampler": "grid", "space": {"model.layers": {"low": 1, "high": 200}, "model.width": {"low": 1, "high": 99}}},
            ["19,800 points", "at most 10,000"],
        ),
    ],
)
def test_a_wrong_plan_is_refused_in_one_sentence_that_helps(search, words):
    with pytest.raises(InputError) as caught:
        plan(**search)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


def test_a_search_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no search file"):
        SearchPlan.load(tmp_path / "none.toml")
    path = tmp_path / "search.toml"
    for text, words in (
        ("[search", "is not a TOML file"),
        ("[space]\n", r"search is missing; add \[search\] with recipe"),
        ("[search]\n[space]\n", r"search.recipe is missing; add recipe = "),
        ('[search]\nrecipe = "first.toml"\n', r"space is missing; add a table \[space\]"),
        ('[search]\nrecipe = "first.toml"\n[space]\n', "there is no recipe first.toml"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            SearchPlan.load(path)
