"""Options of a named thing (a source, a tokenizer, a task), checked against its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest

_EXAMPLES = {int: "a whole number", bool: "true or false", str: "a string"}


def read_options(what: str, spec: Spec, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of `spec`, the defaults filled in.

    `what` says in errors what the spec is. A default of None is a whole number that follows from something else.
    """
    for key, value in spec.options.items():
        if key not in defaults:
            known = nearest(key, defaults) if defaults else "; it takes no options"
            raise InputError(f"{what} {spec.name!r} has no option {key!r}{known}")
        _check(what, spec, key, value, defaults[key])
    return {**defaults, **spec.options}


def _check(what: str, spec: Spec, key: str, value: Any, default: Any) -> None:
    wanted = int if default is None else type(default)
    # A bool is an int to Python, but `length = true` is a mistake.
    if type(value) is not wanted:
        example = 8 if default is None else default
        shown = str(example).lower() if wanted is bool else f'"{example}"' if wanted is str else example
        raise InputError(
            f"option {key} of {what} {spec.name!r} is {value!r}; give {_EXAMPLES[wanted]}, for example {key} = {shown}"
        )
