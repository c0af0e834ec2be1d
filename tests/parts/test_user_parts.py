"""A part of the user's own comes through the same door as ours."""

import copy
import sys

import pytest
import torch
from user_part_files import RIGHT

from keyhole.core.config import Recipe
from keyhole.model.decode import generate
from keyhole.model.lm import build
from keyhole.model.registry import CATALOGUE, catalogue

VOCAB = 11
PARTS = {
    "mixer": ("model.mixer", "Mine"),
    "mixer with a state": ("model.mixer", "Stepping"),
    "position that adds": ("model.position", "Adding"),
    "position that only has forward": ("model.position", "Whole"),
    "position that turns": ("model.position", "Turning"),
    "position that adds to scores": ("model.position", "Distance"),
    "merge": ("model.merge", "Half"),
    "norm": ("model.norm", "Half"),
    "norm with a constant": ("model.norm", "Constant"),
    "feed": ("model.feed", "Half"),
    "feed that asks for its layer": ("model.feed", "Layered"),
}
CAN_STEP = {"mixer with a state", "position that adds", "position that turns", "position that adds to scores", "merge",
            "norm", "norm with a constant", "feed"}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT)
    values = {"data": {"block": 12}, "model": {"layers": 2, "width": 16, "heads": 4}}
    if tmp_path.name.startswith("test_the_least_mixer"):
        values["model"]["position"] = "learned"
    return Recipe.parse(values, folder=tmp_path)


def with_part(recipe, kind, **options):
    key, name = PARTS[kind]
    return recipe.replace({key: {"name": f"mine.py:{name}", **options}})


def some_ids():
    return torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", PARTS)
def test_a_model_with_it_trains_a_step_and_talks(kind, recipe):
    model, ids = build(with_part(recipe, kind), VOCAB), some_ids()
    targets = some_ids().roll(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model(ids, targets)
    before.backward()
    own = [parameter for name, parameter in model.named_parameters() if ".part." in name]
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in own)
    optimizer.step()
    assert model(ids, targets) < before
    assert len(list(generate(model, [1], 20, temperature=0))) == 20


@pytest.mark.parametrize("kind", PARTS)
def test_decoding_is_cached_only_where_the_part_allows_it_and_says_the_same_either_way(kind, recipe):
    model = build(with_part(recipe, kind), VOCAB).double()
    for seed, parameter in enumerate(model.parameters()):
        chance = torch.Generator().manual_seed(seed)
        parameter.data += torch.randn(parameter.shape, dtype=torch.float64, generator=chance) * 0.3
    assert model.can_step() is (kind in CAN_STEP)
    cached, recomputed = (list(generate(model, [1, 2], 30, temperature=0, cached=cached)) for cached in (True, False))
    assert cached == recomputed
    if model.can_step():
        ids, state = some_ids(), model.begin(2)
        with torch.no_grad():
            logits, state = model.step(ids[:, :5], state, 0)
            for t in range(5, 12):
                torch.testing.assert_close(logits, model(ids)[:, t - 1], rtol=0, atol=1e-10)
                logits, state = model.step(ids[:, t : t + 1], state, t)


@pytest.mark.parametrize("kind", PARTS)
def test_a_copy_of_the_model_has_parts_of_its_own(kind, recipe):
    """The copy that computes in lower precision must read, and give gradients to, its own weights."""
    model = build(with_part(recipe, kind), VOCAB)
    twin, ids = copy.deepcopy(model), some_ids()
    expected = model(ids)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert torch.equal(twin(ids), expected)
    twin(ids, ids).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


@pytest.mark.parametrize("kind", PARTS)
def test_constants_in_float32_do_no_harm_in_a_bfloat16_model(kind, recipe):
    model, ids = build(with_part(recipe, kind), VOCAB), some_ids()
    expected = model(ids)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    found = model(ids)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.1 * expected.norm()
    model(ids, ids).backward()


