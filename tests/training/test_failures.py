import errno
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from failure_helpers import NAN_PART, Notes, contents, stop_after
from safetensors import SafetensorError
from training_helpers import ROOT, differences, end, log_of, tiny, values

from keyhole.core.errors import InputError, RunStopped, StorageError
from keyhole.record import checkpoint, create
from keyhole.record.index import list_runs
from keyhole.record.run import open_run
from keyhole.training.health import MARGIN, PATIENCE, Watch
from keyhole.training.loop import train


def break_save(patch, save, error):
    """Let the `save`-th call that writes tensors (two a checkpoint) fail halfway."""
    kept, calls = checkpoint.save_file, []

    def failing(tensors, file):
        calls.append(file)
        kept(tensors, file)
        if len(calls) == save:
            os.truncate(file, 10)
            raise error

    patch.setattr(checkpoint, "save_file", failing)


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("error", "says"),
    [(FULL, "No space left on device"), (OSError(errno.EACCES, "Permission denied"), "Permission denied")],
    ids=["disk full", "not writable"],
)
def test_a_save_that_fails_leaves_the_last_good_checkpoint_to_go_on_from(folder, whole, error, says):
    with pytest.MonkeyPatch.context() as patch:
        break_save(patch, 6, error)
        with pytest.raises(StorageError, match=rf"saving the checkpoint .*step-00000009 failed: .*{says}.*untouched"):
            train(tiny(folder), folder / "run", quiet=True)
    left = sorted(path.name for path in (folder / "run/checkpoints").iterdir())
    assert left == ["step-00000003", "step-00000006"]
    train(tiny(folder), folder / "run", resume=True, quiet=True)
    assert differences(whole, end(folder / "run")) == []


def test_a_disk_that_takes_no_larger_file_is_told_in_a_sentence(folder):
    """The system's own refusal, not ours: a process that may write files of at most 20 kB."""
    (folder / "tiny.toml").write_text(tiny(folder, model_width=64, train_steps=3).to_toml())
    code = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from keyhole.core.config import Recipe; from keyhole.core.errors import StorageError\n"
        "from keyhole.training.loop import train\n"
        "try: train(Recipe.load('tiny.toml'), 'run', quiet=True)\n"
        "except StorageError as error: sys.exit(str(error))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "saving the checkpoint run/checkpoints/step-00000003 failed" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((folder / "run/checkpoints").iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20000


def test_a_folder_that_cannot_be_made_is_told_in_a_sentence(folder, monkeypatch):
    def refuse(self, *arguments, **options):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(create.Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"opening the run directory .*run failed: Permission denied"):
        train(tiny(folder), folder / "run", quiet=True)


def test_metrics_that_cannot_be_written_stop_the_run_in_a_sentence(folder, monkeypatch):
    from keyhole.record import metrics

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    made = metrics.MetricsWriter.__init__

    def broken(self, *arguments):
        made(self, *arguments)
        self._file = Full(self._file)

    monkeypatch.setattr(metrics.MetricsWriter, "__init__", broken)
    with pytest.raises(StorageError, match=r"writing .*metrics.jsonl failed: No space left on device"):
        train(tiny(folder), folder / "run", quiet=True)


