import json
import shutil

import pytest
from failure_helpers import NAN_PART, Notes, contents, stop_after
from training_helpers import differences, end, tiny

from keyhole.core.errors import InputError, StorageError
from keyhole.record import create
from keyhole.record.create import only_writer
from keyhole.record.run import open_run
from keyhole.training.loop import train


def test_only_one_process_trains_in_a_folder(folder):
    run = stop_after(folder, 8)
    before = contents(run)
    with only_writer(run), pytest.raises(InputError, match="another process is training in"):
        train(tiny(folder), run, resume=True, quiet=True)
    assert contents(run) == before
    train(tiny(folder), run, resume=True, quiet=True)


CHANGED = {
    "train.rate": ({"train_rate": 0.5}, r"the recipe changed: train.rate is 0.001 in .* and 0.5 now"),
    "train.steps": ({"train_steps": 13}, r"the recipe changed: train.steps is 12 in .* and 13 now"),
    "model.width": ({"model_width": 32}, r"the recipe changed: model.width is 16 in .* and 32 now"),
    "model.position": ({"model_position": "rope"}, r"the recipe changed: model.position is 'learned' .* and 'rope' now"),
    "train.optimizer": ({"train_optimizer": {"name": "adamw", "eps": 0.1}}, r"the recipe changed: train.optimizer is"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_recipe_that_changed_is_refused_by_the_name_of_the_key(folder, key):
    changes, says = CHANGED[key]
    run = stop_after(folder, 8)
    before = contents(run)
    with pytest.raises(InputError, match=says):
        train(tiny(folder, **changes), run, resume=True, quiet=True)
    assert contents(run) == before


def test_data_that_changed_are_refused(folder):
    run = stop_after(folder, 8)
    text = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(text.replace("key", "yek", 1))
    with pytest.raises(InputError, match="the data changed since"):
        train(tiny(folder), run, resume=True, quiet=True)
    (folder / "text.txt").write_text(text)
    train(tiny(folder), run, resume=True, quiet=True)


def test_user_code_that_changed_is_refused_and_the_runs_own_copy_goes_on(folder):
    from keyhole.core.config import Recipe

    (folder / "mine.py").write_text(NAN_PART.replace("> 5", "> 500"))
    run = stop_after(folder, 8, model_feed="mine.py:Mine")
    (folder / "mine.py").write_text(NAN_PART)
    with pytest.raises(InputError, match=r"mine.py changed since .*; resume with .*recipe.toml"):
        train(tiny(folder, model_feed="mine.py:Mine"), run, resume=True, quiet=True)
    train(Recipe.load(run / "recipe.toml"), run, resume=True, quiet=True)
    assert open_run(run).step == 12


def test_resuming_what_is_no_run_is_refused_and_makes_nothing(folder):
    with pytest.raises(InputError, match=r"there is no run to resume in .*nowhere; leave --resume out"):
        train(tiny(folder), folder / "nowhere", resume=True, quiet=True)
    assert not (folder / "nowhere").exists()
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="there is no run to resume"):
        train(tiny(folder), folder / "mine", resume=True, quiet=True)
    assert contents(folder / "mine") == {create.Path("thesis.txt"): b"years of work"}


def test_a_new_run_in_a_folder_with_anything_in_it_is_refused_and_nothing_changes(folder):
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"mine is not empty; give --out another folder"):
        train(tiny(folder), folder / "mine", quiet=True)
    assert contents(folder / "mine") == {create.Path("thesis.txt"): b"years of work"}
    with pytest.raises(InputError, match=r"thesis.txt is a file; give --out a new folder"):
        train(tiny(folder), folder / "mine/thesis.txt", quiet=True)
    run = stop_after(folder, 8)
    before = contents(run)
    with pytest.raises(InputError, match=r"run is not empty; add --resume to go on with it"):
        train(tiny(folder), run, quiet=True)
    assert contents(run) == before


BAD = {
    "text shorter than a block": ({"data_block": 5000}, "too short"),
    "missing file": ({"data_source": "nowhere.txt"}, "nowhere.txt"),
    "unknown optimizer": ({"train_optimizer": "adamm"}, "did you mean 'adam"),
    "unknown schedule": ({"train_schedule": "cosin"}, "did you mean 'cosine'"),
    "unknown option": ({"train_optimizer": {"name": "sgd", "momentun": 0.9}}, "did you mean 'momentum'"),
    "unknown part": ({"model_mixer": "softmaxx"}, "did you mean 'softmax'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_cannot_begin_leaves_no_folder(folder, name):
    changes, says = BAD[name]
    with pytest.raises(InputError, match=says):
        train(tiny(folder, **changes), folder / "run", quiet=True)
    assert not (folder / "run").exists()
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match=says):
        train(tiny(folder, **changes), folder / "empty", quiet=True)
    assert list((folder / "empty").iterdir()) == []


def test_a_start_that_was_cut_off_can_be_started_again(folder, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(create, "write_json", lambda *_: (x for x in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(folder), folder / "run", quiet=True)
    assert (folder / "run/tokenizer.json").is_file()
    with pytest.raises(InputError, match="there is no run to resume"):
        train(tiny(folder), folder / "run", resume=True, quiet=True)
    train(tiny(folder), folder / "run", quiet=True)
    assert differences(whole, end(folder / "run")) == []
    assert not (folder / "run" / create.STARTING).exists()


def test_a_change_of_versions_or_threads_is_told_on_resume(folder):
    run = stop_after(folder, 8)
    known = json.loads((run / "environment.json").read_text())
    known["versions"]["torch"], known["machine"]["threads"] = "1.0", 64
    (run / "environment.json").write_text(json.dumps(known))
    notes = Notes()
    train(tiny(folder), run, resume=True, display=notes)
    assert any("torch was 1.0 and is" in text and "not bit for bit" in text for text in notes.warnings)
    assert any("threads was 64 and is 1 now" in text for text in notes.warnings)


def test_a_model_that_does_not_fit_its_checkpoint_is_refused(folder):
    run = stop_after(folder, 8)
    other = train(tiny(folder, model_width=32, train_steps=3), folder / "other", quiet=True)
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    shutil.copytree(other.checkpoint.path, run / "checkpoints/step-00000006")
    with pytest.raises(StorageError, match=r"step-00000006 does not fit the recipe: .* has shape \(.*32\) instead of"):
        train(tiny(folder), run, resume=True, quiet=True)
