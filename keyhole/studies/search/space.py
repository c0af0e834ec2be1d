"""What a search varies: recipe keys, each with its range or its choices.

[space]
"train.rate" = { low = 1e-3, high = 1e-1, log = true, points = 5 }     # points: how many values a grid takes
"model.layers" = { low = 2, high = 6 }
"model.position" = ["rope", { name = "learned" }]
"model.mixer.lam" = { low = 0.01, high = 1.0, log = true }             # an option of a part
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError, create_model

from keyhole.core.config import Data, Model, Recipe, Section, Spec, Train
from keyhole.core.errors import InputError, nearest

SECTIONS: dict[str, type[Section]] = {"data": Data, "model": Model, "train": Train}
EXAMPLE = '"train.rate" = { low = 1e-3, high = 1e-1, log = true } or "model.position" = ["rope", "learned"]'
MOST_POINTS = 10_000
_OTHER_TEXT = "its values would be measured on different text, and their losses could not be compared"
_LUCK = "the best of several seeds is luck; `repeats` gives every trial the same seeds"
REFUSED = {
    **dict.fromkeys(("data.source", "data.tokenizer", "data.rows", "data.split"), _OTHER_TEXT),
    **dict.fromkeys(("data.seed", "train.seed"), _LUCK),
}
Settings = dict[str, Any]
"""Recipe key -> value, as `Recipe.replace` takes them."""


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers count."""
    step: int = 1
    """Between whole numbers."""
    points: int | None = None
    """How many values a grid takes; every whole number when not given."""

    def values(self) -> tuple[Any, ...]:
        """What a grid takes, from low to high."""
        if self.points is None:
            if not self.whole:
                raise InputError(f'a grid needs to know how many values of "{self.key}" to take; add points = 5')
            return tuple(range(int(self.low), int(self.high) + 1, self.step))
        spread = np.geomspace if self.log else np.linspace
        between = spread(self.low, self.high, self.points).tolist()[1:-1]
        if self.whole:
            return tuple(sorted({int(self.low), int(self.high), *map(round, between)}))
        # Six digits, so that a table reads .0316228 and a recipe written by hand can repeat it.
        return (self.low, *(float(f"{value:.6g}") for value in between), self.high)

    @property
    def size(self) -> int | None:
        """How many values there are; None for a continuous range."""
        return (int(self.high) - int(self.low)) // self.step + 1 if self.whole else None

    def draw(self, random: np.random.Generator) -> Any:
        """A value at random: even in its logarithm where `log` says so."""
        if self.log:
            # Half a step beyond the ends, so that the first and the last whole number have their full share.
            edge = 0.5 if self.whole else 0.0
            drawn = math.exp(random.uniform(math.log(self.low - edge), math.log(self.high + edge)))
            drawn = min(max(drawn, self.low), self.high)
            return round(drawn) if self.whole else drawn
        if self.whole:
            return int(self.low) + self.step * int(random.integers(self.size or 1))
        return float(random.uniform(self.low, self.high))

    def to_dict(self) -> dict[str, Any]:
        """The range as its table."""
        return {"low": self.low, "high": self.high, "log": self.log, "step": self.step, "points": self.points}


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    key: str
    options: tuple[Any, ...]

    def values(self) -> tuple[Any, ...]:
        """All of them."""
        return self.options

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.options)

    def draw(self, random: np.random.Generator) -> Any:
        """One of them, each as likely."""
        return self.options[int(random.integers(len(self.options)))]

    def to_dict(self) -> list[Any]:
        """The choices as their list."""
        return list(self.options)


Axis = Range | Choice


