"""Each leak is rejected by the rules of honesty that it breaks and by no other; honest parts that look like it are not."""

import pytest
import torch
from planted_leaks import AHEAD, HONEST, LEAKS
from planted_parts import CircularFFT, KnowsTheLength
from torch import nn

from keyhole.model.registry import CATALOGUE
from keyhole.testing import check, rules_of
from keyhole.testing.remedies import BLOCKS, OWN_PLACE, PADDED_FFT, RUNNING_MEAN, RUNNING_MOMENTS, RUNNING_NORM

QUIET = {"reweight"}  # what is kept because it must be caught


def failures(part, kind="mixer", **settings):
    return {f.name: f for f in check(part, kind, aspect="honesty", **settings) if f.verdict == "fails"}


@pytest.mark.parametrize(("leak", "kind"), LEAKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_leak_is_rejected_by_the_rules_of_its_name_and_told_what_it_is(leak, kind):
    rules, diagnosis = LEAKS[leak, kind]
    failed = failures(leak, kind)
    assert set(failed) == rules
    for finding in failed.values():
        assert finding.score > finding.limit
        assert finding.evidence["power"] > 0
        assert finding.code
        assert diagnosis in finding.measured or finding.name == "batch-mates"


@pytest.mark.parametrize(("part", "kind"), HONEST, ids=lambda value: getattr(value, "__name__", value))
def test_an_honest_part_that_looks_like_a_leak_is_accepted(part, kind):
    findings = check(part, kind, aspect="honesty")
    assert [f.paragraph() for f in findings if f.verdict == "fails"] == []
    assert {"suffix", "truncation", "batch-mates"} <= {f.name for f in findings if f.verdict == "holds"}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in CATALOGUE.items() for n in names if n not in QUIET])
def test_no_built_in_part_is_accused_at_any_length_and_seed(kind, name, seed):
    assert failures(name, kind, lengths=(1, 2, 7, 64, 129), block=129, seed=seed) == {}


def test_only_its_own_rule_catches_some_leaks():
    alone = {next(iter(rules)) for rules, _ in LEAKS.values() if len(rules) == 1}
    assert alone == {"batch-mates", "truncation", "padding", "future gradient"}
    assert any("suffix" not in rules and "unaligned cuts" in rules for rules, _ in LEAKS.values())
    assert any("suffix" in rules and "truncation" not in rules for rules, _ in LEAKS.values())
    assert AHEAD | {"batch-mates", "padding"} == {rule.name for rule in rules_of("mixer") if rule.aspect == "honesty"}


def test_a_finding_carries_score_limit_power_and_the_running_form():
    finding = failures("reweight", "merge")["suffix"]
    assert finding.score == pytest.approx(finding.evidence["worst"])
    assert finding.limit == 1e-12
    assert finding.evidence["power"] > 0.1
    assert "norm over the whole text" in finding.measured
    assert "square.cumsum(1)" in finding.paragraph()
    assert {"score", "limit", "aspect", "code"} <= finding.to_dict().keys()
    assert failures(CircularFFT)["suffix"].code == PADDED_FFT
    assert failures(KnowsTheLength)["truncation"].code == OWN_PLACE


class Ends(nn.Module):
    """The same whatever it reads: no change can show anything."""

    def forward(self, x):
        return torch.ones_like(x) * 2


def test_a_probe_without_power_says_so_and_does_not_hold():
    findings = {f.name: f for f in check(Ends, aspect="honesty")}
    assert findings["suffix"].verdict == "fails"
    for name in ("unaligned cuts", "truncation", "future gradient", "batch-mates"):
        assert findings[name].verdict == "undecided", name
    assert "showed nothing" in findings["batch-mates"].remedy


def test_power_is_proved_on_every_change_of_an_honest_part():
    for finding in check("softmax", aspect="honesty"):
        assert finding.evidence["power"] > 0.01, finding.name
        assert finding.evidence["changes"] > 20


def _run(code, **names):
    names = {"torch": torch, **names}
    exec(code, names)
    return names


@pytest.mark.parametrize(
    ("code", "given", "made"),
    [
        (RUNNING_NORM, "heads_BTHD", "y_BTHD"),
        (RUNNING_MEAN, "x_BTW", "y_BTW"),
        (RUNNING_MOMENTS, "x_BTW", "y_BTW"),
        (OWN_PLACE, "x_BTW", "y_BTW"),
        (BLOCKS, "x_BTW", "y_BTW"),
        (PADDED_FFT, "x_BTW", "y_BTW"),
    ],
)
def test_the_code_of_a_remedy_is_honest(code, given, made):
    kernel = torch.randn(24, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    multiple = 8 if code == BLOCKS else 1

    class Mended(nn.Module):
        def forward(self, x):
            tokens = x.shape[1]
            x = nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, -tokens % multiple))
            return _run(code, **{given: x}, C=8, kernel_WT=kernel)[made][:, :tokens]

    assert failures(Mended, "merge" if "heads" in given else "mixer", block=129) == {}


def test_past_the_block_is_told_and_never_judged():
    class Refuses(nn.Module):
        def forward(self, x):
            if x.shape[1] > 65:
                raise ValueError("65 is the longest text")
            return x.cumsum(1)

    class Explodes(nn.Module):
        def forward(self, x):
            return torch.cat((x[:, :65], x[:, 65:] / 0), 1)

    told = {
        part: next(f for f in check(part, block=65) if f.name == "past the block")
        for part in (Refuses, Explodes, "softmax")
    }
    assert [finding.verdict for finding in told.values()] == ["undecided", "undecided", "holds"]
    assert "refuses 74 tokens" in told[Refuses].measured
    assert "65 is the longest text" in told[Refuses].measured
    assert "not finite" in told[Explodes].measured
    assert "74 tokens: finite" in told["softmax"].measured
