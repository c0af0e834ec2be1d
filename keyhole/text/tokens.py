"""The token cache: encoded text as a file, named by what it was made of, checked when opened, read by memory map."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keyhole.core.errors import KeyholeError
from keyhole.core.files import read_json, sha256, write_atomically, write_json

Tokens = NDArray[np.integer]


def cache_folder() -> Path:
    """Where token files lie: the environment variable `KEYHOLE_CACHE`, or `~/.cache/keyhole`."""
    return Path(os.environ.get("KEYHOLE_CACHE") or Path("~/.cache/keyhole").expanduser())


def cache_key(**parts: str | int | float) -> str:
    """A name for what is made of these parts, and of nothing else."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def token_file(ids: Tokens | Callable[[], Tokens], key: str) -> Tokens:
    """The token numbers stored under `key`; made (`ids` may be a function that makes them) and stored if need be.

    A file that is missing, truncated or altered is made again. Where the cache cannot be written the numbers stay in
    memory: an `np.memmap` comes from the cache, a plain array does not.
    """
    path = cache_folder() / "tokens" / f"{key}.bin"
    stored = _open(path)
    if stored is not None:
        return stored
    made = _narrow(ids() if callable(ids) else ids)
    try:
        write_atomically(path, made.tobytes())
        # The description last: without it the file does not count.
        write_json(_describing(path), {"dtype": made.dtype.name, "count": len(made), "sha256": sha256(path)})
    except (KeyholeError, OSError):
        return made
    stored = _open(path)
    return made if stored is None else stored


def _describing(path: Path) -> Path:
    return path.with_suffix(".json")


def _narrow(ids: Tokens) -> Tokens:
    """Two bytes a token where all numbers fit into them, else four."""
    fits = ids.size == 0 or (ids.min() >= 0 and ids.max() <= np.iinfo(np.uint16).max)
    return ids.astype(np.uint16 if fits else np.int32)


def _open(path: Path) -> Tokens | None:
    """The stored numbers, or None unless every byte is as it was written."""
    try:
        about = read_json(_describing(path))
        dtype = {"uint16": np.uint16, "int32": np.int32}[about["dtype"]]
        if path.stat().st_size != about["count"] * np.dtype(dtype).itemsize or sha256(path) != about["sha256"]:
            return None
        return np.memmap(path, dtype=dtype, mode="r")
    except (KeyholeError, OSError, KeyError, TypeError, ValueError):
        return None
