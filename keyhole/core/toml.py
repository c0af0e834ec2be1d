"""Writing TOML (Python's `tomllib` only reads it). None is left out: a key that is not there has its default."""

from __future__ import annotations

import json
from datetime import date, time
from typing import Any


def dotted(*steps: str) -> str:
    """The name of a table in a table, `arms.rope`, each step quoted where it must be."""
    return ".".join(map(_key, steps))


def to_toml(sections: dict[str, dict[str, Any]]) -> str:
    """A dictionary of tables as TOML text that `tomllib` reads back equal; see `dotted` for tables in tables."""
    blocks = []
    for name, values in sections.items():
        lines = [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        given = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(given) + " }"
    raise TypeError(f"no TOML form for {value!r}")


def _key(key: str) -> str:
    bare = key and all((character.isalnum() and character.isascii()) or character in "-_" for character in key)
    return key if bare else _value(key)
