import json
import os
import shutil
import subprocess
import sys

import pytest
from training_helpers import ROOT, differences, end, tiny, values, write_text

from keyhole.core.errors import InputError
from keyhole.record import checkpoint
from keyhole.record.run import open_run
from keyhole.training.loop import train
from keyhole.training.parallel import World

# One torchrun starts in seconds, so one start carries out many runs; every test that needs one is slow.
pytestmark = pytest.mark.slow

RUNS = {
    "ddp": values(train_batch=8),
    "ddp, accumulated": values(train_batch=8, train_accumulate=2),
    "ddp, padded rows": values(train_batch=8, data_rows="lines", data_block=48),
    "ddp, padded rows, accumulated": values(train_batch=8, train_accumulate=2, data_rows="lines", data_block=48),
    "ddp, muon": values(train_batch=8, train_optimizer="muon", model_tie=False),
    "fsdp": values(train_batch=8, train_parallel="fsdp"),
    "fsdp, padded rows, accumulated": values(
        train_batch=8, train_accumulate=2, data_rows="lines", data_block=48, train_parallel="fsdp"
    ),
    "fsdp, unit": values(
        train_batch=8, train_parallel="fsdp", train_optimizer="sgd", model_init="unit", model_base_width=4
    ),
    "fsdp, rope, untied, two layers": values(
        train_batch=8, train_parallel="fsdp", model_layers=2, model_tie=False, model_position="rope"
    ),
    "fsdp, sgd, two layers": values(train_batch=8, train_parallel="fsdp", model_layers=2, train_optimizer="sgd"),
    "fsdp, adagrad": values(train_batch=8, train_parallel="fsdp", train_optimizer="adagrad"),
    "fsdp, sign": values(train_batch=8, train_parallel="fsdp", train_optimizer="sign"),
}
LOW = {
    "ddp, bfloat16, accumulated": values(train_batch=8, train_accumulate=2, train_precision="bfloat16"),
    "fsdp, bfloat16": values(train_batch=8, train_precision="bfloat16", train_parallel="fsdp"),
}
RANDOM = {
    "ddp": values(model_dropout=0.1, model_merge="shuffle", train_batch=8, train_precision="bfloat16"),
    "fsdp": values(model_dropout=0.1, model_merge="shuffle", train_batch=8, train_parallel="fsdp", model_layers=2),
}
REFUSED = {
    "muon with fsdp": (
        values(train_batch=8, train_optimizer="muon", train_parallel="fsdp"),
        'muon works on whole matrices and fsdp holds shares of them; set train.parallel = "ddp"',
    ),
    "odd batch": (
        values(train_batch=7),
        "a batch of 7 rows cannot be shared by 2 processes; make train.batch a multiple of 2",
    ),
    "pieces that cannot be shared": (
        values(train_batch=6, train_accumulate=2),
        "a batch of 6 rows cut into 2 pieces cannot be shared by 2 processes; make train.batch a multiple of 4",
    ),
    "a folder that is taken": (values(train_batch=8), "is not empty; add --resume to go on with it"),
}


