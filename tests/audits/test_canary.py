"""The canary falls below ln V where the future is read, and nowhere else."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from keyhole.audits.canary import SYMBOLS, _judged, canary
from keyhole.core.errors import InputError

SAID = {"name": "canary", "statement": "it: ...", "aspect": "honesty"}


class Peeks(nn.Module):
    """Adds the next token: what random tokens cannot hide."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return self.mix(nn.functional.pad(x, (0, 0, 0, 1))[:, 1:])


class Explodes(nn.Module):
    def forward(self, x):
        return x * (1e30 if self.training else 1.0)


class Raises(nn.Module):
    def forward(self, x):
        if self.training:
            raise ValueError("no training here")
        return x


def test_a_part_that_reads_the_next_token_falls_below_chance():
    finding = canary(Peeks, "mixer", steps=60)
    assert finding.verdict == "fails"
    assert finding.evidence["gap"] < -0.5
    assert finding.evidence["ln V"] == math.log(SYMBOLS)
    assert finding.aspect == "honesty"


def test_the_dishonest_merge_falls_below_chance():
    finding = canary("reweight", "merge")
    assert finding.verdict == "fails"
    assert finding.evidence["gap"] < -0.17


@pytest.mark.parametrize(("part", "kind"), [("softmax", "mixer"), ("reweight-running", "merge"), ("rms", "norm")])
def test_honest_parts_stay_at_chance(part, kind):
    finding = canary(part, kind, steps=60)
    assert finding.verdict == "holds"
    assert abs(finding.evidence["gap"]) < 0.01


@pytest.mark.parametrize(("part", "words"), [(Explodes, "no number"), (Raises, "no training here")])
def test_what_cannot_be_trained_is_undecided_and_says_why(part, words):
    finding = canary(part, "mixer", steps=20)
    assert finding.verdict == "undecided"
    assert words in finding.measured + finding.remedy


def test_what_does_not_fit_the_canary_is_undecided():
    class Wide(nn.Module):
        def __init__(self, heads):
            super().__init__()
            if heads != 64:
                raise InputError("only for 64 heads")

        def forward(self, x):
            return x

    finding = canary(Wide, "mixer")
    assert finding.verdict == "undecided"
    assert "only for 64 heads" in finding.remedy


def test_false_alarms_are_as_rare_as_promised_and_gaps_are_seen():
    generator = np.random.default_rng(0)
    floor = math.log(SYMBOLS)
    losses = floor + 0.05 * generator.standard_normal((2000, 512))
    assert sum(_judged(row, SAID, "", 300).verdict == "fails" for row in losses) <= 3
    assert all(_judged(row - 0.02, SAID, "", 300).verdict == "fails" for row in losses[:100])


def test_the_canary_leaves_the_users_stream_of_chance_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    canary("none", "mixer", steps=2)
    assert torch.equal(torch.rand(1), expected)
