"""Runs side by side: where their recipes and environments differ, and how each ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError
from keyhole.core.files import read_object
from keyhole.record.environment import RECIPE_DIGEST, stored_recipe
from keyhole.record.summary import summarise

PASSING = ("command", RECIPE_DIGEST, "precision.reason", "parameters")
"""What an environment says that explains no difference, or that stands elsewhere."""


def compare_runs(runs: Iterable[Any]) -> dict[str, Any]:
    """What differs between runs, given as paths or opened.

    `runs` has each run's columns; `recipe` and `environment` have the keys that differ, each with one value for each run
    (None where it has none); `remarks` say where the losses cannot be compared as they are.
    """
    paths = [Path(getattr(run, "path", run)) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    if len(paths) < 2:
        raise InputError(f"comparing takes two runs or more, not {len(paths)}; keyhole runs --compare runs/a runs/b")
    for path in paths:
        if not (path / "recipe.toml").is_file():
            what = "is not a run: it has no recipe.toml" if path.is_dir() else "is not there"
            raise InputError(f"{path} {what}; keyhole runs lists those there are")
    environments = [_environment(path) for path in paths]
    recipe = _differing([_recipe(path) for path in paths])
    environment = _differing([{key: value for key, value in one.items() if key not in PASSING} for one in environments])
    rows = [{"run": str(path), **summarise(path)} for path in paths]
    return {"runs": rows, "recipe": recipe, "environment": environment, "remarks": _remarks(rows, recipe, environment)}


def _environment(path: Path) -> dict[str, Any]:
    file = path / "environment.json"
    return _flat(read_object(file)) if file.exists() else {}


def _recipe(path: Path) -> dict[str, Any]:
    """Section and key joined by a dot; a part with its options is one value."""
    sections = stored_recipe(path).model_dump()
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat


def _differing(all_values: list[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = {key: None for values in all_values for key in values}
    found = {key: [values.get(key) for values in all_values] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values[1:])}


def _remarks(rows: list[dict[str, Any]], recipe: dict[str, list[Any]], environment: dict[str, list[Any]]) -> list[str]:
    said = []
    if len(set(environment.get("data.hash", ())) - {None}) > 1 or recipe.keys() & {
        "data.tokenizer",
        "data.split",
        "data.rows",
    }:
        said.append("the data differ, so losses are not comparable; bits per byte are where the text is the same")
    if "train.eval_tokens" in recipe:
        said.append("the dev losses read different numbers of tokens")
    said += [f"{row['run']} fails an audit: its loss is not comparable" for row in rows if row["honest"] == "fails"]
    said += [f"{row['run']} is not done: {row['state']}" for row in rows if row["state"] != "done"]
    return said
