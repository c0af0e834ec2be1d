"""How the project is built: who may import whom, how long a file may be, what is public."""

import ast
import importlib
import inspect
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import keyhole

ROOT = Path(__file__).parents[1]
# A folder may import those above it, and itself.
ORDER = [
    "core",
    "text",
    "parts",
    "mixers",
    "model",
    "testing",
    "record",
    "use",
    "training",
    "audits",
    "study",
    "doctor",
    "cli",
]
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(tree, package):
    """Every dotted name that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def edges(root) -> dict[tuple[str, str], set[str]]:
    """(folder, folder it imports) -> the files that do."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if len(inside) == 1:
            continue  # the door (keyhole/__init__.py) and python -m keyhole
        package = ".".join(["keyhole", *inside[:-1]])
        for name in imported(ast.parse(path.read_text()), package):
            steps = name.split(".")
            if steps[0] != "keyhole":
                continue
            # `from keyhole import Run` comes from the folder where Run lives.
            lives = keyhole._WHERE.get(steps[1], name) if len(steps) > 1 else name
            target = lives.split(".")[1] if "." in lives else "keyhole"
            if target not in (inside[0], "__version__"):
                found.setdefault((inside[0], target), set()).add("/".join(inside))
    return found


def upward(found):
    return {pair for pair in found if pair[1] not in ORDER[: ORDER.index(pair[0])]}


def picture(found) -> str:
    """Each folder with what it imports; an arrow against the direction stands out."""
    wrong, lines = upward(found), []
    for folder in ORDER:
        targets = [target for source, target in found if source == folder]
        shown = [f"!! {target} !!" if (folder, target) in wrong else target for target in targets]
        lines.append(f"{folder:>9} ─► {', '.join(shown) or '(nothing)'}")
    lines += [f"wrong: {source} imports {target} in {', '.join(sorted(found[source, target]))}" for source, target in wrong]
    return "\n".join(lines)


def test_every_folder_has_its_place_in_the_order():
    folders = {path.name for path in (ROOT / "keyhole").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(ORDER)


def test_folders_import_only_those_above_them():
    found = edges(ROOT / "keyhole")
    assert ("model", "core") in found, "no imports were found at all"
    assert not upward(found), "\n" + picture(found)


def test_an_import_against_the_direction_is_seen_and_drawn(tmp_path):
    """The control: each way to write an import is planted once."""
    for place, (folder, line) in enumerate(PLANTED):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"file_{place}.py").write_text(f"def f():\n    {line}\n")
    found = edges(tmp_path)
    assert upward(found) == {("core", "model"), ("text", "record"), ("parts", "use"), ("model", "training")}
    assert "!! model !!" in picture(found)
    assert "wrong: text imports record in text/file_1.py" in picture(found)


PLANTED = [
    ("core", "from keyhole.model.lm import build"),
    ("text", "import keyhole.record.run"),
    ("parts", "from ..use import sample"),
    ("model", "from keyhole import train"),
    ("cli", "from keyhole.core import errors"),
    ("cli", "from keyhole import __version__"),
    ("cli", "from . import output"),
]


def test_no_file_is_longer_than_its_budget():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources("keyhole", "tests", "bench")
    }
    assert len(lengths) > 50
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_function_is_longer_than_a_screen():
    long = {}
    for path in sources("keyhole", "tests", "bench"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = length
    assert long == {}


def test_nothing_is_called_utils():
    assert [
        path for path in sources("keyhole", "tests", "bench") if re.fullmatch(r"(utils?|helpers?|misc)", path.stem)
    ] == []


def test_what_keyhole_exports_is_what_it_has():
    for name in keyhole.__all__:
        assert getattr(keyhole, name) is getattr(importlib.import_module(keyhole._WHERE[name]), name)
    tree = ast.parse(inspect.getsource(keyhole))
    typed = {
        alias.name: node.module
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        for alias in node.names
    }
    assert typed == keyhole._WHERE
    assert list(keyhole.__all__) == sorted(keyhole._WHERE)
    assert dir(keyhole) == sorted([*keyhole.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module 'keyhole' has no attribute 'nothing'"):
        getattr(keyhole, "nothing")  # noqa: B009 - the statement alone would look like a mistake


def test_what_the_text_folder_exports_is_what_it_has():
    import keyhole.text as text

    own = {name for name, value in vars(text).items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert set(text.__all__) == own


def test_the_version_is_one():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert keyhole.__version__ == version


def test_the_changelog_begins_with_this_version():
    path = ROOT / "CHANGELOG.md"
    if not path.is_file():
        pytest.skip("CHANGELOG.md is not written yet")
    first = re.search(r"^## \[?v?(\d+\.\d+\.\d+)", path.read_text(), re.MULTILINE)
    assert first, "the changelog has no entry such as `## 0.1.0`"
    assert first[1] == keyhole.__version__


def test_the_order_has_no_folder_twice():
    assert all(a != b for a, b in pairwise(sorted(ORDER)))
