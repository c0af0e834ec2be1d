"""Every built-in part passes the battery; planted faults fail it, each by the rules that it breaks and by no other."""

import re

import pytest
import torch
from planted_parts import AHEAD, PLANTED, PaddedFFT
from torch import nn

from keyhole.core.errors import InputError
from keyhole.model.registry import CATALOGUE
from keyhole.testing import assert_passes, check, rules_of
from keyhole.testing.__main__ import main

VARIANTS = {
    "softmax": [{}, {"qk_norm": True, "bias": True}, {"impl": "blocked"}],
    "window": [{}, {"window": 1}, {"window": 10, "qk_norm": True}, {"window": 200}],
    "linear": [{}, {"chunk": 1}, {"chunk": 7}, {"chunk": 1000}, {"feature": "relu"}, {"feature": "exp", "qk_norm": True}],
    "polynomial": [{}, {"offset": 0, "chunk": 16}, {"chunk": 1, "qk_norm": True}],
    "ridge": [{}, {"chunk": 7}, {"lam": 0.01, "learn_lam": False}, {"decay": 0.9, "chunk": 16}, {"chunk": 1000}],
    "statespace": [
        {"structure": structure, "inputs": inputs, "state": state}
        for structure, inputs, state in (
            ("diagonal", "channel", 16),
            ("diagonal", "head", 3),
            ("rank-one", "channel", 4),
            ("rank-one", "head", 5),
            ("dense", "channel", 4),
            ("dense", "head", 5),
        )
    ],
}
BUILT_IN = [
    (kind, name, options)
    for kind, names in CATALOGUE.items()
    for name in names
    for options in VARIANTS.get(name, [{}])
    if name != "reweight"
]


@pytest.mark.parametrize(("kind", "name", "options"), BUILT_IN, ids=[f"{k}-{n}-{o}" for k, n, o in BUILT_IN])
def test_every_built_in_part_passes_every_rule(kind, name, options):
    findings = check(name, kind, options=options)
    assert [finding.paragraph() for finding in findings if finding.verdict == "fails"] == []
    assert len(findings) == len(rules_of(kind))
    if kind == "mixer":
        assert [finding.name for finding in findings if finding.verdict == "undecided"] == []


@pytest.mark.parametrize("name", [name for name in CATALOGUE["mixer"] if name not in ("none",)])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_mixer_fails_with_other_weights_and_a_long_text(name, seed):
    assert_passes(name, block=1000, lengths=(5, 1000), seed=seed, width=12, heads=2)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_fails_by_the_rules_it_breaks_and_by_no_other(fault):
    failed = {finding.name for finding in check(fault) if finding.verdict == "fails"}
    assert failed == PLANTED[fault]
    with pytest.raises(AssertionError, match="remedy: "):
        assert_passes(fault)


def test_the_dishonest_merge_is_caught_reading_the_future():
    failed = {finding.name: finding for finding in check("reweight", "merge") if finding.verdict == "fails"}
    assert set(failed) == AHEAD | {"token by token"}
    assert all("running form" in failed[rule].remedy for rule in AHEAD)


def test_a_padded_fft_passes_where_the_circular_one_fails():
    findings = {finding.name: finding.verdict for finding in check(PaddedFFT)}
    assert {findings[rule] for rule in AHEAD} == {"holds"}
    assert findings["recurrence"] == "undecided"  # it has no state, and is told so


