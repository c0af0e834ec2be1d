"""environment.json: what a run was made with, so that a difference can be explained."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib import metadata
from typing import Any

RECIPE_DIGEST = "recipe_sha256"
"""Under this key stands the SHA-256 of recipe.toml: half of a TOML file may be a whole one, of another model."""

PACKAGES = ("keyhole", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def environment() -> dict[str, Any]:
    """Versions, machine and threads."""
    import torch  # here, since records are opened by what never computes, and reading should be quick

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
