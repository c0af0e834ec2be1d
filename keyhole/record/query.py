"""Which runs, in what order: `dev_loss<1.5`, `mixer=linear`, sorted by one column. Values never become part of the SQL."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError, nearest
from keyhole.record.columns import COLUMNS

NOTHING = "-"
"""How a value that is not there is written, in tables and in conditions."""
_CONDITION = re.compile(r"\s*([^\s<>=!~]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*", re.S)
_EXAMPLES = "for example dev_loss<1.5, mixer=linear, optimizer!=muon or run~demo"


@dataclass(frozen=True)
class Query:
    """The end of a SELECT, and the values that its question marks stand for."""

    sql: str
    values: tuple[Any, ...]

    @classmethod
    def parse(
        cls,
        where: str | Iterable[str] = (),
        sort: str | None = None,
        descending: bool = False,
        limit: int | None = None,
        folder: Path = Path(),
    ) -> Query:
        """Check what was asked for; all conditions must hold. A run may be named with the listed folder before it."""
        conditions = [_condition(text, folder) for text in ([where] if isinstance(where, str) else where)]
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise InputError(f"limit is {limit!r}; give a number of runs, 1 or more")
        words = " AND ".join(sql for sql, _ in conditions)
        values = [value for _, given in conditions for value in given]
        sql = (f" WHERE {words}" if words else "") + _order(sort, descending)
        return cls(sql, tuple(values)) if limit is None else cls(f"{sql} LIMIT ?", (*values, limit))


def known_column(name: str) -> str:
    """The name of a column, or an error that names the nearest."""
    if name not in COLUMNS:
        raise InputError(f"runs have no column {name!r}; docs/runs.md lists all there are{nearest(name, COLUMNS)}")
    return name


def _order(sort: str | None, descending: bool) -> str:
    # A run without the value comes last either way; then the order of the folders' names, with seed-2 before seed-10.
    down = " DESC" if descending else ""
    if sort is None or known_column(sort) == "run":
        return f" ORDER BY place{down}"
    collate = "" if COLUMNS[sort].kind == "number" else " COLLATE NOCASE"
    return f' ORDER BY "{sort}" IS NULL, "{sort}"{collate}{down}, place'


def _condition(text: str, folder: Path) -> tuple[str, list[Any]]:
    parsed = _CONDITION.fullmatch(text)
    if parsed is None or not parsed[3]:
        raise InputError(f"{text!r} is no condition; write column, sign and value, {_EXAMPLES}")
    name, sign, value = known_column(parsed[1]), parsed[2].replace("==", "="), parsed[3]
    kind = COLUMNS[name].kind
    value = value.encode("utf-8", "replace").decode()
    if name == "run":
        value = value.removeprefix(f"{folder}/")
    if value == NOTHING and sign in ("=", "!="):
        there = f'("{name}" IS NULL OR "{name}" = \'-\')'
        return (there if sign == "=" else f"NOT {there}"), []
    if sign == "~":
        if kind == "number":
            raise InputError(f"{text!r}: {name} is a number; compare it with =, !=, <, <=, > or >=")
        return f'instr(lower("{name}"), lower(?)) > 0', [value]
    if kind == "number":
        return f'"{name}" {sign} ?', [_number(text, name, value)]
    if kind == "text" and sign not in ("=", "!="):
        raise InputError(f"{text!r}: {name} is text; compare it with =, != or ~ (contains)")
    return f'"{name}" {sign} ?', [value]


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise InputError(f"{text!r}: {name} is a number, and {value!r} is none; {_EXAMPLES}")
    return number
