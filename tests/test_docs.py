"""The documentation says what is so: its snippets run, its tables are the code's own, its links lead somewhere."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from keyhole.core.config import Data, Model, Recipe, Train
from keyhole.studies.plan import load_plan
from keyhole.studies.search.plan import SearchPlan

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def key_table() -> str:
    """Every recipe key as docs/recipes.md lists it."""
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for section, table in (("data", Data), ("model", Model), ("train", Train)):
        for name, field in table.model_fields.items():
            default = "" if field.default is None else f"`{str(field.default).lower()}`"
            lines.append(f"| `{section}.{name}` | {default} | {(field.description or '').strip()} |")
    return "\n".join(lines)


def python_snippets() -> list[tuple[str, str]]:
    found = []
    for path in DOCS:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            found.append((f"{path.name}:{number}", code))
    return found


def test_the_reference_of_recipe_keys_is_the_code_s_own():
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert key_table() in text, f"docs/recipes.md should hold this table:\n{key_table()}"


@pytest.mark.parametrize(("name", "code"), python_snippets(), ids=[name for name, _ in python_snippets()])
def test_python_snippets_run(name, code, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippet"}
    exec(compile(code, name, "exec"), names)
    assert len(names) > 2, "it defined and imported nothing"  # the second are the builtins


def test_the_user_s_part_of_the_documentation_trains(tmp_path, monkeypatch):
    import keyhole as kh

    snippets = dict(python_snippets())
    (tmp_path / "my.py").write_text(next(code for code in snippets.values() if "class Mine" in code))
    (tmp_path / "mean.py").write_text(next(code for code in snippets.values() if "class RunningMean" in code))
    monkeypatch.chdir(tmp_path)
    for number, mixer in enumerate(("my.py:Mine", "mean.py:RunningMean")):
        changes = {"model.mixer": mixer, "model.position": "learned", "train.steps": 2}
        recipe = kh.Recipe().replace({**changes, "model.layers": 1, "model.width": 16, "train.eval_tokens": 64})
        run = kh.train(recipe, out=tmp_path / f"run{number}", quiet=True)
        assert len(kh.sample(run, prompt="The ", tokens=3)) >= 4


KINDS = {"studies": ("keyhole study", load_plan), "searches": ("keyhole search", SearchPlan.load)}
"""What carries out the files of a folder of recipes/, and reads them; all others are recipes."""


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_its_header_gives_command_time_and_result(path):
    command, load = KINDS.get(path.parent.name, ("keyhole train", Recipe.load))
    load(path)
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    for word in (f"{command} recipes/", "Takes about", "Expected:"):
        assert word in header, f"{path.name} does not say {word!r}"


def test_the_tree_in_the_readme_names_every_folder():
    text = (ROOT / "README.md").read_text()
    folders = {path.name for path in (ROOT / "keyhole").iterdir() if (path / "__init__.py").is_file()}
    assert {name for name in folders if f"  {name}/" not in text} == set()


def test_constraints_pin_what_the_project_depends_on():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {re.split(r"[=<>]", line)[0] for line in lines if line[:1].isalpha()}
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[=<>]", need)[0] for need in needs} <= pins


PAGES = [*DOCS, ROOT / "CHANGELOG.md", ROOT / "LOG.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere_and_nothing_waits_to_be_filled_in(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert re.findall(r"@[A-Z][A-Z0-9_]*(?: \w+)?@|TODO|TBD", text) == []


def test_a_dead_link_and_a_gap_are_seen(tmp_path):
    """The control."""
    page = tmp_path / "page.md"
    for text in ("[gone](gone.md)", "it took @SECONDS@ s", "@ROW linear@", "TODO"):
        page.write_text(text)
        with pytest.raises((AssertionError, ValueError)):
            test_every_link_leads_somewhere_and_nothing_waits_to_be_filled_in(page)
