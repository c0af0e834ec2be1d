"""Starting a record, and making sure that a resumed run is the run that was started."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyhole.core.config import Recipe, Spec
from keyhole.core.errors import InputError
from keyhole.core.files import read_object, sha256, storage_errors, write_atomically, write_json
from keyhole.parts.loading import resolve_file
from keyhole.record.environment import RECIPE_DIGEST, environment, text_digest
from keyhole.text import Dataset, save_tokenizer

LOCK, STARTING = ".lock", ".starting"
PARTS = ("mixer", "position", "merge", "norm", "feed")


def start_record(out: Path, recipe: Recipe, dataset: Dataset, notes: dict[str, Any]) -> None:
    """Write what defines a run into its directory, which must be new or empty."""
    stored, code = portable(recipe)
    with storage_errors(out, "creating the run directory"):
        out.mkdir(parents=True, exist_ok=True)
        # Whoever is killed from here on leaves a folder that is known to hold nothing but our beginnings.
        (out / STARTING).touch()
        for name, source in code.items():
            (out / "code").mkdir(exist_ok=True)
            shutil.copyfile(source, out / name)
    save_tokenizer(dataset.tokenizer, out)
    digests = {name: sha256(source) for name, source in code.items()}
    data = {"hash": dataset.hash, **dataset.description}
    text = stored.to_toml()
    known = {**environment(), **notes, "data": data, "code": digests, RECIPE_DIGEST: text_digest(text)}
    write_json(out / "environment.json", known)
    # The recipe comes last: a directory with a recipe is a run.
    write_atomically(out / "recipe.toml", text)
    (out / STARTING).unlink(missing_ok=True)


def begin_record(out: Path) -> None:
    """Mark a directory as one in which a record is being begun: whoever is cut off now leaves nothing to go on with."""
    with storage_errors(out, "beginning in"):
        out.mkdir(parents=True, exist_ok=True)
        (out / STARTING).touch()


def has_begun(out: Path) -> None:
    """Take the mark away: what is needed to go on is there."""
    (out / STARTING).unlink(missing_ok=True)


def refuse_if_not_new(out: Path) -> None:
    """A record begins in a folder that holds nothing, or no more than a beginning that was cut off."""
    if out.is_dir() and not (out / STARTING).is_file() and any(path.name != LOCK for path in out.iterdir()):
        raise InputError(f"{out} is not empty; give --out another folder")


def refuse_if_taken(out: Path) -> None:
    """A new run never writes over anything."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give --out a new folder")
    if (out / STARTING).is_file() and not (out / "recipe.toml").exists():
        return  # a start that was cut off before there was anything to go on with
    if out.is_dir() and any(path.name != LOCK for path in out.iterdir()):
        hint = "add --resume to go on with it, or " if (out / "recipe.toml").is_file() else ""
        raise InputError(f"{out} is not empty; {hint}give --out another folder")


def refuse_if_none(out: Path) -> None:
    """Only a run can be resumed."""
    if not (out / "recipe.toml").is_file():
        raise InputError(f"there is no run to resume in {out}; leave --resume out to start one")


def refuse_if_changed(out: Path, recipe: Recipe, dataset_hash: str) -> None:
    """A resumed run must have the recipe, the data and the user's code that it was started with."""
    refuse_if_none(out)
    stored = Recipe.load(out / "recipe.toml")
    now, code = portable(recipe)
    if changed := _first_difference(stored.model_dump(), now.model_dump()):
        key, before, after = changed
        raise InputError(
            f"the recipe changed: {key} is {before!r} in {out} and {after!r} now; "
            "resume with the run's own recipe.toml, or start a new run with another --out"
        )
    known = read_object(out / "environment.json", "data", "code")
    if known["data"]["hash"] != dataset_hash:
        raise InputError(f"the data changed since {out} was started; start a new run with another --out")
    for name, source in code.items():
        if known["code"].get(name) != sha256(source):
            raise InputError(f"{source} changed since {out} was started; resume with {out / 'recipe.toml'}")


def portable(recipe: Recipe, code: dict[str, Path] | None = None) -> tuple[Recipe, dict[str, Path]]:
    """The recipe as a record stores it, and the user's files it wants beside it: paths that mean the same everywhere.

    Several recipes may share one record's files: give the `code` of those before.
    """
    changes: dict[str, Any] = {}
    code = {} if code is None else code
    for kind in PARTS:
        given = getattr(recipe.model, kind)
        if isinstance(given, Spec):
            changes[f"model.{kind}"] = _portable_spec(given, recipe.folder, code)
        else:
            changes[f"model.{kind}"] = [_portable_spec(spec, recipe.folder, code) for spec in given]
    source = recipe.data.source
    prefix, path = ("hf:", source.name[3:]) if source.name.startswith("hf:") else ("", source.name)
    if found := _existing(path, recipe.folder):
        changes["data.source"] = {"name": f"{prefix}{found}", **source.options}
    return recipe.replace(changes), code


def _portable_spec(spec: Spec, folder: Path, code: dict[str, Path]) -> Spec:
    """The same part, its name and options leading to the copies of the user's files."""
    moved = portable_value({"name": spec.name, **spec.options}, folder, code)
    return Spec(name=moved.pop("name"), options=moved)


def portable_value(value: Any, folder: Path, code: dict[str, Path]) -> Any:
    """A value in which `my.py:Mine` leads to the copy of that file, which is added to `code`."""
    if isinstance(value, list):
        return [portable_value(item, folder, code) for item in value]
    if isinstance(value, dict):
        return {key: portable_value(item, folder, code) for key, item in value.items()}
    place, colon, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (colon and place.endswith(".py")):
        return value
    source = resolve_file(place, folder)
    name = _free_name(source, code)
    code[name] = source
    return f"{name}:{attribute}"


@contextmanager
def only_writer(out: Path, what: str = "run", doing: str = "training") -> Iterator[None]:
    """Hold a record for one process; the lock ends with the process, however it ends."""
    new = not out.exists()
    with storage_errors(out, f"opening the {what} directory"):
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another process is {doing} in {out}; wait for it or give --out another folder") from None
        try:
            yield
        finally:
            _leave_no_trace(out, new)


def _leave_no_trace(out: Path, new: bool) -> None:
    """A run that never began leaves no folder behind."""
    if [path.name for path in out.iterdir()] == [LOCK]:
        (out / LOCK).unlink()
        if new:
            out.rmdir()


def _free_name(source: Path, code: dict[str, Path]) -> str:
    name, number = f"code/{source.name}", 2
    while code.get(name, source) != source:
        name, number = f"code/{source.stem}_{number}.py", number + 1
    return name


def _existing(path: str, folder: Path) -> Path | None:
    if ":" in path and not Path(path).exists():
        return None
    for base in (folder, Path.cwd()):
        if (base / path).exists():
            return (base / path).resolve()
    return None


def _first_difference(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, Any, Any] | None:
    for section, values in before.items():
        for key, value in values.items():
            if value != after[section][key]:
                return f"{section}.{key}", value, after[section][key]
    return None
