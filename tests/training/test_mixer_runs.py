"""Runs of every mixer: trained, stopped and resumed bit for bit, opened without the user's file, decoded as recomputed."""

import pytest
import torch
from training_helpers import differences, end, tiny

from keyhole.core.errors import InputError
from keyhole.model.decode import generate
from keyhole.model.registry import CATALOGUE
from keyhole.record.run import open_run
from keyhole.training.display import Quiet
from keyhole.training.loop import train

PHI = "import torch\n\ndef phi(x):\n    return torch.cat((x.relu(), (-x).relu()), -1) + .01\n"
OWN = {"name": "linear", "feature": "my.py:phi"}
MIXERS = {**{name: name for name in CATALOGUE["mixer"]}, "a feature map of the user's": OWN, "a stack": [OWN, "ridge"]}


class Stop(Exception):
    pass


class StopAt(Quiet):
    def update(self, row, _):
        if row["step"] == 5:
            raise Stop


def recipe_of(folder, mixer, precision="bfloat16"):
    (folder / "my.py").write_text(PHI)
    layers = len(mixer) if isinstance(mixer, list) else 1
    return tiny(folder, model_mixer=mixer, model_layers=layers, train_precision=precision, train_steps=8)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_run_stopped_and_resumed_ends_with_the_same_bits(mixer, tmp_path):
    recipe = recipe_of(tmp_path, mixer)
    train(recipe, out=tmp_path / "whole", quiet=True)
    with pytest.raises(Stop):
        train(recipe, out=tmp_path / "stopped", display=StopAt())
    train(recipe, out=tmp_path / "stopped", resume=True, quiet=True)
    assert differences(end(tmp_path / "whole"), end(tmp_path / "stopped")) == []


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_an_opened_run_decodes_from_its_state_what_it_recomputes(mixer, tmp_path):
    train(recipe_of(tmp_path, mixer, "float32"), out=tmp_path / "run", quiet=True)
    (tmp_path / "my.py").unlink()  # a run keeps a copy of what it is made of
    run = open_run(tmp_path / "run")
    ids = [int(token) for token in run.tokenizer.encode("the")]
    cached, recomputed = (list(generate(run.model, ids, 5, temperature=0, cached=c)) for c in (True, False))
    assert cached == recomputed
    assert all(bool(torch.isfinite(weight).all()) for weight in run.model.parameters())


def test_a_feature_map_with_negative_values_starts_no_run(tmp_path):
    recipe = recipe_of(tmp_path, OWN)
    (tmp_path / "my.py").write_text("def phi(x):\n    return x\n")
    with pytest.raises(InputError, match=r"linear feature my\.py:phi returned negative values"):
        train(recipe, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
