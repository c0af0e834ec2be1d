"""Many runs, quick to list: an SQLite file `.index.sqlite` in the listed folder, one row a run.

The run directories are the truth, and the index is only what was last read of them. Each row carries a stamp, the sizes and
times of the files it was read from: a listing looks at every run's stamp, reads those that changed, drops those that are
gone. So deleting the index loses nothing, and one that is damaged, locked or of another version costs a note and some time.
Paths are relative to the folder, which may be moved. The journal is a plain file: SQLite's write-ahead log does not work on
network file systems.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keyhole.core.errors import InputError
from keyhole.record.columns import COLUMNS
from keyhole.record.query import Query

NAME = ".index.sqlite"
BUSY_SECONDS = 5.0
"""How long to wait for another process that is writing; its transactions are short."""
MANY = 500
"""So many runs are read and written at a time, and more are announced."""
READ_FROM = ("recipe.toml", "environment.json", "metrics.jsonl", "findings.json", "trial.json")
SAVED = ("state.json", "weights.safetensors", "optimizer.safetensors")
_KINDS = {"text": "TEXT", "number": "NUMERIC", "time": "TEXT"}
_TABLE = "path BLOB PRIMARY KEY, stamp TEXT, place TEXT, " + ", ".join(
    f'"{name}" {_KINDS[column.kind]}' for name, column in COLUMNS.items()
)
VERSION = zlib.crc32(f"2 {_TABLE}".encode()) & 0x7FFFFFFF
"""Of the table and of how its rows are read: raise the number in it when `summarise` changes its mind about a run."""
_UNUSABLE = {
    getattr(sqlite3, f"SQLITE_{word}")
    for word in ("BUSY", "LOCKED", "READONLY", "CANTOPEN", "IOERR", "FULL", "PERM", "AUTH")
}
"""What SQLite says when a new file would help no more than the old one."""


def list_runs(
    folder: str | Path = "runs",
    *,
    where: str | Iterable[str] = (),
    sort: str | None = None,
    descending: bool = False,
    limit: int | None = None,
    reindex: bool = False,
) -> list[dict[str, Any]]:
    """A row for each run below a folder: where it stands, what it is, how good.

    `where` takes conditions such as "dev_loss<1.5", "mixer=linear", "optimizer!=muon", "run~demo" (contains), all of which
    must hold; `sort` a column. docs/runs.md lists the columns. `reindex` reads every run anew.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; keyhole train RECIPE.toml makes the first run")
    query = Query.parse(where, sort, descending, limit, folder)
    found = dict(find_runs(folder))
    file = folder / NAME
    if not found:
        _remove(file)  # it would have nothing to say, and an empty folder may become a run
        return []
    if "" in found:  # the folder is itself a run, and a run's folder holds its record alone
        return _without(None, folder, found, query, reindex)
    for _ in range(2):
        try:
            with closing(sqlite3.connect(file, timeout=BUSY_SECONDS)) as base:
                return _answer(base, folder, found, query, reindex)
        except sqlite3.Error as error:
            if _code(error) in _UNUSABLE:
                _note(f"listing without the index {file}, which cannot be used ({error})")
                return _without(file, folder, found, query, reindex)
            _note(f"the index {file} is damaged ({error}) and is made anew")
            _remove(file)
    return _without(None, folder, found, query, reindex)


def find_runs(folder: Path) -> Iterator[tuple[str, str]]:
    """Every run below a folder, as a relative path with the stamp of what its row is read from.

    A run's copied code and its checkpoints are not searched, nor are hidden folders and links to folders.
    """
    waiting = [""]
    while waiting:
        place = waiting.pop()
        here = f"{folder}/{place}"
        files, folders = _entries(here)
        if "recipe.toml" in files:
            saved = _saved_stamps(f"{here}/checkpoints") if "checkpoints" in folders else ()
            yield place, " ".join([*(files.get(name, "") for name in READ_FROM), *saved])
            folders = [name for name in folders if name not in ("code", "checkpoints")]
        waiting += [f"{place}/{name}" if place else name for name in folders if name[0] != "."]


def _entries(here: str) -> tuple[dict[str, str], list[str]]:
    """The stamps of the files that a row is read from, and the names of the folders."""
    files: dict[str, str] = {}
    folders: list[str] = []
    with suppress(OSError), os.scandir(here) as entries:  # gone in the meantime, or not ours to read
        for entry in entries:
            name = entry.name
            if name in READ_FROM:
                files[name] = _stamp(f"{here}/{name}")
            elif entry.is_dir(follow_symlinks=False):
                folders.append(name)
    return files, folders


def _saved_stamps(checkpoints: str) -> list[str]:
    """Those of the files of the newest checkpoint, which a row vouches for."""
    steps = sorted(name for name in _entries(checkpoints)[1] if name.startswith("step-"))
    return [_stamp(f"{checkpoints}/{steps[-1]}/{name}") for name in SAVED] if steps else []


