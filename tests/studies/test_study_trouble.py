"""What goes wrong around a study: damaged files, beginnings that were cut off, arms that cannot be audited."""

import json
import shutil

import pytest
from fabricated import make_study

from keyhole.cli.main import run
from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, StorageError
from keyhole.record.create import STARTING
from keyhole.record.run import open_run
from keyhole.studies import prepare as preparing
from keyhole.studies.measure import measure
from keyhole.studies.plan import parse_plan
from keyhole.studies.prepare import KNOWN, STUDY, loss_alone, prepare, rate_place
from keyhole.studies.result import open_study
from keyhole.studies.search.conduct import _default_out as default_search_out
from keyhole.studies.search.engine import Search
from keyhole.studies.search.plan import SearchPlan
from keyhole.studies.study import default_out, load_plan, study
from keyhole.training.loop import train
from tests.studies.study_helpers import write_study
from tests.training.training_helpers import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("made") / "study")


@pytest.mark.parametrize("content", ["{", "[]", "{}", "null"])
@pytest.mark.parametrize("place", ["study.json", "audits/rope.json", "runs/rope/seed-0/result.json"])
def test_a_damaged_file_of_a_study_is_named_with_what_to_do_about_it(made, tmp_path, place, content):
    out = shutil.copytree(made, tmp_path / "study")
    (out / place).write_text(content)
    with pytest.raises(
        StorageError, match=r"is damaged .*; (restore it|keyhole study .*study.toml --resume makes it anew)"
    ) as told:
        open_study(out)
    assert place in str(told.value)
    assert "remove its folder" not in str(told.value), "a run would be lost for a file that can be made again"


def test_an_arm_that_trained_without_an_audit_is_not_comparable(made, tmp_path):
    out = shutil.copytree(made, tmp_path / "study")
    assert open_study(out).verdicts["rope"] != "not comparable"
    (out / "audits" / "rope.json").unlink()
    (out / "failures.json").write_text(json.dumps({"audits/rope": "its worker ended 2 times"}))
    result = open_study(out)
    assert result.verdicts["rope"] == "not comparable"
    assert [finding.name for finding in result.arm("rope").unfair] == ["audited"]
    assert "its worker ended 2 times" in result.arm("rope").unfair[0].measured


def test_an_arm_whose_audit_ends_its_worker_is_not_trained_and_says_why(tmp_path):
    (tmp_path / "my.py").write_text(
        "import os\nimport torch\nfrom torch import nn\n\n"
        "class Hides(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if x.dtype is torch.float64:\n            os._exit(3)\n"
        "        return x.mean(1, keepdim=True).expand_as(x)\n"
    )
    arms = {"baseline": {}, "hides": {"model": {"mixer": "my.py:Hides"}}}
    path = write_study(tmp_path, arms=arms, study={"seeds": 1}, measure={"windows": 0})
    result = study(path, tmp_path / "out", workers=1, quiet=True)
    assert [trial.state for trial in result.arm("baseline").trials] == ["done"]
    assert [trial.state for trial in result.arm("hides").trials] == ["failed"]
    assert "could not be audited: its worker ended 2 times (exit code 3)" in result.arm("hides").trials[0].message


def test_a_beginning_that_was_cut_off_is_begun_again(tmp_path, monkeypatch):
    plan, out = load_plan(write_study(tmp_path / "source")), tmp_path / "out"

    def full(*given):
        raise StorageError("no space left")

    monkeypatch.setattr(preparing, "write_json", full)
    with pytest.raises(StorageError):
        prepare(plan, out, resume=False)
    monkeypatch.undo()
    assert (out / STUDY).is_file()
    (out / ".study.json.x1y2").write_text("half")
    prepare(plan, out, resume=False)
    assert (out / KNOWN).is_file()
    assert not (out / STARTING).exists()


def test_a_folder_with_files_of_the_users_is_not_begun_in(tmp_path):
    source = write_study(tmp_path)
    before = source.read_text()
    with pytest.raises(InputError, match="is not empty"):
        study(source, tmp_path, quiet=True)
    assert source.read_text() == before


def test_a_study_whose_file_is_called_study_goes_to_runs_like_any_other(made, tmp_path):
    source = write_study(tmp_path)
    assert source.name == STUDY
    assert default_out(source, load_plan(source)).parts == ("runs", "study")
    assert default_out(made / STUDY, load_plan(made / STUDY)) == made
    assert default_search_out(tmp_path / "search.toml").parts == ("runs", "search")


