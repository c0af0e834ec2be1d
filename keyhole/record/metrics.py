"""metrics.jsonl: one JSON object a logged step, appended and flushed, cut back on resume to where the checkpoint was."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from keyhole.core.files import storage_errors

NAME = "metrics.jsonl"


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