class Honest:
    """Parts that do nothing wrong, written in other ways than ours."""

    class FloatConstants(nn.Module):
        def forward(self, x):
            T = x.shape[1]
            return torch.tril(torch.ones(T, T)) @ x / torch.arange(1, T + 1)[:, None]

    class Complex(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.factor = nn.Parameter(torch.full((width,), 0.5 + 0.5j))

        def forward(self, x):
            return (x * self.factor).real

    class Frozen(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.mix = nn.Linear(width, width)
            self.mix.weight.requires_grad_(False)

        def forward(self, x, impl=None):  # noqa: ARG002
            return self.mix(x)

    class Table(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.table = nn.Parameter(torch.randn(block, block))

        def forward(self, x):
            T = x.shape[1]
            return self.table[:T, :T].tril() @ x

    class Rest(nn.Module):
        def forward(self, x, *rest):  # noqa: ARG002
            return x.relu()

    class Keys(nn.Module):
        """A cache that grows, in a tuple."""

        def forward(self, x):
            return self.step(x, self.begin(len(x), x))[0]

        def begin(self, batch, like):
            return (like.new_zeros(batch, 0, like.shape[-1]),)

        def step(self, x, state):
            seen = torch.cat((state[0], x), 1)
            count = torch.arange(seen.shape[1] - x.shape[1] + 1, seen.shape[1] + 1)[:, None]
            return seen.cumsum(1)[:, -x.shape[1] :] / count, (seen,)

    class Dropping(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv, self.drop = nn.Conv1d(width, width, 3), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.conv(nn.functional.pad(x.mT, (2, 0))).mT)


@pytest.mark.parametrize("name", [name for name, part in vars(Honest).items() if isinstance(part, type)])
def test_no_honest_part_fails(name):
    findings = check(getattr(Honest, name), block=65)
    assert [finding.paragraph() for finding in findings if finding.verdict == "fails"] == []


def test_a_part_that_sums_in_float32_is_told_what_the_matter_is():
    class Narrow(nn.Module):
        def forward(self, x, impl=None):
            return (x if impl == "reference" else x.float()).cumsum(1).to(x.dtype)

    found = {finding.name: finding for finding in check(Narrow)}["forms"]
    assert found.verdict == "fails"
    assert "usually arithmetic in float32" in found.remedy


def test_what_a_part_does_not_offer_is_said():
    undecided = {finding.name: finding.remedy for finding in check(PaddedFFT) if finding.verdict == "undecided"}
    assert set(undecided) == {"forms", "recurrence", "resumed state", "padding", "cost", "look"}
    assert "takes no mask" in undecided["padding"]
    assert "no begin and step" in undecided["recurrence"]


def test_a_part_that_does_nothing_with_its_input_proves_nothing():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    found = {finding.name: finding for finding in check(Constant)}
    assert found["suffix"].verdict == "fails"
    assert "does not read its input" in found["suffix"].measured
    assert found["unaligned cuts"].verdict == "undecided"


def test_a_part_that_raises_at_some_length_fails_with_its_own_words():
    class Broken(nn.Module):
        def forward(self, x):
            if x.shape[1] == 7:
                raise ValueError("seven is too many\nsecond line")
            return x

    found = check(Broken)[0]
    assert found.verdict == "fails"
    assert found.measured == "ValueError: seven is too many"
    assert found.remedy == "make it run first"


class Wants(nn.Module):
    def __init__(self, nothing):  # noqa: ARG002
        super().__init__()


class NoForward(nn.Module):
    pass


@pytest.mark.parametrize("part", [Wants, NoForward])
def test_a_part_that_cannot_be_used_at_all_is_one_error_and_no_ten_findings(part):
    with pytest.raises(InputError, match=f"mixer {part.__name__} "):
        check(part)


class Narrows(nn.Module):
    def forward(self, x):
        return x.float()


class ChangesItsInput(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class SaysSeven(PaddedFFT):
    def cost(self, tokens):  # noqa: ARG002
        return 7

    def look(self, x, mask=None):  # noqa: ARG002
        return x


@pytest.mark.parametrize(
    ("part", "rule", "words"),
    [
        (Narrows, "shapes", "float32 for .* of float64"),
        (ChangesItsInput, "shapes", "it changes its input"),
        (SaysSeven, "cost", "must return a keyhole.mixers.contract.Cost"),
        (SaysSeven, "look", "must return a keyhole.mixers.contract.Look"),
    ],
)
def test_a_finding_says_what_was_wrong(part, rule, words):
    found = {finding.name: finding for finding in check(part)}[rule]
    assert found.verdict == "fails"
    assert re.search(words, found.measured)


def test_a_users_file_is_checked_by_name(tmp_path):
    (tmp_path / "my.py").write_text(USER)
    findings = {f.name: f.verdict for f in check("my.py:Mine", folder=tmp_path, options={"sharpness": 2.0})}
    assert findings["suffix"] == "holds"
    assert {f.name: f.verdict for f in check("my.py:Peeks", folder=tmp_path)}["suffix"] == "fails"


USER = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, width, heads, block, sharpness=1.0):
        super().__init__()
        self.value, self.sharpness = nn.Linear(width, width), sharpness

    def forward(self, x):
        return self.value(x * self.sharpness)

class Peeks(Mine):
    def forward(self, x):
        return self.value(x - x.mean(1, keepdim=True))
"""


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("softmx", "mixer", "there is no mixer 'softmx'; did you mean 'softmax'"),
        ("softmax", "mixers", "there is no kind of part 'mixers'; did you mean 'mixer'"),
        ("", "mixer", "give a part by name or by its class, not ''"),
        (42, "mixer", "give a part by name or by its class, not 42"),
    ],
)
def test_what_is_no_part_is_refused(part, kind, message):
    with pytest.raises(InputError, match=message.replace("(", "\\(")):
        check(part, kind)


def test_the_battery_can_be_asked_from_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(USER)
    assert main(["average", "none"]) == 0
    assert capsys.readouterr().out.count("15 of 15 rules hold") == 2
    assert main(["my.py:Peeks"]) == 1
    assert "✗ suffix: " in capsys.readouterr().out
    assert main(["my.py:Gone"]) == 2
    assert "my.py has no 'Gone'" in capsys.readouterr().err