@dataclass(frozen=True)
class Space:
    """All that a search varies."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where a range is continuous."""
        sizes = [axis.size for axis in self.axes]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def grid(self) -> Iterator[Settings]:
        """Every combination once; the last key varies fastest."""
        values = [axis.values() for axis in self.axes]
        count = math.prod(map(len, values))
        if count > MOST_POINTS:
            raise InputError(f"this grid has {count:,} points, and at most {MOST_POINTS:,} are walked; take fewer values")
        keys = [axis.key for axis in self.axes]
        return (dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values))

    def draw(self, random: np.random.Generator) -> Settings:
        """A combination at random."""
        return {axis.key: axis.draw(random) for axis in self.axes}

    def to_dict(self) -> dict[str, Any]:
        """The space as its table."""
        return {axis.key: axis.to_dict() for axis in self.axes}

    @classmethod
    def parse(cls, table: Mapping[str, Any], recipe: Recipe) -> Space:
        """Check a `[space]` table against the keys of a recipe."""
        if not table:
            raise InputError(f"[space] is empty; say what to vary, for example {EXAMPLE}")
        return cls(tuple(_axis(key, value, table, recipe) for key, value in table.items()))


def name_of(value: Any) -> str:
    """A value in one word, the same for equal values."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def apply(recipe: Recipe, settings: Settings) -> Recipe:
    """The recipe with these settings; options of parts after the parts themselves."""
    recipe = recipe.replace({key: value for key, value in settings.items() if key.count(".") == 1})
    for key, value in settings.items():
        if key.count(".") == 2:
            section, part, option = key.split(".")
            spec: Spec = getattr(getattr(recipe, section), part)
            recipe = recipe.replace({f"{section}.{part}": {"name": spec.name, **spec.options, option: value}})
    return recipe


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """`train.rate` without its quotes is a table in a table to TOML: the same keys, dotted."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and key.count(".") < 2 and not _is_axis(key, value):
            found.update(flatten({f"{key}.{inner}": item for inner, item in value.items()}))
        else:
            found[key] = value
    return found


def _is_axis(key: str, value: Mapping[str, Any]) -> bool:
    """Whether a table says what to vary, or holds tables that do."""
    section, _, name = key.partition(".")
    return not all(isinstance(item, dict | list) for item in value.values()) or (bool(name) and not _is_part(section, name))


def _axis(key: str, value: Any, table: Mapping[str, Any], recipe: Recipe) -> Axis:
    section, name, option = _read_key(key)
    if key in REFUSED:
        raise InputError(f'"{key}" is not for searching: {REFUSED[key]}')
    axis: Axis
    if isinstance(value, list):
        axis = _choice(key, value)
    elif isinstance(value, dict):
        axis = _range(key, value, None if option else _number_of(section, name))
    else:
        raise InputError(f'"{key}" = {value!r} does not say what to vary; write a range or a list, as in {EXAMPLE}')
    ends = axis.options if isinstance(axis, Choice) else (axis.low, axis.high)
    if option:
        _check_option(key, (section, name, option), ends, table, recipe)
        return axis
    for end in ends:
        _check_value(section, name, end, recipe)
    return axis


def _read_key(key: str) -> tuple[str, str, str]:
    section, _, rest = key.partition(".")
    name, _, option = rest.partition(".")
    known = [f"{word}.{field}" for word, fields in SECTIONS.items() for field in fields.model_fields]
    if f"{section}.{name}" not in known:
        meant = next((place for place in known if place.endswith(f".{key}")), f"{section}.{name}")
        raise InputError(f"[space] has the unknown key {key!r}{nearest(meant, known)}")
    if option and not _is_part(section, name):
        raise InputError(f'"{key}": {section}.{name} is no part and has no options; search "{section}.{name}" itself')
    return section, name, option


def _is_part(section: str, name: str) -> bool:
    field = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    return field is not None and "Spec" in str(field.annotation)


def _choice(key: str, value: list[Any]) -> Choice:
    names = [name_of(item) for item in value]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f'"{key}" lists {", ".join(twice)} more than once')
    if len(value) < 2:
        raise InputError(f'"{key}" has {len(value)} choice; give two or more, or put it under [set]')
    return Choice(key, tuple(value))


