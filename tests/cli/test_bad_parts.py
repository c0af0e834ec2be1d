from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import Ask

PARTS = """\
import torch
from torch import nn

class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("boom")

class Narrow(nn.Module):
    def forward(self, x):
        return x[..., :-1]

class Nothing(nn.Module):
    def forward(self, x):
        return None

class NotANumber(nn.Module):
    def forward(self, x):
        return x * float("nan")

class Needs(nn.Module):
    def __init__(self, sharpness):
        super().__init__()

class Later(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += self.training
        return x / (self.calls < 3)

function = len
"""


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("Raises", ["mixer my.py:Raises raised ValueError: boom"]),
        ("Narrow", ["mixer my.py:Narrow returned shape", "must return"]),
        ("Nothing", ["mixer my.py:Nothing returned NoneType"]),
        ("NotANumber", ["mixer my.py:NotANumber returned NaN"]),
        ("Needs", ["my.py:Needs", "sharpness"]),
        ("Missing", ["my.py has no 'Missing'"]),
        ("function", ["not a torch.nn.Module class"]),
    ],
)
def test_a_users_faulty_part_is_named_before_anything_is_written(ask: Ask, home: Path, part: str, words: list[str]) -> None:
    (home / "my.py").write_text(PARTS)
    answer = ask("train", "tiny.toml", "--quiet", "--set", f"model.mixer=my.py:{part}")
    assert answer.code == 2
    for word in words:
        assert word in answer.complaint
    assert not (home / "runs" / "tiny" / "recipe.toml").exists()


def test_a_users_file_that_cannot_be_loaded_is_named(ask: Ask, home: Path) -> None:
    (home / "my.py").write_text("def broken(:\n")
    answer = ask("train", "tiny.toml", "--quiet", "--set", "model.mixer=my.py:Mine")
    assert answer.code == 2
    assert "my.py could not be loaded: SyntaxError" in answer.complaint


def test_nan_in_the_middle_stops_the_run_with_a_finding(ask: Ask, home: Path) -> None:
    (home / "my.py").write_text(PARTS)
    answer = ask("train", "tiny.toml", "--quiet", "--json", "--set", "model.feed=my.py:Later")
    assert answer.code == 1
    assert "loss and gradient are finite at step 3" in answer.complaint
    assert answer.json["exit_code"] == 1
    assert answer.json["finding"]["verdict"] == "fails"
    (finding,) = json.loads((home / "runs" / "tiny" / "findings.json").read_text())
    assert finding == answer.json["finding"]
