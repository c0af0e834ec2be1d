"""Parts are audited by name, file or class; their kind is guessed where only one is possible."""

import json

import pytest
from torch import nn

import keyhole as kh
from keyhole.audits.part import kind_of
from keyhole.cli.main import run as command
from keyhole.model.registry import CATALOGUE

USER = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, width, heads, block, sharpness=1.0):
        super().__init__()
        self.sharpness = sharpness

    def forward(self, x):
        return x * self.sharpness

class Peeks(Mine):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)
"""


class Place(nn.Module):
    def add(self, x, start):  # noqa: ARG002
        return x


class Merged(nn.Module):
    def forward(self, heads):
        return heads


class Masked(nn.Module):
    def forward(self, x, mask=None):  # noqa: ARG002
        return x


class Fed(nn.Module):
    def forward(self, x):
        return x

    def flops(self, tokens):
        return 0 * tokens


class Anything(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(("part", "kind"), [(Place, "position"), (Merged, "merge"), (Masked, "mixer"), (Fed, "feed")])
def test_the_kind_of_a_class_is_what_only_it_can_be(part, kind, tmp_path):
    assert kind_of(part, tmp_path) == kind


def test_the_kind_of_a_name_is_its_own_and_an_ambiguous_class_is_asked_about(tmp_path):
    for kind, names in CATALOGUE.items():
        assert {kind_of(name, tmp_path) for name in names if name != "none"} == {kind}
    with pytest.raises(kh.InputError, match="Anything could be a mixer, a merge, a norm or a feed; say which: --kind norm"):
        kind_of(Anything, tmp_path)
    assert [f.verdict for f in kh.audit(Anything, kind="norm", canary=False) if f.verdict == "fails"] == []


def test_a_users_part_is_audited_with_its_options_and_canary(tmp_path):
    (tmp_path / "my.py").write_text(USER)
    findings = kh.audit("my.py:Mine", folder=tmp_path, options={"sharpness": 0.5}, canary=False)
    assert {f.verdict for f in findings} == {"holds", "undecided"}
    assert {f.aspect for f in findings} == {"honesty", "faithfulness"}


def test_the_command_shows_probes_faults_and_remedies_and_exits_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(USER)
    assert command(["audit", "my.py:Peeks", "--no-canary"]) == 1
    out = capsys.readouterr().out
    assert "Is it honest?" in out
    assert "Does it do what it says?" in out
    assert "✗ suffix, unaligned cuts, truncation, future gradient  in my.py:Peeks" in out
    assert "a mean over the whole text" in out
    assert out.count("x_BTW.cumsum(1) / count_T1") == 1
    assert "Could not be asked" in out
    assert "my.py:Peeks is not honest" in out


def test_the_command_speaks_json_and_exits_0_where_all_holds(capsys):
    assert command(["audit", "window", "--no-canary", "--set", "window=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 0
    assert {"score", "limit", "aspect", "verdict", "remedy"} <= found["findings"][0].keys()
    assert {f["name"] for f in found["findings"]} >= {"suffix", "unaligned cuts", "truncation", "forms"}


def test_the_command_refuses_what_it_cannot_audit_in_one_sentence(capsys):
    assert command(["audit", "none", "--no-canary"]) == 2
    assert "say which: --kind mixer" in capsys.readouterr().err
    assert command(["audit", "softmax", "--kind", "mixr"]) == 2
    assert "there is no kind of part 'mixr'; did you mean 'mixer'" in capsys.readouterr().err
