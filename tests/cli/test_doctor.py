from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from cli_helpers import Ask

from keyhole.core.findings import Finding
from keyhole.doctor.machine import _disk, _threads
from keyhole.doctor.packages import DOWNGRADERS, EXTRAS, NEEDED, examine_packages, install, meets

ROOT = Path(__file__).resolve().parents[2]
SOUND = {
    "torch": "2.13.0+cpu",
    "numpy": "2.4.1",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "pydantic": "2.14.3",
    "typer": "0.29.1",
    "rich": "15.0.0",
    "datasets": "5.2.0",
}


def examine(**changes: str | None) -> dict[str, Finding]:
    versions = {**SOUND, **changes}
    return {finding.statement: finding for finding in examine_packages(versions.get)}


def test_what_doctor_wants_is_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{name}{wanted}" for name, wanted in NEEDED.items()] == project["dependencies"]
    for extra, (packages, _) in EXTRAS.items():
        # ray[client] is ray, with more of its own needs
        declared = [re.sub(r"\[.*\]", "", need) for need in project["optional-dependencies"][extra]]
        assert {f"{name}{wanted}" for name, wanted in packages.items()} <= set(declared)


def test_a_sound_environment_fails_nothing() -> None:
    assert all(finding.verdict != "fails" for finding in examine().values())


@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("torch", "2.12.1", "torch==2.13"),
        ("torch", "2.14.0", "torch==2.13"),
        ("numpy", None, "numpy>=2"),
        ("pydantic", "2.9.2", "pydantic>=2.14"),
        ("transformers", "5.2.9", "transformers>=5.3"),
        ("torchvision", "0.27.0+cpu", "uninstall -y torchvision"),
        ("torchvision", "0.28.0", "uninstall -y torchvision"),
    ],
)
def test_what_does_not_fit_fails_and_says_what_mends_it(package: str, version: str | None, remedy: str) -> None:
    finding = examine(**{package: version})[package]
    assert finding.verdict == "fails"
    assert remedy in finding.remedy


def test_a_torchvision_that_fits_its_torch_holds() -> None:
    assert examine(torchvision="0.28.1+cpu")["torchvision"].verdict == "holds"


def test_a_missing_extra_is_told_and_fails_nothing() -> None:
    finding = examine(datasets=None)["extra data"]
    assert finding.verdict == "undecided"
    assert "[data]" in finding.remedy
    assert "-c constraints.txt" in finding.remedy or "constraints.txt" in finding.remedy


@pytest.mark.parametrize("package", DOWNGRADERS)
def test_a_package_that_downgrades_others_fails_where_it_has(package: str) -> None:
    assert examine(**{package: "1.0"})[package].verdict == "undecided"
    assert examine(**{package: "1.0", "pydantic": "1.10"})[package].verdict == "fails"


def test_versions_compare_as_numbers() -> None:
    assert meets("2.13.0+cpu", "==2.13.*")
    assert not meets("2.1.3", "==2.13.*")
    assert meets("0.100", ">=0.20")
    assert not meets("0.9.9", ">=0.20")


def test_outside_a_checkout_the_remedy_is_plain_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("keyhole.doctor.packages.__file__", str(tmp_path / "a" / "b" / "packages.py"))
    assert install("keyhole[data]").endswith("pip install 'keyhole[data]'")


def test_more_threads_than_cores_and_a_full_disk_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _threads(10_000).verdict == "fails"
    assert "OMP_NUM_THREADS" in _threads(10_000).remedy
    assert _disk(tmp_path).verdict == "holds"
    monkeypatch.setattr("keyhole.doctor.machine.LEAST_FREE", 1e9)
    assert _disk(tmp_path).verdict == "fails"


def test_doctor_exits_1_when_a_check_fails(ask: Ask, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ask("doctor")
    assert sound.code == 0
    for words in (
        "torch",
        "precision",
        "GFLOP/s",
        "threads",
        "extra data",
        "freed memory",
        "disk",
        "cache",
        "fit to train",
    ):
        assert words in sound.out
    (home / "file").write_text("")
    monkeypatch.setenv("KEYHOLE_CACHE", str(home / "file" / "cache"))
    broken = ask("doctor", "--json")
    assert broken.code == 1
    assert broken.json["failed"] == 1
    (failed,) = [finding for finding in broken.json["findings"] if finding["verdict"] == "fails"]
    assert failed["statement"] == "cache"
    assert "KEYHOLE_CACHE" in failed["remedy"]
    assert "1 to mend" in ask("doctor").out
