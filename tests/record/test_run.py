import json
import os
import shutil
import stat

import pytest
import torch

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, StorageError
from keyhole.record.create import only_writer, portable, refuse_if_taken
from keyhole.record.index import list_runs
from keyhole.record.run import open_run
from keyhole.training.loop import train

MINE = """
import torch

class Mine(torch.nn.Module):
    def __init__(self, width, push=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), push))

    def forward(self, x):
        return x * self.weight
"""


def bits(run):
    return {name: tensor.clone() for name, tensor in run.checkpoint.weights().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_directory_holds_the_whole_record(folder, recipe):
    run = train(recipe(), folder / "run", quiet=True)
    assert {path.name for path in run.path.iterdir()} == {
        ".lock", "recipe.toml", "environment.json", "tokenizer.json", "metrics.jsonl", "checkpoints",
    }  # fmt: skip
    opened = open_run(run.path)
    assert opened.step == 4
    assert [row["step"] for row in opened.metrics] == [1, 2, 3, 4]
    assert opened.tokenizer.decode(opened.tokenizer.encode("The 5 keys")) == "The 5 keys"
    assert opened.environment["data"]["hash"]
    assert opened.environment["versions"]["torch"] == torch.__version__
    assert not opened.model.training
    assert str(opened) == f"run {run.path}"


def test_everything_in_a_run_can_be_read_by_others(folder, recipe):
    (folder / "mine.py").write_text(MINE)
    run = train(recipe(model_feed="mine.py:Mine"), folder / "run", quiet=True)
    for path in run.path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & (0o055 if path.is_dir() else 0o044) == (0o055 if path.is_dir() else 0o044), path


def test_a_stored_recipe_has_every_default_filled_in_and_no_relative_path(folder, recipe):
    run = train(recipe(), folder / "run", quiet=True)
    text = (run.path / "recipe.toml").read_text()
    for key in ("split", "dropout", "warmup", "clip", "seed"):
        assert f"{key} = " in text
    assert run.recipe.data.source.name == str(folder / "text.txt")
    assert run.recipe.to_toml() == text


def test_a_runs_own_recipe_repeats_it_bit_for_bit_from_anywhere(folder, recipe, tmp_path_factory, monkeypatch):
    (folder / "mine.py").write_text(MINE)
    made = recipe(
        model_feed={"name": "mine.py:Mine", "push": 0.5}, model_dropout=0.1, data_tokenizer="words", data_rows="lines"
    )
    run = train(made, folder / "run", quiet=True)
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    shutil.move(run.path, moved)
    (folder / "mine.py").unlink()  # the run has its own copy
    monkeypatch.chdir(tmp_path_factory.mktemp("anywhere"))
    again = train(Recipe.load(moved / "recipe.toml"), "again", quiet=True)
    assert same(bits(open_run(moved)), bits(again))
    assert (again.path / "code/mine.py").read_text() == MINE
    third = train(Recipe.load(again.path / "recipe.toml"), "third", quiet=True)
    assert same(bits(third), bits(again))
    assert third.recipe.hash == again.recipe.hash


def test_a_users_code_is_recorded_with_its_digest(folder, recipe):
    (folder / "mine.py").write_text(MINE)
    (folder / "other").mkdir()
    (folder / "other/mine.py").write_text(MINE + "\n# another\n")
    made = recipe(model_feed="mine.py:Mine", model_norm="other/mine.py:Mine")
    stored, code = portable(made)
    assert set(code) == {"code/mine.py", "code/mine_2.py"}
    run = train(made, folder / "run", quiet=True)
    assert sorted(path.name for path in (run.path / "code").glob("*.py")) == ["mine.py", "mine_2.py"]
    assert set(run.environment["code"]) == set(code)
    assert len(set(run.environment["code"].values())) == 2
    assert run.model is not None
    assert stored.model.feed.name != stored.model.norm.name


def test_opening_what_is_no_run_says_what_is_missing(folder, recipe):
    with pytest.raises(InputError, match=r"there is no run .*nowhere"):
        open_run(folder / "nowhere")
    with pytest.raises(InputError, match=r"is not a run: it has no recipe.toml"):
        open_run(folder)
    run = train(recipe(), folder / "run", quiet=True)
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint yet"):
        _ = open_run(run.path).model


def test_a_damaged_checkpoint_is_refused_when_a_run_is_opened(folder, recipe):
    run = train(recipe(), folder / "run", quiet=True)
    os.truncate(run.checkpoint.path / "weights.safetensors", 100)
    with pytest.raises(StorageError, match=r"cut short or changed .*; remove that folder to use step-00000002"):
        _ = open_run(run.path).model


def test_runs_are_listed_with_where_each_stands(folder, recipe):
    for name in ("done", "unfinished", "empty", "found", "torn", "broken", "deep/down"):
        train(recipe(), folder / "runs" / name, quiet=True)
    shutil.rmtree(folder / "runs/unfinished/checkpoints/step-00000004")
    shutil.rmtree(folder / "runs/empty/checkpoints")
    (folder / "runs/found/findings.json").write_text('[{"verdict": "fails"}]')
    os.truncate(folder / "runs/torn/checkpoints/step-00000004/weights.safetensors", 100)
    (folder / "runs/broken/recipe.toml").write_text("not = [toml")
    rows = {os.path.relpath(row["run"], folder / "runs"): row for row in list_runs(folder / "runs")}
    assert {name: row["state"] for name, row in rows.items() if name != "broken"} == {
        "done": "done",
        "deep/down": "done",
        "unfinished": "unfinished",
        "empty": "no checkpoint",
        "found": "stopped by a finding",
        "torn": "newest checkpoint damaged",
    }
    assert rows["broken"]["state"].startswith("damaged: ")
    done = rows["done"]
    assert (done["step"], done["saved"], rows["unfinished"]["saved"], rows["empty"]["saved"]) == (4, 4, 2, 0)
    assert done["dev_loss"] == open_run(folder / "runs/done").metrics[-1]["dev_loss"]
    assert done["model"] == "1x2x16 softmax learned"


def test_runs_are_found_below_a_folder_called_code_but_not_in_a_runs_own_code(folder, recipe):
    place = folder / "code/runs"
    run = train(recipe(), place / "one", quiet=True)
    (run.path / "code").mkdir()
    shutil.copy(run.path / "recipe.toml", run.path / "code/recipe.toml")
    assert [row["run"] for row in list_runs(place)] == [str(run.path)]


def test_a_damaged_findings_file_does_not_stop_the_list(folder, recipe):
    run = train(recipe(), folder / "runs/one", quiet=True)
    (run.path / "findings.json").write_text("{")
    (row,) = list_runs(folder / "runs")
    assert row["state"].startswith("damaged: ")


def test_listing_where_there_is_no_folder_says_how_to_make_a_run(folder):
    with pytest.raises(InputError, match=r"there is no folder .*; keyhole train RECIPE.toml makes the first run"):
        list_runs(folder / "nowhere")


def test_the_lock_is_held_by_one_and_leaves_no_trace_of_a_run_that_never_began(folder):
    out = folder / "run"
    with only_writer(out):
        with pytest.raises(InputError, match="another process is training"), only_writer(out):
            pass
        assert out.is_dir()
    assert not out.exists()
    out.mkdir()
    with only_writer(out):
        refuse_if_taken(out)
    assert list(out.iterdir()) == []
    with only_writer(out):
        (out / "something").touch()
    assert {path.name for path in out.iterdir()} == {".lock", "something"}


def test_environment_says_what_the_run_was_made_with(folder, recipe):
    run = train(recipe(), folder / "run", quiet=True)
    known = json.loads((run.path / "environment.json").read_text())
    assert known["precision"] == {"name": "float32", "reason": "asked for in the recipe"}
    assert known["processes"] == 1
    assert known["machine"]["threads"] == 1
    assert known["command"]