def tear(path):
    os.truncate(path, path.stat().st_size // 2)


def tamper(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


HARM = {
    "torn weights": lambda folder: tear(folder / "weights.safetensors"),
    "tampered weights": lambda folder: tamper(folder / "weights.safetensors"),
    "tampered optimizer": lambda folder: tamper(folder / "optimizer.safetensors"),
    "missing optimizer": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "torn state": lambda folder: tear(folder / "state.json"),
    "missing state": lambda folder: (folder / "state.json").unlink(),
    "empty state": lambda folder: (folder / "state.json").write_text("{}"),
    "state that is no object": lambda folder: (folder / "state.json").write_text("[1]"),
    "binary state": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_newest_checkpoint_gives_way_loudly_to_the_one_before(folder, whole, harm):
    run = stop_after(folder, 8)
    HARM[harm](run / "checkpoints/step-00000006")
    notes = Notes()
    train(tiny(folder), run, resume=True, display=notes)
    assert any("step-00000006" in text for text in notes.warnings)
    assert "warning: going on from the older step-00000003" in notes.warnings
    assert differences(whole, end(run)) == []


def test_a_run_that_goes_on_from_an_older_checkpoint_is_no_longer_damaged(folder):
    run = stop_after(folder, 8)
    tamper(run / "checkpoints/step-00000006/weights.safetensors")
    assert [row["state"] for row in list_runs(folder)] == ["newest checkpoint damaged"]
    with pytest.raises(StorageError, match=r"step-00000006/weights.safetensors is missing, cut short or changed"):
        _ = open_run(run).checkpoint

    class Cut(Notes):
        def update(self, *_):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(folder), run, resume=True, display=Cut())
    assert open_run(run).checkpoint.step == 3
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["damaged-step-00000006", "step-00000003"]


def test_when_every_checkpoint_is_damaged_the_run_is_refused_and_left_as_it_is(folder):
    run = stop_after(folder, 8)
    for path in (run / "checkpoints").iterdir():
        tamper(path / "weights.safetensors")
    before = contents(run)
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole .*start a new run with another --out"):
        train(tiny(folder), run, resume=True, quiet=True)
    assert contents(run) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again_and_says_so(folder, whole):
    run = stop_after(folder, 2)
    notes = Notes()
    train(tiny(folder), run, resume=True, display=notes)
    assert any("no checkpoint yet" in text for text in notes.said)
    assert differences(whole, end(run)) == []


def test_metrics_that_were_cut_short_are_told_of_and_never_padded(folder):
    run = stop_after(folder, 8)
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(file.read().index(b"\n", 300) + 7)
    notes = Notes()
    train(tiny(folder), run, resume=True, display=notes)
    assert any("metrics.jsonl has been cut short" in text for text in notes.warnings)
    text = (run / "metrics.jsonl").read_bytes()
    assert b"\0" not in text
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == [*range(1, steps[-7] + 1), *range(7, 13)][-len(steps) :]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loss_that_is_no_number_stops_the_run_before_it_reaches_a_weight(folder, precision):
    (folder / "mine.py").write_text(NAN_PART)
    recipe = tiny(folder, model_layers=1, model_feed="mine.py:Mine", train_save_every=1, train_precision=precision)
    with pytest.raises(RunStopped) as stopped:
        train(recipe, folder / "run", quiet=True)
    assert stopped.value.exit_code == 1
    (finding,) = json.loads((folder / "run/findings.json").read_text())
    assert finding == stopped.value.finding.to_dict()
    assert finding["verdict"] == "fails"
    assert finding["evidence"]["step"] == 6
    run = open_run(folder / "run")
    assert run.step == 5
    assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    assert list_runs(folder)[0]["state"] == "stopped by a finding"


def test_a_rate_far_too_large_stops_the_run_with_a_finding(folder):
    with pytest.raises(RunStopped, match=r"finite|diverge"):
        train(tiny(folder, train_rate=1e30, train_optimizer="sgd"), folder / "run", quiet=True)
    assert (folder / "run/findings.json").is_file()


def test_divergence_is_called_after_patience_and_not_before():
    watch = Watch(uniform=4.0)
    assert watch.see(4.2) is None
    for _ in range(PATIENCE - 1):
        assert watch.see(4.2 + MARGIN + 0.01) is None
    assert watch.see(4.2 + MARGIN - 0.01) is None  # back in time: counting begins again
    found = [watch.see(9.0) for _ in range(PATIENCE)]
    assert found[:-1] == [None] * (PATIENCE - 1)
    assert found[-1].verdict == "fails"
    assert "5.200" in found[-1].expected


def test_a_run_that_diverges_ends_with_a_finding(folder):
    recipe = tiny(folder, train_steps=200, train_rate=30.0, train_optimizer="sign", train_warmup=0.0, train_clip=0.0)
    with pytest.raises(RunStopped, match="the loss does not diverge"):
        train(recipe, folder / "run", quiet=True)


def test_a_finding_is_taken_back_when_the_run_goes_on(folder):
    run = stop_after(folder, 8)
    (run / "findings.json").write_text('[{"verdict": "fails"}]')
    train(tiny(folder), run, resume=True, quiet=True)
    assert not (run / "findings.json").exists()
    assert list_runs(folder)[0]["state"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_go_on_and_loses_nothing(trainer, undisturbed, folder, number):
    recipe, out = values(train_steps=400, train_save_every=0, train_eval_every=100), folder / "run"
    assert trainer.run(recipe, out, stop={"number": number, "rows": 20}) == 130
    said = log_of(out).read_text().splitlines()[-1]
    assert said.startswith(f"stopped by {number.name} after step ")
    assert said.endswith(f"Go on with: keyhole train {out}/recipe.toml --resume")
    saved, faults = checkpoint.latest(out / "checkpoints")
    assert not faults
    assert saved.step >= 20
    assert list_runs(folder)[0]["state"] == "unfinished"
    assert trainer.run(recipe, out, resume=True) == 0
    assert differences(undisturbed(recipe), end(out)) == []
