from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import Ask

from keyhole.cli.main import _known

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(ask: Ask, home: Path) -> None:
    command = [sys.executable, "-m", "keyhole", "train", "tiny.toml", "--quiet", "--set", "train.steps=1000000"]
    process = subprocess.Popen(command, cwd=home, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = home / "runs" / "tiny" / "metrics.jsonl"
    for _ in range(600):
        if metrics.is_file() and metrics.stat().st_size:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(said.splitlines()) == 1
    assert "everything is saved" in said
    assert "keyhole train runs/tiny/recipe.toml --resume" in said
    assert ask("runs", "--json").json["runs"][0]["state"] == "unfinished"


def test_ctrl_c_while_sampling_exits_130(ask: Ask, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> object:
        yield 1
        raise KeyboardInterrupt

    monkeypatch.setattr("keyhole.use.sample.generate", interrupted)
    answer = ask("sample", trained, "--prompt", "the ")
    assert answer.code == 130
    assert answer.complaint == "interrupted"
    assert answer.out.endswith("\n")


@pytest.mark.parametrize(
    "text", ["[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "CUDA out of memory."]
)
def test_too_little_memory_is_a_sentence(text: str) -> None:
    assert "train.accumulate" in (_known(RuntimeError(text)) or "")
    assert _known(RuntimeError("something else")) is None


def torchrun(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "keyhole"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=home,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=45)
    except subprocess.TimeoutExpired:
        # Asked to end, torchrun ends its workers first; killed, it would leave them behind.
        process.terminate()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
def test_two_processes_print_one_result(home: Path) -> None:
    done = torchrun(home, "train", "tiny.toml", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["none.toml"], "there is no recipe none.toml"), (["tiny.toml", "--set", "train.batch=3"], "multiple of 2")],
)
def test_two_processes_complain_once(home: Path, arguments: list[str], words: str) -> None:
    done = torchrun(home, "train", "--quiet", *arguments)
    said = [line for line in done.stderr.splitlines() if line.startswith("keyhole:")]
    assert done.returncode != 0
    assert len(said) == 1, done.stderr
    assert words in said[0]
    assert done.stdout == ""
    assert not (home / "runs" / "tiny" / "recipe.toml").exists()