def _range(key: str, value: dict[str, Any], number: type | None) -> Range:
    """A range of the kind of number that the key takes; of an option, of the kind that is written."""
    allowed = ("low", "high", "log", "step", "points")
    for word in value:
        if word not in allowed:
            raise InputError(f'"{key}" has the unknown word {word!r}{nearest(word, allowed)}')
    low, high = value.get("low"), value.get("high")
    if not all(type(end) in (int, float) and math.isfinite(end) for end in (low, high)):
        raise InputError(f'"{key}" needs two numbers, low and high, for example {"{ low = 2, high = 6 }"}')
    log, step, points = value.get("log", False), value.get("step", 1), value.get("points")
    if number is float:
        low, high = float(low), float(high)
    whole = type(low) is int and type(high) is int
    if number is int and not whole:
        raise InputError(f'"{key}" takes whole numbers; write low = {math.ceil(low)}, high = {math.floor(high)}')
    if type(log) is not bool or type(step) is not int or not (points is None or type(points) is int):
        raise InputError(f'"{key}": log is true or false, step and points are whole numbers')
    if low >= high:
        raise InputError(f'"{key}": low = {low} is not below high = {high}')
    if log and low <= 0:
        raise InputError(f'"{key}": a logarithmic range begins above 0, not at low = {low}')
    if "step" in value and (not whole or log or step < 1 or (high - low) % step):
        raise InputError(f'"{key}": step = {step} must lead from low = {low} to high = {high} in whole numbers')
    if points is not None and points < 2:
        raise InputError(f'"{key}": points = {points}; a grid takes at least both ends')
    return Range(key, low, high, log, whole, step, points)


def _number_of(section: str, name: str) -> type | None:
    """Which kind of number a recipe key takes, if any."""
    annotation = SECTIONS[section].model_fields[name].annotation
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in (float, int) if kind in kinds), None)


def _check_value(section: str, name: str, value: Any, recipe: Recipe) -> None:
    """One value on its own; whether values fit together is seen when they are put together."""
    field = SECTIONS[section].model_fields[name]
    one = create_model("OneKey", __base__=Section, value=(field.annotation, field))
    try:
        found = one.model_validate({"value": value})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        message = f"{message[0].lower()}{message[1:]}"
        raise InputError(f'"{section}.{name}": {value!r} is not a value of this key: {message}') from None
    given = getattr(found, "value")  # noqa: B009 - the model is made above, no type checker knows its field
    for spec in given if isinstance(given, tuple) else (given,):
        if isinstance(spec, Spec):
            check_part(section, name, spec, recipe)


def check_part(section: str, name: str, spec: Spec, recipe: Recipe) -> None:
    """Whether a part of this name exists and takes these options."""
    from keyhole.model import registry
    from keyhole.training.optim import read_options
    from keyhole.training.schedule import build_schedule

    if section == "model":
        registry.check(name, spec, recipe.folder)
    elif name == "optimizer":
        read_options(spec)
    elif name == "schedule":
        build_schedule(spec, recipe.train.warmup)


def _check_option(
    key: str, place: tuple[str, str, str], values: tuple[Any, ...], table: Mapping[str, Any], recipe: Recipe
) -> None:
    """Every part that the search may put there must take the option."""
    section, name, option = place
    chosen = table.get(f"{section}.{name}", [getattr(getattr(recipe, section), name).model_dump()])
    for item in chosen if isinstance(chosen, list) else [chosen]:
        if not isinstance(item, str | dict):
            raise InputError(f'"{key}": {section}.{name} is a list of parts; write whole lists as choices of it instead')
        written = {"name": item} if isinstance(item, str) else item
        for value in values:
            options = {word: given for word, given in written.items() if word != "name"} | {option: value}
            try:
                check_part(section, name, Spec(name=written.get("name", ""), options=options), recipe)
            except InputError as error:
                raise InputError(f'"{key}": {error}') from None
