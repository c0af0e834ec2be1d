import json
import shutil

import pytest

import keyhole as kh
from keyhole.core.errors import InputError, StorageError
from keyhole.training.loop import train


def test_runs_are_compared_by_what_differs_alone(folder, recipe):
    one = train(recipe(), folder / "one", quiet=True)
    other = train(recipe(train_rate=0.01, model_mixer={"name": "softmax", "qk_norm": True}), folder / "other", quiet=True)
    found = kh.compare_runs([one, folder / "other"])
    assert found["recipe"] == {
        "model.mixer": ["softmax", {"name": "softmax", "qk_norm": True}],
        "train.rate": [1e-3, 0.01],
    }
    assert found["environment"] == {}
    assert [row["run"] for row in found["runs"]] == [str(one.path), str(other.path)]
    assert [row["dev_loss"] for row in found["runs"]] == [run.metrics[-1]["dev_loss"] for run in (one, other)]
    assert found["runs"][0]["parameters"] == sum(p.numel() for p in one.model.parameters())
    assert found["remarks"] == []


def test_what_makes_losses_incomparable_is_remarked(folder, recipe):
    one = train(recipe(), folder / "one", quiet=True)
    shutil.copytree(one.path, folder / "other")
    known = json.loads((folder / "other/environment.json").read_text())
    known["data"]["hash"] = "another"
    known["versions"]["torch"] = "2.0"
    known["command"] = ["something"]
    (folder / "other/environment.json").write_text(json.dumps(known))
    (folder / "other/findings.json").write_text('[{"name": "suffix", "verdict": "fails"}]')
    shutil.rmtree(folder / "other/checkpoints")
    found = kh.compare_runs([folder / "one", folder / "other"])
    assert found["recipe"] == {}
    assert list(found["environment"]) == ["versions.torch", "data.hash"]
    data, honest, state = found["remarks"]
    assert data.startswith("the data differ")
    assert "other fails an audit" in honest
    assert "other is not done: no checkpoint" in state


def test_what_cannot_be_compared_is_named(folder, recipe):
    run = train(recipe(), folder / "run", quiet=True)
    with pytest.raises(InputError, match="two runs or more, not 1"):
        kh.compare_runs(str(run.path))
    with pytest.raises(InputError, match=r"nowhere is not there"):
        kh.compare_runs([run, folder / "nowhere"])
    with pytest.raises(InputError, match=r"is not a run: it has no recipe.toml"):
        kh.compare_runs([run, folder])
    (run.path / "environment.json").write_text("[]")
    with pytest.raises(StorageError, match="holds no JSON object"):
        kh.compare_runs([run, run])
