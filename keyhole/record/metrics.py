"""metrics.jsonl: one JSON object a logged step, appended and flushed, cut back on resume to where the checkpoint was."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyhole.core.files import storage_errors

NAME = "metrics.jsonl"
BLOCK = 1 << 16
"""Bytes read at a time from the end of the file."""


class MetricsWriter:
    """Appends rows. `offset` is where the file ends: a checkpoint remembers it. `lost`: the file ended before that."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        with storage_errors(path, "opening"):
            self._file = path.open("ab")
            there = self._file.tell()
            self.lost = there < offset
            if there != offset:
                self._file.truncate(_whole_rows(path) if self.lost else offset)
            self._file.seek(0, os.SEEK_END)

    @property
    def offset(self) -> int:
        """The size of the file in bytes."""
        return self._file.tell()

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. What is no number becomes null: JSON has no infinity."""
        row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        with storage_errors(self.path, "writing"):
            self._file.write((json.dumps(row) + "\n").encode())
            self._file.flush()

    def sync(self) -> None:
        """Push the rows to the disk, before a checkpoint refers to them."""
        with storage_errors(self.path, "writing"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole_rows(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole rows; a last row that was cut off is left out."""
    path = folder / NAME
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def last_rows(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last whole row, and the last that holds `key`; read from the end, so that a long run is as quick as a short one.

    Either is empty where there is none.
    """
    path, needle = folder / NAME, json.dumps(key).encode()
    last: dict[str, Any] = {}
    if path.is_file():
        for line in _lines_backwards(path):
            if last and needle not in line:
                continue
            row = _row(line)
            last = last or row
            if key in row:
                return last, row
    return last, {}


def _row(line: bytes) -> dict[str, Any]:
    """One line as a row; empty where it is none, such as the beginning of a row that is being written."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _lines_backwards(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            # What stands before the first line break belongs to a line that begins in an earlier block.
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
            end = start
        yield rest
