import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from training_driver import ENDED, PLACES
from training_helpers import ROOT, differences, end, kill_often, log_of, tiny, values

from keyhole.record import checkpoint
from keyhole.training import loop, snapshot
from keyhole.training.display import Quiet
from keyhole.training.loop import train

RECIPES = {
    "adamw, float32, dropout, packed text": values(model_dropout=0.1, train_optimizer="adamw", train_save_every=1),
    "muon, bfloat16, shuffle and dropout, lines": values(
        data_rows="lines", data_tokenizer="words", model_dropout=0.1, model_merge="shuffle", model_heads=4,
        train_optimizer="muon", train_precision="bfloat16", train_save_every=2,
    ),
    "sgd, float32, accumulated, sentences": values(
        data_rows="sentences", data_block=16, model_dropout=0.1, train_accumulate=2, train_optimizer="sgd",
    ),
    "adam, bfloat16, untied, rope": values(
        model_tie=False, model_position="rope", model_dropout=0.1, train_optimizer="adam", train_precision="bfloat16",
        train_accumulate=2,
    ),
    "adagrad, float32, a budget of tokens": values(train_tokens=400, model_dropout=0.1, train_optimizer="adagrad"),
    "sign, bfloat16, bpe, many epochs": values(
        data_tokenizer={"name": "bpe", "size": 300}, data_block=32, data_split=0.8, model_merge="shuffle",
        train_steps=40, train_batch=8, train_optimizer="sign", train_precision="bfloat16",
    ),
}  # fmt: skip


class Crash(Exception):
    pass


class CrashAt(Quiet):
    """Ends a run without warning, once the row of a step is written."""

    def __init__(self, step):
        self.step = step

    def update(self, row, _):
        if row["step"] == self.step:
            raise Crash


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(trainer, undisturbed, folder, name):
    recipe = RECIPES[name]
    whole, began = undisturbed(recipe), time.monotonic()
    assert trainer.run(recipe, folder / "timed") == 0
    seconds = time.monotonic() - began
    hit = kill_often(trainer, recipe, folder / "killed", kills=6, seconds=seconds, draw=random.Random(name))
    assert differences(whole, end(folder / "killed")) == [], dict(hit)


