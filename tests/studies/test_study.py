"""Whole studies, tiny ones: what is found, what is kept, how they end and go on."""

import json
import os
import signal
import subprocess
import sys

import pytest

from keyhole.core.errors import InputError
from keyhole.record.create import only_writer
from keyhole.record.run import open_run
from keyhole.studies.result import open_study
from keyhole.studies.study import study
from tests.studies.study_helpers import outcome, write_study


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    source = write_study(folder / "source")
    return source, study(source, folder / "out", quiet=True)


def test_every_arm_is_audited_trained_and_measured_with_every_seed(finished):
    _, result = finished
    assert result.complete
    assert [arm.name for arm in result.arms] == ["baseline", "rope", "reweight"]
    for arm in result.arms:
        assert any(finding.name == "suffix" for finding in arm.findings)
        assert [trial.seed for trial in arm.trials] == [0, 1]
        for trial in arm.trials:
            values = trial.values
            assert values["dev_loss"] > 0
            assert values["steps"] == 12
            assert values["parameters"] == arm.parameters
            assert len(values["positions"]) == 8
            assert values["texts"]["short"]["tokens"] == 11
            run = open_run(trial.path)
            assert (run.recipe.train.seed, run.recipe.data.seed) == (trial.seed, trial.seed)


def test_the_arm_that_reads_the_future_is_not_comparable_whatever_its_loss(finished):
    _, result = finished
    assert result.arm("baseline").honest
    assert result.arm("rope").honest
    assert not result.arm("reweight").honest
    assert result.verdicts["reweight"] == "not comparable"
    assert result.verdicts["rope"] != "not comparable"


def test_arms_of_a_seed_read_and_are_measured_on_the_same(finished):
    _, result = finished
    assert result.paired.verdict == "holds"
    seeds = {trial.seed: trial.values["hashes"] for trial in result.arm("rope").trials}
    assert seeds[0]["order"] != seeds[1]["order"]


def test_arms_that_read_other_data_are_found_out(finished, tmp_path):
    _, result = finished
    place = result.arm("rope").trials[1].path / "result.json"
    kept = place.read_text()
    changed = json.loads(kept)
    changed["hashes"]["order"] = "another"
    try:
        place.write_text(json.dumps(changed))
        found = open_study(result.path)
        paired, rope = found.paired, found.differences["rope"]
    finally:
        place.write_text(kept)
    assert paired.verdict == "fails"
    assert "order of rope, seed 1" in paired.measured
    assert rope.verdict == "not comparable"
    assert "not trained and measured on what the baseline was" in rope.sentence


def test_loss_beyond_the_block_is_told_or_why_there_is_none(finished):
    _, result = finished
    rope = result.arm("rope").trials[0].values["past"]["2"]
    assert rope["block"] == 16
    assert rope["loss"] > 0
    assert len(rope["positions"]) == 16
    learned = result.arm("baseline").trials[0].values["past"]["2"]
    assert "weights for each position" in learned["reason"]


def test_a_resumed_study_that_is_done_changes_nothing(finished):
    source, result = finished
    before = {path: path.stat().st_mtime_ns for path in result.path.rglob("result.json")}
    study(source, result.path, resume=True, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in result.path.rglob("result.json")} == before


def test_a_study_repeats_itself_from_its_own_folder(finished, tmp_path):
    _, result = finished
    again = study(result.path / "study.toml", tmp_path / "again", quiet=True)
    assert outcome(again.path) == outcome(result.path)


def test_seeds_can_be_added(finished, tmp_path):
    source, result = finished
    out = tmp_path / "out"
    study(source, out, seeds=1, quiet=True)
    assert set(open_study(out).verdicts.values()) == {"undecided", "not comparable"}
    more = study(source, out, seeds=2, resume=True, quiet=True)
    assert outcome(more.path) == outcome(result.path)


def test_rates_are_searched_alike_and_the_best_is_trained(tmp_path):
    arms = {"a": {}, "b": {"model": {"position": "rope"}}}
    path = write_study(tmp_path, arms=arms, rates={"values": [1e-4, 1e-2]}, study={"seeds": 1})
    result = study(path, tmp_path / "out", quiet=True)
    for arm in result.arms:
        assert set(arm.rates) == {1e-4, 1e-2}
        assert arm.rates[1e-2] < arm.rates[1e-4]
        assert arm.rate == 1e-2
        assert open_run(arm.trials[0].path).recipe.train.rate == 1e-2


def test_an_arm_that_diverges_or_raises_is_told_of_and_the_rest_goes_on(tmp_path):
    (tmp_path / "my.py").write_text(
        "from torch import nn\n\n"
        "class Falls(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        if self.calls > 5:\n            raise ValueError('no more')\n"
        "        return x\n"
    )
    arms = {
        "good": {},
        "wild": {"train": {"rate": 1e6, "optimizer": "sgd", "clip": 0.0}},
        "falls": {"model": {"mixer": "my.py:Falls"}},
    }
    result = study(write_study(tmp_path, arms=arms), tmp_path / "out", quiet=True)
    assert {trial.state for trial in result.arm("good").trials} == {"done"}
    assert {trial.state for trial in result.arm("wild").trials} == {"diverged"}
    assert {trial.state for trial in result.arm("falls").trials} == {"failed"}
    assert "no more" in result.arm("falls").trials[0].message
    assert set(result.verdicts.values()) == {"undecided"}
    assert any(note.startswith("falls, seed 0: failed") for note in result.notes)


def test_two_processes_do_not_write_into_one_study(tmp_path):
    path, out = write_study(tmp_path), tmp_path / "out"
    with only_writer(out, "study"), pytest.raises(InputError, match="another process is carrying out a study in"):
        study(path, out, quiet=True)


def test_a_damaged_result_is_made_again_without_training_again(finished, tmp_path):
    source, result = finished
    out = tmp_path / "out"
    study(source, out, quiet=True)
    place = out / "runs" / "rope" / "seed-0"
    (place / "result.json").write_text("{half")
    weights = next(place.rglob("weights.safetensors")).stat().st_mtime_ns
    study(source, out, resume=True, quiet=True)
    assert outcome(out) == outcome(result.path)
    assert next(place.rglob("weights.safetensors")).stat().st_mtime_ns == weights
    assert json.loads((place / "result.json").read_text())["memory_mb"] is None, "it did not train this time"


def start(source, out, *more):
    command = [sys.executable, "-m", "keyhole", "study", str(source), "--out", str(out), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ.copy())


def wait_for(process, words):
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"the study ended before it said {words!r}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_study_that_is_killed_goes_on_and_finds_the_same(finished, tmp_path, number):
    source, result = finished
    out = tmp_path / "out"
    process = start(source, out)
    wait_for(process, "runs/baseline/seed-0")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert "everything is saved" in said
        assert "--resume" in said
    study(source, out, resume=True, quiet=True)
    assert outcome(out) == outcome(result.path)


def test_without_scipy_nothing_is_trained_that_could_not_be_measured(tmp_path, monkeypatch):
    source = write_study(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InputError, match=r"intervals need scipy.*keyhole\[study\]"):
        study(source, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
