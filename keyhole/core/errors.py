"""Errors that a person can act on.

    KeyholeError              everything we raise on purpose
    ├── InputError            the user's input was wrong            exit code 2
    ├── StorageError          a disk or folder refused              exit code 2
    └── RunStopped            a finding stopped the run             exit code 1

Each message is one sentence that says what was given, what is allowed, and what right usage looks like.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keyhole.core.findings import Finding


class KeyholeError(Exception):
    """The base of all errors that Keyhole raises on purpose."""

    exit_code = 2


class InputError(KeyholeError):
    """The user's input was wrong: a recipe, a file, a name, an option."""


class StorageError(KeyholeError):
    """Writing or reading the record failed: disk full, folder not writable, damaged file."""


class RunStopped(KeyholeError):
    """A finding stopped the run; the record holds everything up to it."""

    exit_code = 1

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.line())
        self.finding = finding


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint that names the nearest allowed word, and all of them when they are few."""
    choices = sorted(allowed)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if not close or len(choices) <= 12:
        hint += f" (allowed: {', '.join(choices)})"
    return hint