def _stamp(file: str) -> str:
    try:
        seen = os.stat(file)
    except OSError:
        return "gone"
    return f"{seen.st_mtime_ns}:{seen.st_size}"


def _answer(
    base: sqlite3.Connection, folder: Path, found: dict[str, str], query: Query, reindex: bool
) -> list[dict[str, Any]]:
    _prepare(base, folder / NAME)
    _refresh(base, folder, found, reindex)
    names = list(COLUMNS)
    facts = ", ".join(f'"{name}"' for name in names[1:])
    chosen = base.execute(f"SELECT path, {facts} FROM runs{query.sql}", query.values)
    start = "" if folder == Path() else f"{folder}/"
    return [dict(zip(names, (_named(start, path), *values), strict=True)) for path, *values in chosen]


def _named(start: str, path: bytes) -> str:
    return start + path.decode("utf-8", "surrogateescape") if path else start[:-1] or "."


def _without(file: Path | None, folder: Path, found: dict[str, str], query: Query, reindex: bool) -> list[dict[str, Any]]:
    """The same answer from memory; what the file can still be read for need not be read from the runs."""
    with closing(sqlite3.connect(":memory:")) as base:
        _prepare(base, folder / NAME)
        with suppress(sqlite3.Error):
            if file is not None:
                _copy(file, base)
        return _answer(base, folder, found, query, reindex)


def _copy(file: Path, base: sqlite3.Connection) -> None:
    uri = f"file:{quote(str(file.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=0)) as source:
        if source.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            rows = source.execute("SELECT * FROM runs").fetchall()
            _insert(base, rows)


def _prepare(base: sqlite3.Connection, file: Path) -> None:
    """A table of this version, whatever was there before. Damage shows when it is read, which every listing does whole."""
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    with base:
        base.execute("BEGIN IMMEDIATE")
        (version,) = base.execute("PRAGMA user_version").fetchone()
        if version == VERSION:
            return  # another process was quicker
        base.execute("DROP TABLE IF EXISTS runs")
        base.execute(f"CREATE TABLE runs ({_TABLE})")
        base.execute(f"PRAGMA user_version = {VERSION}")
    if version:
        _note(f"the index {file} is of another version of keyhole and is made anew")


def _refresh(base: sqlite3.Connection, folder: Path, found: dict[str, str], reindex: bool) -> None:
    """Read what is new or changed, forget what is gone; nothing is written where nothing happened."""
    known = {path.decode("utf-8", "surrogateescape"): stamp for path, stamp in base.execute("SELECT path, stamp FROM runs")}
    gone = known.keys() - found.keys()
    if gone:  # but one that began, and that another process found, since we looked is not gone
        gone -= dict(find_runs(folder)).keys()
    changed = [(path, stamp) for path, stamp in found.items() if reindex or known.get(path) != stamp]
    if gone or changed:
        with base:  # an index that cannot be written says so here, before anything was read for it
            base.execute("BEGIN IMMEDIATE")
            base.execute(f"PRAGMA user_version = {VERSION}")
            base.executemany("DELETE FROM runs WHERE path = ?", [(os.fsencode(path),) for path in gone])
    if len(changed) >= MANY:
        _note(f"reading {len(changed):,} runs below {folder}; the next listing reads only what changes")
    for start in range(0, len(changed), MANY):
        rows = [_row(folder, path, stamp) for path, stamp in changed[start : start + MANY]]
        _insert(base, rows)


def _insert(base: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * (len(COLUMNS) + 3))
    with base:
        base.executemany(f"INSERT OR REPLACE INTO runs VALUES ({marks})", rows)


def _row(folder: Path, path: str, stamp: str) -> tuple[Any, ...]:
    from keyhole.record.summary import DAMAGED, summarise

    summary = summarise(folder / path)
    if str(summary["state"]).startswith(DAMAGED):
        stamp = "read again"
    values = (path, *(summary[name] for name in COLUMNS if name != "run"))
    return (os.fsencode(path), stamp, *map(_value, (_place(path), *values)))


def _place(path: str) -> str:
    """A path that sorts as people count: seed-2 before seed-10, rate-0.0003 before rate-0.001, a folder in one piece."""
    counted = re.sub(r"(?<![\d.])\d+", lambda digits: f"{digits[0]:0>12}{len(digits[0])}", path)
    return counted.replace("/", "\x01")


def _value(value: Any) -> Any:
    """What SQLite can hold: names of files may hold bytes that are no text, and numbers may be larger than its own."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value if value is None or isinstance(value, float) or _is_short(value) else str(value)


def _is_short(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _remove(file: Path) -> None:
    for ending in ("-journal", "-wal", "-shm", ""):
        with suppress(OSError):
            os.unlink(f"{file}{ending}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
