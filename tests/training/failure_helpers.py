"""Runs that are cut off, and what a display was told."""

import pytest
from training_helpers import tiny

from keyhole.training.display import Quiet
from keyhole.training.loop import train


class Notes(Quiet):
    """Remembers what was said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    @property
    def warnings(self):
        return [text for text in self.said if text.startswith("warning")]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_after(folder, step, **changes):
    """A run that was cut off after a step."""

    class Cut(Quiet):
        def update(self, row, _):
            if row["step"] == step:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(folder, **changes), folder / "run", display=Cut())
    return folder / "run"


NAN_PART = """
import torch

class Mine(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * self.weight * (float("nan") if self.calls > 5 else 1.0)
"""
