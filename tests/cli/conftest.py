from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_helpers import RECIPE, TEXT, Answer, Ask

from keyhole.cli.main import run


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Carry out a command line in this process."""

    def carry_out(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return carry_out


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own to work in, with a recipe and its text."""
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    (folder / "tiny.toml").write_text(RECIPE)
    assert run(["train", str(folder / "tiny.toml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


@pytest.fixture
def trained(_trained: Path, home: Path) -> Path:
    """A copy of a small trained run, to be damaged at will."""
    return Path(shutil.copytree(_trained, home / "runs" / "tiny"))
