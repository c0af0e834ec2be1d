"""Models of every mixer, and of one mixer a layer: what is built, refused, stored and decoded."""

import tomllib

import pytest
import torch
from model_helpers import VOCAB, shaken, small, some_ids

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError
from keyhole.model.count import count, flops
from keyhole.model.decode import generate
from keyhole.model.lm import build
from keyhole.model.registry import CATALOGUE

STACK = ["linear", {"name": "window", "window": 5}]
ALONE = {name: name for name in CATALOGUE["mixer"]}
MIXERS = {**ALONE, "a stack": STACK, "none first": ["none", "softmax"]}


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_every_mixer_writes_with_its_state_what_it_writes_without(mixer):
    model = shaken(small({"model.mixer": mixer, "data.block": 40}))
    prompt = some_ids(1, 5)[0].tolist()
    cached, recomputed = (list(generate(model, prompt, 30, temperature=0, cached=cached)) for cached in (True, False))
    assert model.can_step()
    assert cached == recomputed


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_the_counts_of_a_model_are_those_of_its_modules(mixer):
    model = build(small({"model.mixer": mixer}), VOCAB)
    counted = count(model, 16)
    assert counted.total == sum(p.numel() for p in model.parameters())
    blocks = sum(block.mixer.cost(16).flops + block.feed.flops(16) for block in model.blocks)
    assert counted.flops == blocks + 2 * 16 * model.head.numel()


def test_each_layer_has_the_mixer_of_its_place():
    model = build(small({"model.mixer": STACK}), VOCAB)
    assert [type(block.mixer).__name__ for block in model.blocks] == ["Linear", "Window"]
    assert model.blocks[1].mixer.window == 5


def test_a_stack_survives_being_written_and_read():
    recipe = small({"model.mixer": STACK})
    again = Recipe.parse(tomllib.loads(recipe.to_toml()))
    assert again.model == recipe.model
    assert again.hash == recipe.hash
    assert 'mixer = ["linear", { name = "window", window = 5 }]' in recipe.to_toml()


REFUSED = {
    "too few mixers": (["linear"], {}, "model: mixer is a list of 1 for 2 layers; give one for each, or one for all"),
    "no mixer": ([], {}, "model: mixer is a list of 0 for 2 layers; give one for each, or one for all"),
    "rope for features": (
        "linear", {"model.position": "rope"},
        "position rope acts on queries and keys, and mixer linear has no scores for it to act on; "
        "use learned, sinusoidal or none",
    ),
    "rope in a part of a stack": (
        ["softmax", "average"], {"model.position": "rope"},
        "position rope acts on queries and keys, and mixer average has no scores for it to act on; "
        "use learned, sinusoidal or none",
    ),
    "alibi for squares": (
        "polynomial", {"model.position": "alibi"},
        "position alibi biases scores before a softmax, and mixer polynomial has none; "
        "use rope, learned, sinusoidal or none",
    ),
    "alibi for a regression": (
        "ridge", {"model.position": "alibi"},
        "position alibi biases scores before a softmax, and mixer ridge has none; use rope, learned, sinusoidal or none",
    ),
    "heads where nothing is mixed": (
        "none", {"model.merge": "shift"},
        "merge shift joins heads, and mixer none does not hand its heads out; "
        "give the mixer a `merge` argument, or use concat",
    ),
    "grouped heads of features": (
        "linear", {"model.kv_heads": 2},
        "kv_heads is set, and mixer linear has no key-value heads to group; leave it out",
    ),
    "an option it has not": ("ridge", {"model.mixer": {"name": "ridge", "lambda": 1.0}},
        "unknown option 'lambda' of mixer 'ridge'; did you mean 'lam'? (allowed: chunk, decay, lam, learn_lam, qk_norm)"),
}  # fmt: skip


@pytest.mark.parametrize(("mixer", "changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(mixer, changes, sentence):
    with pytest.raises(InputError) as refused:
        build(small({"model.mixer": mixer, **changes}), VOCAB)
    assert str(refused.value).removeprefix("the recipe: ") == sentence


SENSIBLE = [
    (mixer, position, merge)
    for mixer in ("window", "polynomial", "ridge")
    for position in ("learned", "sinusoidal", "rope", "none")
    for merge in CATALOGUE["merge"]
] + [(mixer, "learned", merge) for mixer in ("linear", "average", "recurrent") for merge in CATALOGUE["merge"]]


@pytest.mark.parametrize(("mixer", "position", "merge"), SENSIBLE)
def test_all_combinations_that_make_sense_work(mixer, position, merge):
    model = shaken(small({"model.mixer": mixer, "model.position": position, "model.merge": merge}))
    ids = some_ids(2, 16)
    logits = model(ids)
    assert logits.isfinite().all()
    if model.can_step():
        stepped, _ = model.step(ids, model.begin(2), 0)
        torch.testing.assert_close(stepped, logits[:, -1], rtol=0, atol=1e-9)
    else:
        assert merge == "reweight"


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_flops_are_known_without_building_the_model(mixer):
    recipe = small({"model.mixer": mixer})
    assert flops(recipe.model, VOCAB, 16) * 16 == count(build(recipe, VOCAB), 16).flops


def test_flops_of_a_feature_map_of_the_user_s_are_known_too(tmp_path):
    (tmp_path / "my.py").write_text("import torch\ndef phi(x):\n    return torch.cat((x.relu(), (-x).relu()), -1)\n")
    recipe = small({"model.mixer": {"name": "linear", "feature": "my.py:phi"}}, tmp_path)
    assert flops(recipe.model, VOCAB, 16, tmp_path) * 16 == count(build(recipe, VOCAB), 16).flops
