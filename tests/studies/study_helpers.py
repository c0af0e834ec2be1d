"""Tiny studies, and what it means that two of them found the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from keyhole.core.toml import dotted, to_toml
from tests.training.training_helpers import TINY, write_text

CLOCK = ("seconds", "tokens_per_second", "memory_mb")
"""What no two trainings have in common."""

ARMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "rope": {"model": {"position": "rope"}},
    "reweight": {"model": {"merge": "reweight"}},
}


def write_study(
    folder: Path, *, arms: dict[str, Any] | None = None, base: dict[str, Any] | None = None, **sections: Any
) -> Path:
    """A study of three arms of the tiny recipe, in a folder with all it needs; `sections` change its file."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "text.txt").exists():
        write_text(folder)
    recipe = {section: dict(keys) | (base or {}).get(section, {}) for section, keys in TINY.items()}
    (folder / "base.toml").write_text(to_toml(recipe))
    study = {"recipe": "base.toml", "seeds": 2, "steps": 12, **sections.pop("study", {})}
    measure = {"windows": 4, "texts": {"short": "A small key."}, "past": [2.0], **sections.pop("measure", {})}
    written = {"study": study, "measure": measure, **sections}
    written |= {dotted("arms", name): changes for name, changes in (ARMS if arms is None else arms).items()}
    path = folder / "study.toml"
    path.write_text(to_toml(written))
    return path


def outcome(out: Path) -> dict[str, Any]:
    """Everything that a study found but for clocks: results, findings, and the last bit of every weight."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*.json")):
        place = path.relative_to(out)
        if place.parts[0] in ("runs", "rates") and path.name == "result.json":
            found[str(place)] = _timeless(json.loads(path.read_text()))
        elif place.parts[0] == "audits":
            found[str(place)] = json.loads(path.read_text())
    # Which older checkpoints there are depends on when a run was stopped; the newest is its end.
    newest = {path.parents[1]: path for path in sorted(out.rglob("weights.safetensors"))}
    for folder, path in newest.items():
        found[f"{folder.relative_to(out)}/{path.parent.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert newest, "no weights were found at all"
    return found


def _timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in CLOCK}
