"""environment.json: what a run was made with, so that a difference can be explained."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from keyhole.core.config import Recipe
from keyhole.core.errors import StorageError
from keyhole.core.files import read_object

RECIPE_DIGEST = "recipe_sha256"
"""Under this key stands the SHA-256 of recipe.toml: half of a TOML file may be a whole one, of another model."""

PACKAGES = ("keyhole", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def environment() -> dict[str, Any]:
    """Versions, machine and threads."""
    import torch  # here, so that a listing of runs need not wait for it

    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "command": sys.argv,
    }


def text_digest(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def stored_recipe(folder: Path) -> Recipe:
    """The recipe of a run, every default filled in; one that is not as the run began with it is refused."""
    path, beside = folder / "recipe.toml", folder / "environment.json"
    recipe = Recipe.load(path)
    known = read_object(beside).get(RECIPE_DIGEST) if beside.exists() else None
    if known not in (None, text_digest(path.read_text(encoding="utf-8"))):
        raise StorageError(
            f"{path} is damaged or was changed since this run began; put it back, or, if you changed it knowingly, "
            f"take {RECIPE_DIGEST!r} out of {beside}"
        )
    return recipe


def differences(known: dict[str, Any]) -> list[str]:
    """What has changed since a run began that may change the last bits of its weights."""
    now = environment()
    found = []
    for section, keys in (("versions", ("torch", "numpy", "keyhole")), ("machine", ("capability", "threads"))):
        for key in keys:
            before = known.get(section, {}).get(key)
            if before != now[section][key]:
                found.append(f"{key} was {before} and is {now[section][key]} now: losses agree, but not bit for bit")
    return found


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
