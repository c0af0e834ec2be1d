import pytest

from keyhole.core.errors import InputError
from keyhole.core.files import read_json, write_json
from keyhole.studies.match import budgeted, size_of
from keyhole.studies.plan import load_plan
from keyhole.studies.prepare import prepare, stored_plan
from keyhole.studies.rates import choose, settle
from keyhole.text import open_dataset
from tests.studies.study_helpers import write_study


def read(arm):
    return open_dataset(arm.recipe.data, arm.recipe.folder)


def plan_of(folder, **sections):
    return load_plan(write_study(folder, **sections))


def test_arms_are_the_base_recipe_with_their_changes(tmp_path):
    plan = plan_of(tmp_path, set={"train": {"rate": 0.5}})
    assert [arm.name for arm in plan.arms] == ["baseline", "rope", "reweight"]
    assert plan.baseline == "baseline"
    assert plan.seeds == (0, 1)
    assert plan.arm("rope").recipe.model.position.name == "rope"
    assert all(arm.recipe.train.rate == 0.5 and arm.recipe.data.block == 8 for arm in plan.arms)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"study": {"seeds": 0}}, "seeds = 0 leaves nothing to train"),
        ({"study": {"seeds": [1, 1]}}, "give different whole numbers"),
        ({"study": {"seeds": [-1]}}, "of 0 or more"),
        ({"study": {"baseline": "rop"}}, "baseline = 'rop' is no arm; did you mean 'rope'"),
        ({"study": {"tokens": 100}}, "give one of steps, tokens, seconds, flops, not steps and tokens"),
        ({"study": {"step": 100}}, "unknown key 'study.step'; did you mean 'steps'"),
        ({"study": {"recipe": "nowhere.toml"}}, "there is no recipe nowhere.toml"),
        ({"arms": {}}, "arms is missing"),
        ({"arms": {"a": {}, "A": {}}}, "differ in capitals alone"),
        ({"arms": {"a b": {}}}, "an arm cannot be called 'a b'"),
        ({"arms": {"a": {"model": {"positoin": "rope"}}}}, "arm a: unknown key 'model.positoin'; did you mean 'position'"),
        ({"arms": {"a": {"modle": {}}}}, "unknown key 'arms.a.modle'; did you mean 'model'"),
        ({"arms": {"a": {}, "b": {"data": {"block": 4}}}}, "arm b has data.block = 4 and a has 8"),
        ({"arms": {"a": {"train": {"seed": 3}}}}, "train.seed is the study's own"),
        ({"arms": {"a": {"train": {"steps": 3}}}}, "arm a sets train.steps, but arms share one budget"),
        ({"set": {"train": {"tokens": 3}}}, "give the budget once"),
        ({"rates": {"values": [0.1]}}, "rates.values"),
        ({"rates": {"values": [0.1, 0.2]}, "arms": {"a": {"train": {"rate": 0.1}}}}, "train.rate, which [rates] searches"),
        ({"arms": {"a": {"rates": [0.1]}}}, "arm a has rates, and nothing searches them"),
        ({"rates": {"values": [0.1, 0.2]}, "arms": {"a": {"rates": [0.1]}}}, "arm a tries the rates [0.1]; give 2"),
        ({"measure": {"past": [0.5]}}, "multiples of the block above 1"),
    ],
)
def test_bad_studies_are_refused_with_one_sentence(tmp_path, sections, said):
    path = write_study(tmp_path, **sections)
    with pytest.raises(InputError) as refused:
        load_plan(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_arms_of_one_name_are_refused_by_name(tmp_path):
    path = write_study(tmp_path)
    path.write_text(path.read_text() + "\n[arms.rope]\n")
    with pytest.raises(InputError, match="every arm needs a name of its own"):
        load_plan(path)


def test_data_may_differ_where_that_is_asked_for(tmp_path):
    arms = {"a": {}, "b": {"data": {"block": 4}}}
    plan = plan_of(tmp_path, arms=arms, study={"different_data": True})
    assert plan.arm("b").recipe.data.block == 4


@pytest.mark.parametrize("unit", ["steps", "tokens", "seconds"])
def test_a_budget_takes_the_place_of_the_recipes_own(tmp_path, unit):
    path = write_study(tmp_path)
    path.write_text(path.read_text().replace("steps = 12\n", f"{unit} = 7\n"))
    plan = load_plan(path)
    for arm in plan.arms:
        train = budgeted(arm, plan.budget, size_of(arm, read(arm))).train
        assert [unit for unit in ("steps", "tokens", "seconds") if getattr(train, unit)] == [unit]
        assert getattr(train, unit) == 7


def test_a_budget_in_flops_gives_the_larger_model_fewer_tokens(tmp_path):
    path = write_study(tmp_path, arms={"small": {}, "large": {"model": {"width": 32}}})
    path.write_text(path.read_text().replace("steps = 12\n", "flops = 1e9\n"))
    plan = load_plan(path)
    spent = {}
    for arm in plan.arms:
        size = size_of(arm, read(arm))
        tokens = budgeted(arm, plan.budget, size).train.tokens
        spent[arm.name] = (tokens, 3 * tokens * size.flops_per_token)
    assert spent["large"][0] < 0.6 * spent["small"][0]
    assert all(abs(flops / 1e9 - 1) < 1e-3 for _, flops in spent.values())


def test_flops_count_what_is_read_and_not_only_what_is_asked(tmp_path):
    task = {"name": "task:recall", "pairs": 3}
    path = write_study(tmp_path, base={"data": {"source": task, "block": 32}}, arms={"a": {}})
    path.write_text(path.read_text().replace("steps = 12\n", "flops = 1e9\n"))
    plan = load_plan(path)
    size = size_of(plan.arms[0], read(plan.arms[0]))
    assert size.read_per_target > 1.5
    tokens = budgeted(plan.arms[0], plan.budget, size).train.tokens
    x, y = read(plan.arms[0]).batch(0, 512)
    steps = tokens / (y != -100).sum()
    assert abs(3 * steps * x.size * size.flops_per_token / 1e9 - 1) < 0.02


def test_flops_cannot_be_matched_for_a_part_that_declares_none(tmp_path):
    (tmp_path / "my.py").write_text(
        "from torch import nn\n\nclass Mine(nn.Module):\n    def forward(self, x):\n        return x.cumsum(1)\n"
    )
    arms = {"a": {}, "mine": {"model": {"mixer": "my.py:Mine"}}}
    path = write_study(tmp_path, arms=arms)
    path.write_text(path.read_text().replace("steps = 12\n", "flops = 1e9\n"))
    plan = load_plan(path)
    with pytest.raises(InputError, match="arm mine has a part that declares no cost"):
        budgeted(plan.arm("mine"), plan.budget, size_of(plan.arm("mine"), read(plan.arm("mine"))))


def test_a_prepared_study_is_whole_in_its_own_folder(tmp_path):
    source = tmp_path / "source"
    (tmp_path / "source").mkdir()
    (source / "my.py").write_text("from torch import nn\n\nclass Mine(nn.Identity):\n    pass\n")
    arms = {"a": {}, "my.own+1": {"model": {"mixer": "my.py:Mine"}, "note": "of my own"}}
    plan = load_plan(write_study(source, arms=arms, rates={"values": [0.1, 0.2]}))
    out = tmp_path / "out"
    before = prepare(plan, out, resume=False)
    (source / "my.py").unlink()
    (source / "base.toml").unlink()
    again = stored_plan(out)
    assert again.arm("my.own+1").recipe.model.mixer.name == f"{out}/code/my.py:Mine"
    assert again.arm("my.own+1").note == "of my own"
    after = prepare(again, out, resume=True)
    assert [task.digest for task in after.trials(dict.fromkeys(after.recipes))] == [
        task.digest for task in before.trials(dict.fromkeys(before.recipes))
    ]
    assert [task.name for task in after.rates()] == [task.name for task in before.rates()]


def test_arms_of_a_seed_share_all_chance_and_rates_are_searched_on_other_seeds(tmp_path):
    plan = load_plan(write_study(tmp_path / "source", rates={"values": [0.1, 0.2], "seeds": 2}))
    prepared = prepare(plan, tmp_path / "out", resume=False)
    for task in prepared.trials(dict.fromkeys(prepared.recipes)):
        assert task.recipe["train"]["seed"] == task.recipe["data"]["seed"] == task.seed
    rates = prepared.rates()
    assert len(rates) == 2 * 2 * 3
    assert {task.seed for task in rates}.isdisjoint(plan.seeds)


def test_arms_may_search_rates_of_their_own_size(tmp_path):
    arms = {"a": {}, "b": {"rates": [1.0, 2.0]}}
    plan = load_plan(write_study(tmp_path / "source", arms=arms, rates={"values": [0.1, 0.2]}))
    tried = {(task.arm, task.recipe["train"]["rate"]) for task in prepare(plan, tmp_path / "out", resume=False).rates()}
    assert tried == {("a", 0.1), ("a", 0.2), ("b", 1.0), ("b", 2.0)}
    assert stored_plan(tmp_path / "out").arm("b").rates == (1.0, 2.0)


def test_a_rate_that_was_chosen_stays_whatever_is_found_later(tmp_path):
    plan = load_plan(write_study(tmp_path / "source", arms={"a": {}}, rates={"values": [0.1, 0.2, 0.3]}))
    out = tmp_path / "out"
    places = [out / task.name / "result.json" for task in prepare(plan, out, resume=False).rates()]
    write_json(places[0], {"dev_loss": 2.0})
    write_json(places[1], {"dev_loss": 3.0})
    assert settle(plan, out) == {"a": 0.1}
    write_json(places[2], {"dev_loss": 1.0})
    assert settle(plan, out) == {"a": 0.1}
    assert choose(plan, out, "a") == ({0.1: 2.0, 0.2: 3.0, 0.3: 1.0}, 0.1)


def test_seeds_that_choose_the_rate_cannot_be_the_studys_own(tmp_path):
    with pytest.raises(InputError, match="seeds from 10000 on are those that"):
        load_plan(write_study(tmp_path, study={"seeds": [0, 10_001]}, rates={"values": [0.1, 0.2]}))


def test_a_study_whose_text_changed_is_not_resumed(tmp_path):
    source, out = write_study(tmp_path / "source"), tmp_path / "out"
    prepare(load_plan(source), out, resume=False)
    prepare(load_plan(source), out, resume=True)
    text = tmp_path / "source/text.txt"
    text.write_text(text.read_text().replace("e", "E"))
    with pytest.raises(InputError, match="the text of arm baseline changed since"):
        prepare(load_plan(source), out, resume=True)


@pytest.mark.parametrize("seen", [True, False])
def test_seeds_that_were_added_after_a_look_are_remembered(tmp_path, seen):
    source, out = write_study(tmp_path / "source"), tmp_path / "out"
    prepare(load_plan(source), out, resume=False)
    if seen:
        write_json(out / "runs/baseline/seed-0/result.json", {})
    prepare(load_plan(source, seeds=5), out, resume=True)
    prepare(load_plan(source, seeds=5), out, resume=True)
    assert read_json(out / "study.json")["seeds_before"] == ([[0, 1]] if seen else [])


def test_one_precision_is_chosen_for_all_arms(tmp_path):
    plan = load_plan(write_study(tmp_path / "source", base={"train": {"precision": "auto"}}))
    prepared = prepare(plan, tmp_path / "out", resume=False)
    chosen = {recipe.train.precision for recipe in prepared.recipes.values()}
    assert len(chosen) == 1
    assert chosen < {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"arms": {"baseline": {}, "rope": {"model": {"position": "alibi"}}, "reweight": {}}},
            "arm rope changed: model.position",
        ),
        ({"arms": {"baseline": {}}}, "is gone"),
        ({"study": {"steps": 13}}, "train.steps was 12"),
        ({"study": {"processes": 2}}, "the number of its processes is not what it was"),
        ({"rates": {"values": [0.1, 0.2]}}, "the rates it searches are not what"),
    ],
)
def test_a_study_that_changed_is_not_resumed(tmp_path, change, said):
    out = tmp_path / "out"
    prepare(load_plan(write_study(tmp_path / "source")), out, resume=False)
    with pytest.raises(InputError, match=said):
        prepare(load_plan(write_study(tmp_path / "source", **change)), out, resume=True)


def test_a_folder_with_anything_in_it_is_not_written_into(tmp_path):
    plan = load_plan(write_study(tmp_path / "source"))
    with pytest.raises(InputError, match="is not empty"):
        prepare(plan, tmp_path / "source", resume=False)
    prepare(plan, tmp_path / "out", resume=False)
    with pytest.raises(InputError, match="add --resume"):
        prepare(plan, tmp_path / "out", resume=False)
    with pytest.raises(InputError, match="no study to resume"):
        prepare(plan, tmp_path / "other", resume=True)


def test_a_part_that_the_base_alone_names_is_kept_as_well(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "my.py").write_text("from torch import nn\n\nclass Mine(nn.Identity):\n    pass\n")
    arms = {"a": {"model": {"mixer": "softmax"}}, "b": {"model": {"mixer": "linear"}}}
    plan = load_plan(write_study(source, arms=arms, base={"model": {"mixer": "my.py:Mine"}}))
    prepare(plan, tmp_path / "out", resume=False)
    (source / "my.py").unlink()
    assert load_plan(tmp_path / "out" / "study.toml").arm("b").recipe.model.mixer.name == "linear"
    assert (tmp_path / "out" / "code" / "my.py").is_file()
