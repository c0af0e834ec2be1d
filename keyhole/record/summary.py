"""One run in one row, read from its directory."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keyhole.core.config import Recipe
from keyhole.core.errors import KeyholeError, StorageError
from keyhole.core.files import read_json, read_object
from keyhole.record import checkpoint
from keyhole.record.columns import COLUMNS
from keyhole.record.environment import stored_recipe
from keyhole.record.metrics import NAME as METRICS
from keyhole.record.metrics import last_rows
from keyhole.record.query import NOTHING

DAMAGED = ("damaged: ", "newest checkpoint damaged")
"""How the state of a run begins that must be looked at again each time, since what harms it may be mended unseen."""


def summarise(path: Path) -> dict[str, Any]:
    """All columns but `run`; what cannot be known is None, and `state` says why."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    del row["run"]
    try:
        findings = _findings(path)
        row |= {"honest": _honest(findings), **_of_recipe(stored_recipe(path)), **_of_metrics(path), **_of_others(path)}
        found, faults = checkpoint.latest(path / "checkpoints")
        row |= {"saved": found.step if found else 0, "state": _state(findings, found, faults)}
    except (KeyholeError, OSError) as error:
        row["state"] = f"{DAMAGED[0]}{error}"
    return row


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    model, train = recipe.model, recipe.train
    parts = {
        kind: "+".join(spec.name for spec in model.specs(kind)) for kind in ("mixer", "position", "merge", "norm", "feed")
    }
    return {
        "recipe": recipe.hash,
        "source": recipe.data.source.name,
        "model": f"{model.layers}x{model.heads}x{model.width} {parts['mixer']} {parts['position']}",
        "layers": model.layers,
        "heads": model.heads,
        "width": model.width,
        **parts,
        "optimizer": train.optimizer.name,
        "rate": train.rate,
        "seed": train.seed,
        "steps": train.steps,
    }


def _of_metrics(path: Path) -> dict[str, Any]:
    last, dev = last_rows(path, "dev_loss")
    return {
        "step": last.get("step", 0),
        "train_loss": last.get("loss"),
        **{name: last.get(name) for name in ("tokens", "seconds", "tokens_per_second")},
        **{name: dev.get(name) for name in ("dev_loss", "dev_bits_per_byte")},
    }


def _of_others(path: Path) -> dict[str, Any]:
    """What the study, the environment and the clock know of a run."""
    trial = _object(path / "trial.json")
    grown = path / METRICS if (path / METRICS).exists() else path / "recipe.toml"
    return {
        **{name: trial[name] for name in ("study", "arm", "seed") if name in trial},
        "parameters": _object(path / "environment.json").get("parameters"),
        "started": _when(path / "recipe.toml"),
        "modified": _when(grown),
    }


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _findings(path: Path) -> list[dict[str, Any]]:
    file = path / "findings.json"
    found = read_json(file) if file.is_file() else []
    if not isinstance(found, list) or not all(isinstance(finding, dict) and "verdict" in finding for finding in found):
        raise StorageError(f"{file} is damaged: it holds no list of findings; restore it or remove it")
    return found


def _honest(findings: list[dict[str, Any]]) -> str:
    """What the run's audits say. An audit's finding has the name of its rule; the one that stops a training has none."""
    verdicts = {finding["verdict"] for finding in findings if finding.get("name")}
    if "fails" in verdicts:
        return "fails"
    return "yes" if "holds" in verdicts else NOTHING


def _state(findings: list[dict[str, Any]], found: checkpoint.Checkpoint | None, faults: list[str]) -> str:
    if any(finding["verdict"] == "fails" and not finding.get("name") for finding in findings):
        return "stopped by a finding"
    if faults:
        return DAMAGED[1]
    if found is None:
        return "no checkpoint"
    return "done" if found.state.get("done") else "unfinished"


def _when(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
