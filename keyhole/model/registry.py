"""From a part's name to the part: built in by name, or a class in the user's file or package.

`"rope"`, `"file.py:Thing"` and `"package.module:Thing"` all come through the same door: the constructor is given what
it names among the facts of the model, its options come from the recipe, and what it does not know is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, KeyholeError, nearest
from keyhole.model.guard import Guarded, first_line
from keyhole.parts.loading import load_from

CATALOGUE: dict[str, dict[str, str]] = {
    "mixer": {
        "softmax": "keyhole.mixers.softmax:Softmax",
        "window": "keyhole.mixers.window:Window",
        "linear": "keyhole.mixers.linear:Linear",
        "polynomial": "keyhole.mixers.polynomial:Polynomial",
        "ridge": "keyhole.mixers.ridge:Ridge",
        "statespace": "keyhole.mixers.statespace:StateSpace",
        "recurrent": "keyhole.mixers.recurrent:Recurrent",
        "average": "keyhole.mixers.average:Average",
        "none": "keyhole.mixers.none:NoMixer",
    },
    "position": {
        "learned": "keyhole.parts.position:Learned",
        "sinusoidal": "keyhole.parts.position:Sinusoidal",
        "rope": "keyhole.parts.position:Rope",
        "alibi": "keyhole.parts.position:Alibi",
        "none": "keyhole.parts.position:NoPosition",
    },
    "merge": {
        "concat": "keyhole.parts.merge:Concat",
        "shuffle": "keyhole.parts.merge:Shuffle",
        "shift": "keyhole.parts.merge:Shift",
        "reweight": "keyhole.parts.merge:Reweight",
        "reweight-running": "keyhole.parts.merge:ReweightRunning",
        "talking": "keyhole.parts.merge:Talking",
    },
    "norm": {"layer": "keyhole.parts.norm:LayerNorm", "rms": "keyhole.parts.norm:RMSNorm"},
    "feed": {
        "gelu": "keyhole.parts.feed:Gelu",
        "relu-squared": "keyhole.parts.feed:ReluSquared",
        "swiglu": "keyhole.parts.feed:Swiglu",
    },
}
_TAKES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
FACTS = ("width", "heads", "block", "layer", "folder", "kv_heads", "position", "merge")


@dataclass(frozen=True)
class PartInfo:
    """What `keyhole parts` says of a built-in part."""

    kind: str
    name: str
    summary: str
    options: dict[str, Any]
    warning: str | None = None


def is_builtin(kind: str, name: str) -> bool:
    """Whether a name is one of ours (the rest is the user's own code)."""
    return name in CATALOGUE[kind]


def find(kind: str, name: str, folder: Path) -> type[nn.Module]:
    """The class behind a name; relative files are looked up in `folder`, then in the working directory."""
    place, colon, attribute = CATALOGUE[kind].get(name, name).rpartition(":")
    if not colon:
        hint = nearest(name, CATALOGUE[kind])
        raise InputError(f'there is no {kind} {name!r}{hint}; a {kind} of your own is written "my.py:Mine"')
    found = load_from(f"{place}:{attribute}", folder)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise InputError(f"{name} is not a torch.nn.Module class; write class {attribute}(nn.Module): ...")
    return found


def construct(kind: str, spec: Spec, folder: Path, **facts: Any) -> nn.Module:
    """Build a part from its spec and the facts its constructor asks for."""
    cls = find(kind, spec.name, folder)
    options = _check_options(kind, spec, cls)
    wanted = _parameters(cls)
    facts["folder"] = folder
    given = {key: value for key, value in facts.items() if key in wanted and key not in options}
    try:
        part = cls(**given, **options)
    except KeyholeError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{kind} {spec} could not be built: {first_line(error)}") from error
    return part if is_builtin(kind, spec.name) else Guarded(part, kind, spec.name)


def check(kind: str, spec: Spec, folder: Path) -> None:
    """Whether a part can be built from its spec, without building it."""
    _check_options(kind, spec, find(kind, spec.name, folder))


def accepts(kind: str, spec: Spec, folder: Path, fact: str) -> bool:
    """Whether the part's constructor asks for this fact."""
    return fact in _parameters(find(kind, spec.name, folder))


def warning(kind: str, name: str) -> str | None:
    """What must be said of a built-in part before anyone believes its loss; None where there is nothing to say."""
    if not is_builtin(kind, name) or not getattr(find(kind, name, Path()), "needs_whole_sequence", False):
        return None
    return (
        f"{kind} {name} reads the future: every position learns of those after it, so its loss is lower than it can be "
        f"when writing, and proves nothing; {name}-running is its honest form"
    )


def catalogue() -> list[PartInfo]:
    """All built-in parts with their one-line summaries and options."""
    found = []
    for kind, names in CATALOGUE.items():
        for name in names:
            cls = find(kind, name, Path())
            summary = inspect.getdoc(cls) or ""
            found.append(PartInfo(kind, name, summary.split("\n")[0], _options(cls), warning(kind, name)))
    return found


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    # nn.Module's own constructor is declared to take anything, and takes nothing.
    return {} if cls.__init__ is nn.Module.__init__ else inspect.signature(cls).parameters


def _options(cls: type) -> dict[str, Any]:
    named = [p for p in _parameters(cls).values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: p.default for p in named if p.name not in FACTS}


def _check_options(kind: str, spec: Spec, cls: type) -> dict[str, Any]:
    parameters = _parameters(cls)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return spec.options
    allowed = _options(cls)
    for key, value in spec.options.items():
        if key not in allowed:
            hint = nearest(key, allowed) if allowed else f"; {spec.name} has no options"
            raise InputError(f"unknown option {key!r} of {kind} {spec.name!r}{hint}")
        default = allowed[key]
        plain = isinstance(default, bool | int | float | str)
        number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
        if plain and type(value) is not type(default) and not number:
            raise InputError(
                f"{kind} {spec.name!r}: option {key} = {value!r} is not valid; it takes {_TAKES[type(default)]}"
                + ("" if isinstance(default, bool) else f" such as {default!r}")
            )
    return spec.options
