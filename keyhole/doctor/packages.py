"""What is installed: what Keyhole needs, its extras, what is known to break others. Nothing is imported to find out."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from keyhole.core.findings import Finding, Verdict

NEEDED = {
    "torch": "==2.13.*",
    "numpy": ">=2",
    "safetensors": ">=0.5",
    "tokenizers": ">=0.23",
    "pydantic": ">=2.14",
    "typer": ">=0.20",
    "rich": ">=14",
}
"""As in pyproject.toml; a test holds the two equal."""

EXTRAS = {
    "data": ({"datasets": ">=5"}, "reads datasets of the hub (hf:NAME)"),
    "study": (
        {"scipy": ">=1.15", "altair": ">=6", "vl-convert-python": ">=1.8", "optuna": ">=5"},
        "judges and draws studies, searches recipes",
    ),
    "cluster": ({"ray": ">=2.60"}, "runs studies on a Ray cluster"),
    "dev": (
        {"pytest": ">=9", "hypothesis": ">=6.150", "ruff": ">=0.17", "transformers": ">=5.3"},
        "tests Keyhole itself",
    ),
}

DOWNGRADERS = ("mlflow", "aim", "bertviz", "litgpt")
"""Packages whose installation silently replaces others by older ones."""

Versions = Callable[[str], str | None]


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def examine_packages(version: Versions = installed) -> list[Finding]:
    """Findings on Python, needed packages, extras and conflicts."""
    found = [_python(), *(_needed(name, wanted, version(name)) for name, wanted in NEEDED.items())]
    broken = [finding for finding in found if finding.verdict == "fails"]
    found += [_extra(name, version) for name in EXTRAS]
    found += _torchvision(version)
    found += _transformers(version("transformers"))
    found += _downgraders(version, broken)
    return found


def _python() -> Finding:
    now = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    return Finding(
        statement="python",
        expected=">=3.11",
        measured=now,
        verdict="holds" if fine else "fails",
        remedy="" if fine else "install Python 3.11 or newer, and make a new environment with it",
    )


def _needed(name: str, wanted: str, version: str | None) -> Finding:
    fine = version is not None and meets(version, wanted)
    return Finding(
        statement=name,
        expected=wanted,
        measured=version or "missing",
        verdict="holds" if fine else "fails",
        remedy="" if fine else install(f"{name}{wanted}"),
    )


def _extra(extra: str, version: Versions) -> Finding:
    packages, purpose = EXTRAS[extra]
    lacking = [name for name, wanted in packages.items() if not (found := version(name)) or not meets(found, wanted)]
    present = ", ".join(f"{name} {version(name)}" for name in packages if name not in lacking)
    return Finding(
        statement=f"extra {extra}",
        expected=", ".join(f"{name}{wanted}" for name, wanted in packages.items()),
        measured=f"missing {', '.join(lacking)}" if lacking else present,
        # Nobody must have an extra: what is missing is told, and fails nothing.
        verdict="undecided" if lacking else "holds",
        why=f"optional: it {purpose}",
        remedy=install(f"keyhole[{extra}]") if lacking else "",
    )


def _torchvision(version: Versions) -> list[Finding]:
    """torchvision built for another torch breaks transformers and peft (`torchvision::nms does not exist`)."""
    torch, vision = version("torch"), version("torchvision")
    if vision is None or torch is None:
        return []
    (_, minor), build = _release(torch)[:2], _build(torch)
    # torch 2.N goes with torchvision 0.(N + 15).
    fits = _release(vision)[:2] == (0, minor + 15) and _build(vision) == build
    return [
        Finding(
            statement="torchvision",
            expected=f"none, or 0.{minor + 15}.*{'+' + build if build else ''} to go with torch {torch}",
            measured=vision,
            verdict="holds" if fits else "fails",
            why="built for another torch it breaks the import of transformers and peft",
            remedy="" if fits else f"{_pip()} uninstall -y torchvision",
        )
    ]


def _transformers(version: str | None) -> list[Finding]:
    if version is None:
        return []
    fine = meets(version, ">=5.3")
    return [
        Finding(
            statement="transformers",
            expected=">=5.3",
            measured=version,
            verdict="holds" if fine else "fails",
            why="before 5.3 from_pretrained could be made to run code of the model's author",
            remedy="" if fine else install("transformers>=5.3"),
        )
    ]


def _downgraders(version: Versions, broken: list[Finding]) -> list[Finding]:
    found = []
    for name in DOWNGRADERS:
        if (present := version(name)) is None:
            continue
        verdict: Verdict = "fails" if broken else "undecided"
        found.append(
            Finding(
                statement=name,
                expected="in an environment of its own",
                measured=f"{present} beside Keyhole",
                verdict=verdict,
                why="installing it replaces other packages by older ones, and says nothing",
                remedy=f"{_pip()} uninstall -y {name}",
            )
        )
    return found


def meets(version: str, wanted: str) -> bool:
    """Whether a version satisfies ">=X.Y" or "==X.Y.*"."""
    release = _release(version)
    if wanted.startswith("=="):
        exact = _release(wanted[2:].removesuffix(".*"))
        return release[: len(exact)] == exact
    return release >= _release(wanted[2:])


def install(what: str) -> str:
    """The pip command for a requirement, held by the project's constraints where they lie at hand."""
    root = Path(__file__).resolve().parents[2]
    constraints = root / "constraints.txt"
    if not constraints.is_file():
        return f"{_pip()} install {shlex.quote(what)}"
    # From a checkout, Keyhole itself is that folder and no package of an index.
    own = what.startswith("keyhole")
    target = f"-e {shlex.quote(str(_near(root)) + what.removeprefix('keyhole'))}" if own else shlex.quote(what)
    return f"{_pip()} install -c {shlex.quote(str(_near(constraints)))} {target}"


def _near(path: Path) -> Path:
    """A path as it is shortest to write from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _pip() -> str:
    """The pip of the Python that runs, whichever is first in PATH."""
    return "pip" if Path(sys.prefix, "bin").as_posix() in _path() else f"{sys.executable} -m pip"


def _path() -> list[str]:
    import os

    return os.environ.get("PATH", "").split(os.pathsep)[:1]


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)


def _build(version: str) -> str:
    return version.partition("+")[2]