def test_the_least_mixer_gets_its_options_and_the_facts_it_names(recipe):
    mixer = build(with_part(recipe, "mixer", anything="goes", more=3), VOCAB).blocks[0].mixer.part
    assert mixer.options == {"anything": "goes", "more": 3}
    assert mixer.map.weight.shape == (16, 16)


def test_each_layer_is_told_its_number(recipe):
    model = build(with_part(recipe, "feed that asks for its layer"), VOCAB)
    assert [block.feed.part.layer for block in model.blocks] == [0, 1]


def test_the_constructor_decides_the_first_values_of_parameters_without_a_role(recipe):
    part = build(with_part(recipe, "position that turns"), VOCAB).position.part
    torch.testing.assert_close(part.scale[:, 0], torch.linspace(1, 2, 12))


def test_what_a_constructor_draws_depends_on_the_seed_and_on_nothing_that_was_before(recipe):
    drawn = with_part(recipe, "mixer")
    torch.manual_seed(0)
    first = build(drawn, VOCAB).blocks[0].mixer.part.map.weight
    torch.manual_seed(1)
    after = torch.random.get_rng_state()
    assert torch.equal(build(drawn, VOCAB).blocks[0].mixer.part.map.weight, first)
    assert torch.equal(torch.random.get_rng_state(), after)
    assert not torch.equal(build(drawn.replace({"train.seed": 1}), VOCAB).blocks[0].mixer.part.map.weight, first)


def test_a_part_may_live_in_a_package(tmp_path, monkeypatch, recipe):
    package = tmp_path / "pack_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "deep.py").write_text(RIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    model = build(recipe.replace({"model.feed": "pack_of_mine.deep:Half"}), VOCAB)
    assert type(model.blocks[0].feed.part).__module__ == "pack_of_mine.deep"


def test_a_file_is_looked_up_beside_the_recipe_and_then_where_we_are(tmp_path, monkeypatch, recipe):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(RIGHT.replace("factor=0.5", "factor=9.0"))
    (elsewhere / "other.py").write_text(RIGHT)
    monkeypatch.chdir(elsewhere)
    assert build(with_part(recipe, "feed"), VOCAB).blocks[0].feed.part.factor == 0.5
    assert build(recipe.replace({"model.feed": "other.py:Half"}), VOCAB).blocks[0].feed.part.factor == 0.5


def test_all_layers_have_parts_of_one_class_and_an_edited_file_is_read_afresh(recipe, tmp_path):
    model = build(with_part(recipe, "feed"), VOCAB)
    assert type(model.blocks[0].feed.part) is type(model.blocks[1].feed.part)
    (tmp_path / "mine.py").write_text(RIGHT.replace("factor=0.5", "factor=0.7"))
    assert build(with_part(recipe, "feed"), VOCAB).blocks[0].feed.part.factor == 0.7
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_that_cannot_be_loaded_leaves_no_trace(tmp_path, recipe):
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('no')\n")
    before = set(sys.modules)
    with pytest.raises(Exception, match=r"broken.py could not be loaded: RuntimeError: no"):
        build(recipe.replace({"model.feed": "broken.py:X"}), VOCAB)
    assert not any("broken" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_part_of_ours_is_in_the_catalogue_with_a_sentence_and_its_options(kind):
    infos = {info.name: info for info in catalogue() if info.kind == kind}
    assert infos.keys() == CATALOGUE[kind].keys()
    for info in infos.values():
        assert len(info.summary) > 10
        assert not {"width", "heads", "block", "layer"} & info.options.keys()


def test_the_catalogue_shows_options_with_their_defaults():
    options = {(info.kind, info.name): info.options for info in catalogue()}
    assert options["position", "rope"] == {"base": 10000.0, "pairs": "halves"}
    assert options["mixer", "softmax"] == {"qk_norm": False, "bias": False, "impl": "auto"}
    assert options["merge", "concat"] == {}
