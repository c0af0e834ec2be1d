"""Writing files so that a reader never sees half of one: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError, StorageError


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an operating-system refusal into one clear sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{doing} {path} failed: {reason}; what was saved before is untouched") from error


def fsync(path: Path) -> None:
    """Push a file or a folder to the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a whole file, or leave the old one as it was."""
    data = content.encode() if isinstance(content, str) else content
    with storage_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        fsync(path.parent)


@contextmanager
def whole_folder(folder: Path, doing: str) -> Iterator[Path]:
    """A new folder that appears under its name only when whole: filled beside it, then renamed."""
    folder = folder.absolute()
    with storage_errors(folder, doing):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; give a new folder")
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty, and nothing is written over; give a new folder")
        # Not tempfile.mkdtemp, whose folders nobody else may read.
        temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                fsync(path)
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync(folder.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


REMEDY = "restore it or remove its folder"


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """Read JSON, or say which file is damaged, and what to do about it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} is damaged ({error}); {remedy}") from None


def read_object(path: Path, *keys: str, remedy: str = REMEDY) -> dict[str, Any]:
    """Read a JSON object that has these keys, or say that the file holds none."""
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise StorageError(f"{path} is damaged (it holds no JSON object); {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise StorageError(f"{path} is damaged (it has no {missing[0]!r}); {remedy}")
    return value


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