@pytest.mark.parametrize("save", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_inside_a_save_ends_as_if_it_had_not_been(trainer, undisturbed, folder, place, save):
    if place == "half of the pruning":
        save += 2  # nothing is pruned before the third save
    recipe = RECIPES["muon, bfloat16, shuffle and dropout, lines"]
    out = folder / "killed"
    assert trainer.run(recipe, out, plant={"where": place, "save": save}) == ENDED, log_of(out).read_text()
    assert trainer.run(recipe, out, resume=True) == 0, log_of(out).read_text()
    assert differences(undisturbed(recipe), end(out)) == []
    assert not list((out / "checkpoints").glob(".writing-*"))


def test_a_run_whose_saves_are_killed_again_and_again_ends_as_if_they_had_not_been(trainer, undisturbed, folder):
    recipe = RECIPES["adamw, float32, dropout, packed text"]
    out, draw, deaths = folder / "killed", random.Random(4), 0
    while (code := trainer.run(
        recipe, out, resume=out.exists(), plant={"where": draw.choice(PLACES[:-2]), "save": draw.randint(1, 4)}
    )) == ENDED:  # fmt: skip
        deaths += 1
        assert deaths < 60
    assert code == 0
    assert deaths >= 3
    assert differences(undisturbed(recipe), end(out)) == []


@pytest.mark.slow
def test_the_command_line_goes_on_to_the_same_weights_after_a_kill(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    recipe = tiny(folder, train_steps=300, model_dropout=0.1)
    (folder / "tiny.toml").write_text(recipe.to_toml())

    def keyhole(*arguments):
        command = [sys.executable, "-m", "keyhole", "train", *arguments, "--quiet"]
        return subprocess.Popen(command, cwd=folder, env=environment)

    running = keyhole("tiny.toml", "--out", "killed")
    metrics = folder / "killed/metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 20):
        assert running.poll() is None
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    assert keyhole("killed/recipe.toml", "--resume").wait() == 0
    assert keyhole("tiny.toml", "--out", "whole").wait() == 0
    assert differences(end(folder / "whole"), end(folder / "killed")) == []


FORGETFUL = {
    "train_log_every": 5,
    "train_optimizer": "adamw",
    "model_dropout": 0.2,
    "train_schedule": "cosine",
}  # rows of five steps: a checkpoint at step 6 falls inside one


def forget_nothing(patch):
    pass


def forget_chance(patch):
    patch.setattr(snapshot.torch, "set_rng_state", lambda _: None)


def forget_tensors(patch, wanted):
    kept = checkpoint.Checkpoint.optimizer
    change = {True: torch.zeros_like, False: lambda tensor: tensor}
    patch.setattr(
        checkpoint.Checkpoint,
        "optimizer",
        lambda self: {name: change[wanted(name)](tensor) for name, tensor in kept(self).items()},
    )


def forget_moments(patch):
    forget_tensors(patch, lambda name: "exp_avg" in name)


def forget_steps_of_the_optimizer(patch):
    forget_tensors(patch, lambda name: name.endswith(".step"))


def forget_weights(patch):
    patch.setattr(snapshot, "load_weights", lambda *_: None)


def forget_place_in_data(patch):
    found = loop.open_dataset

    def from_the_start(*arguments, **options):
        data = found(*arguments, **options)
        batch = data.batch
        data.batch = lambda start, count: batch(start - 6 * 4, count)
        return data

    patch.setattr(loop, "open_dataset", from_the_start)


def forget_schedule(patch):
    found = loop.build_schedule

    class Late:
        def __init__(self, *arguments):
            self.schedule = found(*arguments)

        def factor(self, step, progress):
            return self.schedule.factor(step - 6, progress - 0.5)

    patch.setattr(loop, "build_schedule", Late)


def forget_state(patch, key, value):
    found = checkpoint.load
    patch.setattr(checkpoint, "load", lambda path: checkpoint.Checkpoint(path, {**found(path).state, key: value}))


def forget_window(patch):
    forget_state(patch, "window", [0.0, 0])


def forget_where_metrics_ended(patch):
    forget_state(patch, "metrics_offset", 0)


def forget_tokens(patch):
    forget_state(patch, "tokens", 0)


def forget_watch(patch):
    forget_state(patch, "watch", {"first": None, "above": 0})


CONTROLS = {
    forget_chance: "weights",
    forget_moments: "weights",
    forget_steps_of_the_optimizer: "weights",
    forget_weights: "weights",
    forget_place_in_data: "weights",
    forget_schedule: "weights",
    forget_window: "rows",
    forget_where_metrics_ended: "rows",
    forget_tokens: "rows",
    forget_watch: "state",
}


@pytest.mark.parametrize("forget", [forget_nothing, *CONTROLS], ids=lambda forget: forget.__name__)
def test_forgetting_any_piece_of_the_state_is_seen_by_the_comparison(folder, forget):
    recipe = tiny(folder, **FORGETFUL)
    train(recipe, folder / "whole", quiet=True)
    with pytest.raises(Crash):
        train(recipe, folder / "cut", display=CrashAt(8))
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        train(recipe, folder / "cut", resume=True, quiet=True)
    found = differences(end(folder / "whole"), end(folder / "cut"))
    if forget is forget_nothing:
        assert found == []
    else:
        assert any(name.startswith(CONTROLS[forget]) for name in found)


@pytest.mark.parametrize("crash", range(1, 13))
def test_a_crash_at_any_step_changes_nothing(folder, crash):
    recipe = tiny(folder, **FORGETFUL, train_save_every=2, train_eval_every=1)
    train(recipe, folder / "whole", quiet=True)
    with pytest.raises(Crash):
        train(recipe, folder / "cut", display=CrashAt(crash))
    train(recipe, folder / "cut", resume=True, quiet=True)
    assert differences(end(folder / "whole"), end(folder / "cut")) == []


def test_measuring_and_saving_more_often_does_not_change_the_weights(folder):
    often = train(tiny(folder, **FORGETFUL, train_save_every=1, train_eval_every=1), folder / "often", quiet=True)
    seldom = train(tiny(folder, **FORGETFUL, train_save_every=12, train_eval_every=12), folder / "seldom", quiet=True)
    assert differences({**end(often.path), "state": 0, "rows": 0}, {**end(seldom.path), "state": 0, "rows": 0}) == []


def test_a_part_of_the_users_with_a_memory_of_its_own_resumes_exactly_in_bfloat16(folder):
    (folder / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.register_buffer('mean', torch.zeros(width))\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            with torch.no_grad():\n"
        "                self.mean.lerp_(x.float().mean((0, 1)), 0.1)\n"
        "        return x - self.mean.to(x.dtype)\n"
    )
    recipe = tiny(folder, model_norm="mine.py:Mine", train_precision="bfloat16", train_log_every=1)
    run = train(recipe, folder / "whole", quiet=True)
    assert any(name.endswith("mean") and tensor.abs().sum() > 0 for name, tensor in end(run.path)["weights"].items())
    with pytest.raises(Crash):
        train(recipe, folder / "cut", display=CrashAt(8))
    train(recipe, folder / "cut", resume=True, quiet=True)
    assert differences(end(folder / "whole"), end(folder / "cut")) == []


def test_a_finished_run_resumed_is_left_as_it_is(folder):
    recipe = tiny(folder)
    train(recipe, folder / "run", quiet=True)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "run").rglob("*") if path.is_file()}
    run = train(recipe, folder / "run", resume=True, quiet=True)
    assert run.step == 12
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "run").rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after[path] and path.name != ".lock"} == set()
    assert after.keys() == before.keys()


def test_a_budget_of_seconds_counts_what_was_spent_before_the_kill(folder):
    recipe = tiny(folder, train_seconds=0.3, train_save_every=5)
    with pytest.raises(Crash):
        train(recipe, folder / "run", display=CrashAt(20))
    saved, _ = checkpoint.latest(folder / "run/checkpoints")
    run = train(recipe, folder / "run", resume=True, quiet=True)
    assert run.checkpoint.state["seconds"] >= 0.3
    assert run.checkpoint.state["seconds"] - run.metrics[0]["seconds"] < 0.3 + 0.2
    assert run.metrics[-1]["seconds"] > saved.state["seconds"]