@pytest.mark.parametrize(
    ("asked", "told"), [({"workers": 0}, "0 workers can do nothing"), ({"on": "mars"}, "'mars' is no place")]
)
def test_what_cannot_carry_a_study_out_is_refused_before_anything_is_begun(tmp_path, asked, told):
    path = write_study(tmp_path / "source")
    with pytest.raises(InputError, match=told):
        study(path, tmp_path / "out", quiet=True, **asked)
    assert not (tmp_path / "out").exists()


def test_a_study_that_is_neither_a_file_nor_a_plan_is_refused():
    with pytest.raises(InputError, match="parse_plan makes one of nested values"):
        study({"study": {}})


def test_rates_that_are_close_do_not_share_a_folder():
    assert rate_place("a", 0.01, 0) == "rates/a/rate-0.01-seed-0"
    assert rate_place("a", 1.0, 0) == "rates/a/rate-1-seed-0"
    assert rate_place("a", 0.1, 0) != rate_place("a", 0.10000001, 0)


def test_an_arms_name_must_fit_a_folder(tmp_path):
    values = {"study": {"recipe": str(write_study(tmp_path).with_name("base.toml"))}, "arms": {"a" * 101: {}}}
    with pytest.raises(InputError, match="use up to 100 letters"):
        parse_plan(values, name="long", folder=tmp_path)


def test_a_file_of_parts_that_ends_the_program_is_told_of(tmp_path):
    (tmp_path / "my.py").write_text("import sys\nclass Mine: pass\nsys.exit(0)\n")
    path = write_study(tmp_path, arms={"baseline": {}, "mine": {"model": {"mixer": "my.py:Mine"}}})
    with pytest.raises(InputError, match=r"my\.py could not be loaded: SystemExit: 0"):
        study(path, tmp_path / "out", quiet=True)


def test_a_study_whose_text_changed_is_not_resumed(tmp_path):
    path, out = write_study(tmp_path / "source"), tmp_path / "out"
    plan = load_plan(path)
    prepare(plan, out, resume=False)
    prepare(plan, out, resume=True)
    (path.parent / "text.txt").write_text("Quite another text. " * 200)
    with pytest.raises(InputError, match="the text of arm baseline changed since"):
        prepare(plan, out, resume=True)


def test_a_run_whose_metrics_are_gone_is_named(finished_run):
    (finished_run / "metrics.jsonl").write_text("{half")
    with pytest.raises(StorageError, match=r"metrics\.jsonl is damaged or gone; remove .*--resume trains it anew"):
        measure(open_run(finished_run), loss_alone(0), None)


@pytest.fixture
def finished_run(tmp_path):
    train(tiny(tmp_path, train_steps=2), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_what_a_part_prints_does_not_get_into_the_json(tmp_path, capfd):
    (tmp_path / "my.py").write_text(
        "from torch import nn\n\n"
        "class Chats(nn.Module):\n"
        "    def forward(self, x):\n        print('chatting')\n        return x\n"
    )
    path = write_study(tmp_path, arms={"baseline": {"model": {"norm": "my.py:Chats"}}}, study={"seeds": 1})
    assert run(["study", str(path), "--out", str(tmp_path / "out"), "--workers", "1", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["complete"]
    assert "chatting" in said.err


@pytest.mark.parametrize("where", ["__init__", "forward"])
def test_a_part_that_ends_the_program_is_an_error_and_no_success(tmp_path, capsys, where):
    (tmp_path / "my.py").write_text(
        f"import sys\nfrom torch import nn\n\nclass Ends(nn.Module):\n    def {where}(self, *given):\n        sys.exit(0)\n"
    )
    assert run(["audit", f"{tmp_path / 'my.py'}:Ends", "--kind", "norm", "--no-canary", "--json"]) == 2
    assert "SystemExit: 0" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("content", ["[]", "{}", "{"])
def test_a_damaged_record_of_a_search_is_named(tmp_path, content):
    values = {"search": {"recipe": "none", "trials": 1}, "space": {"model.layers": {"low": 1, "high": 3}}}
    plan = SearchPlan.parse(values, recipe=Recipe())
    with Search(plan, tmp_path):
        pass
    (tmp_path / "search.json").write_text(content)
    with pytest.raises(StorageError, match=r"search\.json is damaged .*; restore it, or give --out another folder"):
        Search(plan, tmp_path)