def torchrun(folder, orders, processes=2):
    """Carry out orders in processes that torchrun starts; returns its exit code and what was said on stderr."""
    (folder / "orders.json").write_text(json.dumps(orders))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/training'}",
        "KEYHOLE_CACHE": str(folder / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "--max-restarts=0",
    ]
    done = subprocess.run(
        [*command, str(ROOT / "tests/training/parallel_driver.py"), str(folder / "orders.json")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stderr


def said(folder, name, rank):
    path = folder / f"{name}.{rank}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder in which two processes have carried out all these runs."""
    folder = tmp_path_factory.mktemp("two")
    write_text(folder)
    every = RUNS | LOW | {f"random {name}": recipe for name, recipe in RANDOM.items()}
    orders = [{"recipe": recipe, "out": str(folder / name)} for name, recipe in every.items()]
    orders += [{"recipe": recipe, "out": str(folder / name)} for name, (recipe, _) in REFUSED.items()]
    (folder / "a folder that is taken").mkdir()
    (folder / "a folder that is taken/recipe.toml").write_text("")
    code, text = torchrun(folder, orders)
    assert code == 0, text
    return folder


def losses(run):
    return [(row["loss"], row["grad_norm"], row["tokens"], row.get("dev_loss", 0)) for row in run.metrics]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_have_the_losses_of_one(two, tmp_path, name):
    assert said(two, name, 0) == said(two, name, 1) == {"error": None, "kind": None}
    write_text(tmp_path)
    one = train(tiny(tmp_path, **flat(RUNS[name])), tmp_path / "one", quiet=True)
    both = open_run(two / name)
    assert len(losses(one)) == len(losses(both)) == 12
    for ours, theirs in zip(losses(one), losses(both), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert both.environment["processes"] == 2


@pytest.mark.parametrize("name", LOW)
def test_in_bfloat16_two_processes_have_about_the_losses_of_one(two, tmp_path, name):
    write_text(tmp_path)
    one = train(tiny(tmp_path, **flat(LOW[name])), tmp_path / "one", quiet=True)
    for ours, theirs in zip(one.metrics, open_run(two / name).metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.01)


def flat(nested):
    """A recipe's nested values as `tiny` takes them."""
    return {f"{section}_{key}": value for section, keys in nested.items() for key, value in keys.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_processes_cannot_do_is_refused_in_one_sentence(two, name):
    first, second = said(two, name, 0), said(two, name, 1)
    assert first["kind"] == "InputError"
    assert REFUSED[name][1] in first["error"]
    assert second == {"error": "2", "kind": "SystemExit"}  # in silence
    assert name == "a folder that is taken" or not (two / name).exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_killed_inside_a_save_resume_exactly(two, tmp_path, parallel):
    write_text(tmp_path)
    order = {"recipe": RANDOM[parallel], "out": str(tmp_path / "run")}
    kill = {"rank": 0, "where": "half of optimizer.safetensors", "save": 3}
    code, _ = torchrun(tmp_path, [{**order, "plant": kill}])
    assert code != 0
    saved, _ = checkpoint.latest(tmp_path / "run/checkpoints")
    assert saved.step == 6
    code, text = torchrun(tmp_path, [{**order, "resume": True}])
    assert code == 0, text
    assert differences(end(two / f"random {parallel}"), end(tmp_path / "run")) == []


def test_a_process_that_loses_the_other_says_so_and_the_run_resumes_exactly(two, tmp_path):
    write_text(tmp_path)
    order = {"recipe": RANDOM["ddp"], "out": str(tmp_path / "run")}
    code, text = torchrun(tmp_path, [{**order, "plant": {"rank": 1, "step": 8}}])
    assert code != 0
    first = said(tmp_path, "run", 0)
    # torchrun ends the other process as well; it may come first.
    assert first is None or (first["kind"] == "Parted" and "go on with: torchrun --nproc-per-node 2" in first["error"]), (
        text
    )
    code, text = torchrun(tmp_path, [{**order, "resume": True}])
    assert code == 0, text
    assert differences(end(two / "random ddp"), end(tmp_path / "run")) == []


def test_another_number_of_processes_goes_on_with_ddp_and_says_what_that_costs(two, tmp_path):
    shutil.copytree(two / "random ddp", tmp_path / "run")
    write_text(tmp_path)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints/step-00000012")
    notes = []

    class Notes:
        def note(self, text):
            notes.append(text)

        def update(self, row, progress):
            pass

        def close(self):
            pass

    train(run_recipe(run), run, resume=True, display=Notes())
    assert any("trained by 2 process(es) and goes on with 1" in text for text in notes)
    for ours, theirs in zip(open_run(run).metrics, open_run(two / "random ddp").metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.1)


def test_shares_of_an_optimizer_are_refused_where_they_do_not_fit(two, tmp_path):
    shutil.copytree(two / "fsdp", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    with pytest.raises(InputError, match="go on with as many processes as the run began with"):
        train(run_recipe(tmp_path / "run"), tmp_path / "run", resume=True, quiet=True)


def run_recipe(run):
    return open_run(run).recipe


def test_shares_of_a_batch_are_disjoint_and_whole():
    rows = list(range(12))
    assert [row for rank in range(3) for row in rows[World(rank, 3).share(12)]] == rows
    with pytest.raises(InputError, match="13 rows cannot be shared by 3 processes"):
        World(0, 3).share(13)
