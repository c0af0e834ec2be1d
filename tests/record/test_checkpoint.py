import json
import os
import stat

import pytest
import torch

from keyhole.core.errors import StorageError
from keyhole.record import checkpoint

STATE = {"tokens": 7, "seconds": 0.1 + 0.2, "done": False}


def save(folder, step, seed=0, **state):
    draw = torch.Generator().manual_seed(seed)
    flat = torch.randn(12, generator=draw)
    weights = {"one": flat[:8].view(2, 4), "two": flat[8:]}  # views into one buffer, as a run's are
    optimizer = {"0.0.step": torch.tensor(3.0), "0.0.exp_avg": torch.full((12,), 1e-40), "chance.0": torch.get_rng_state()}
    return checkpoint.save(folder, weights, optimizer, {**STATE, "step": step, **state}), weights, optimizer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    path, weights, optimizer = save(tmp_path, 5)
    found, faults = checkpoint.latest(tmp_path)
    assert found.path == path
    assert faults == []
    assert found.step == 5
    for saved, kept in ((found.weights(), weights), (found.optimizer(), optimizer)):
        assert saved.keys() == kept.keys()
        for name, tensor in kept.items():
            assert saved[name].dtype == tensor.dtype
            assert torch.equal(saved[name], tensor)
    assert {key: found.state[key] for key in STATE} == STATE  # floats too


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    path, _, _ = save(tmp_path, 5)
    assert names(path) == ["optimizer.safetensors", "state.json", "weights.safetensors"]
    json.loads((path / "state.json").read_text())


def test_the_last_few_are_kept_and_the_newest_is_found_by_number(tmp_path):
    for step in (1, 9, 10, 100):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert len(names(tmp_path)) == checkpoint.KEEP
    assert checkpoint.latest(tmp_path)[0].step == 100


def test_others_may_read_a_checkpoint_whatever_the_mask(tmp_path):
    before = os.umask(0o077)
    try:
        path, _, _ = save(tmp_path, 5)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o644}


def test_the_same_step_again_leaves_a_whole_one_as_it_is(tmp_path):
    path, _, _ = save(tmp_path, 5)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    again, _, _ = save(tmp_path, 5)
    assert again == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert names(tmp_path) == ["step-00000005"]


def test_the_same_step_again_takes_the_place_of_a_torn_one(tmp_path):
    path, weights, _ = save(tmp_path, 5)
    os.truncate(path / "weights.safetensors", 9)
    save(tmp_path, 5)
    found, faults = checkpoint.latest(tmp_path)
    assert faults == []
    assert torch.equal(found.weights()["one"], weights["one"])
    assert names(tmp_path) == ["step-00000005"]


def test_what_an_interrupted_save_left_is_swept_up_and_never_found(tmp_path):
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc/weights.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == (None, [])
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_an_error_while_saving_leaves_no_trace(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def broken(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 6)
    assert names(tmp_path) == ["step-00000005"]


def test_faults_are_told_newest_first_and_the_first_whole_one_is_taken(tmp_path):
    paths = [save(tmp_path, step)[0] for step in (1, 2)]
    os.truncate(paths[1] / "state.json", 5)
    found, faults = checkpoint.latest(tmp_path)
    assert found.step == 1
    assert len(faults) == 1
    assert "step-00000002" in faults[0]
    (paths[0] / "state.json").write_text('{"format": 99, "files": {}}')
    found, faults = checkpoint.latest(tmp_path)
    assert found is None
    assert ["step-00000002" in faults[0], "step-00000001" in faults[1]] == [True, True]
    assert "is not a checkpoint of this version" in faults[1]


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    path, _, _ = save(tmp_path, 5)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": checkpoint.FORMAT + 1}))
    with pytest.raises(StorageError, match="is not a checkpoint of this version"):
        checkpoint.load(path)


def test_a_file_that_went_away_after_the_check_is_told_in_a_sentence(tmp_path):
    path, _, _ = save(tmp_path, 5)
    found, _ = checkpoint.latest(tmp_path)
    (path / "weights.safetensors").unlink()
    with pytest.raises(StorageError, match=r"weights.safetensors cannot be read"):
        found.weights()


def test_later_ones_are_set_aside_and_earlier_ones_left(tmp_path):
    for step in (3, 6):
        save(tmp_path, step)
    moved = checkpoint.set_aside(tmp_path, after=3)
    assert [path.name for path in moved] == ["damaged-step-00000006"]
    assert names(tmp_path) == ["damaged-step-00000006", "step-00000003"]
    save(tmp_path, 6)
    checkpoint.set_aside(tmp_path, after=3)  # one of that name is there already
    assert names(tmp_path) == ["damaged-step-00000006", "step-00000003"]
    assert checkpoint.latest(tmp_path)[0].step == 3


def test_a_folder_that_is_not_there_has_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") == (None, [])
    assert checkpoint.set_aside(tmp_path / "nowhere", after=0) == []
