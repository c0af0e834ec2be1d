"""A study as it is written: a base recipe, named arms, seeds, one budget, what to measure.

[study]
recipe = "../first.toml"        relative to the study's file
baseline = "baseline"           the arm that all others are compared with; the first where none is named
seeds = 5                       how many, or a list of them
steps = 600                     the budget: steps, tokens, seconds or flops; the recipe's own where none is given

[set]                           changes for all arms
train.eval_tokens = 8192

[arms.baseline]
[arms.rope]
model.position = "rope"

[rates]                         optional: every arm searches its own learning rate, with the same number of trials
values = [0.01, 0.03, 0.1]

[measure]
texts = { normal = "To be, or not to be" }
past = [2, 4]                   loss beyond the trained length, at these multiples of the block
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from keyhole.core.config import Recipe, Section, first_error, read_toml
from keyhole.core.errors import InputError, nearest
from keyhole.parts.loading import resolve_file

BUDGETS = ("steps", "tokens", "seconds", "flops")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
SECTIONS = ("data", "model", "train")
RATE_SEEDS = 10_000
"""The first seed of a search of rates: no study's own seed, so that nothing is chosen by what it is judged on."""


class StudySection(Section):
    """What all arms share."""

    recipe: str
    """The base recipe, relative to the study's file."""
    baseline: str | None = None
    """The arm that the others are compared with; the first where none is named."""
    seeds: int | list[int] = 3
    """How many, counted from 0, or a list. A seed sets first weights and the order of the data, alike for all arms."""
    steps: int | None = Field(None, ge=1)
    """The budget in optimizer steps. At most one of steps, tokens, seconds, flops; the recipe's own where none is given."""
    tokens: int | None = Field(None, ge=1)
    """The budget in predicted tokens."""
    seconds: float | None = Field(None, gt=0)
    """The budget in seconds of training."""
    flops: float | None = Field(None, gt=0)
    """The budget in FLOPs of training, three times those of the forward passes."""
    compare: Literal["dev_loss", "dev_bits_per_byte", "accuracy"] = "dev_loss"
    """What the verdicts are about."""
    processes: int = Field(1, ge=1)
    """How many processes train one run together, started by torchrun."""
    different_data: bool = False
    """Whether arms may differ in their data; they are then not paired by what they read."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of steps, tokens, seconds, flops, not {' and '.join(given)}")
        seeds = self.seed_list
        if not seeds:
            raise ValueError(f"seeds = {self.seeds!r} leaves nothing to train; give 1 or more, for example seeds = 5")
        if len(set(seeds)) != len(seeds) or min(seeds) < 0:
            raise ValueError(f"seeds = {self.seeds!r} is not valid; give different whole numbers of 0 or more")
        return self

    @property
    def seed_list(self) -> list[int]:
        """The seeds, each once."""
        return self.seeds if isinstance(self.seeds, list) else list(range(self.seeds))


class Changes(Section):
    """Changes of a recipe, by section."""

    data: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[data]`."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[model]`."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys of `[train]`."""

    def flat(self) -> dict[str, Any]:
        """As `Recipe.replace` takes them: `{"model.position": "rope"}`."""
        return {f"{section}.{key}": value for section in SECTIONS for key, value in getattr(self, section).items()}


class ArmSection(Changes):
    """One variant: what it changes in the base recipe."""

    note: str = ""
    """What the arm is for, in a few words; the report shows it."""
    processes: int | None = Field(None, ge=1)
    """Where this arm wants another number of processes than the study says."""
    rates: list[float] | None = None
    """The rates that this arm tries where `[rates]` searches: as many as every other arm, of its own size."""


class RatesSection(Section):
    """A search of the learning rate: every arm tries the same ones, and is then trained anew with its best."""

    values: list[float] = Field(min_length=2)
    """The rates that every arm tries."""
    seeds: int = Field(1, ge=1)
    """How many seeds each rate is tried with; never those of the study."""


class MeasureSection(Section):
    """What is measured of every trained arm. Loss and perplexity on the dev split always are."""

    tokens: int = Field(0, ge=0)
    """How many dev tokens, always the same; 0 reads the whole dev split."""
    texts: dict[str, str] = Field(default_factory=dict)
    """Texts by name, each scored whole and prefix by prefix."""
    positions: bool = True
    """Whether the loss is told by position in the block."""
    past: list[float] = Field(default_factory=list)
    """Multiples of the trained block at which the loss beyond it is measured."""
    windows: int = Field(32, ge=0)
    """How many dev windows are scored prefix by prefix, which no reading of the future survives; 0 leaves it out."""

    @model_validator(mode="after")
    def _beyond(self) -> Self:
        if short := [factor for factor in self.past if factor <= 1]:
            raise ValueError(f"past = {self.past} has {short[0]}; give multiples of the block above 1, for example [2, 4]")
        return self


class StudyFile(Section):
    """A study's file, checked."""

    study: StudySection
    set: Changes = Changes()
    arms: dict[str, ArmSection]
    rates: RatesSection | None = None
    measure: MeasureSection = MeasureSection()


@dataclass(frozen=True)
class Arm:
    """One variant: its name, what it changes, and its whole recipe (seeds are filled in for each trial)."""

    name: str
    note: str
    changes: dict[str, Any]
    recipe: Recipe
    processes: int
    rates: tuple[float, ...] = ()
    """The learning rates that it tries, where a search was asked for."""


@dataclass(frozen=True)
class Plan:
    """A study, ready to be carried out."""

    name: str
    file: StudyFile
    arms: tuple[Arm, ...]
    baseline: str
    seeds: tuple[int, ...]
    base: Path
    """The recipe that the arms change."""

    @property
    def budget(self) -> tuple[str, float] | None:
        """What the study gives every arm, if it says so; else the base recipe's own budget counts."""
        return next(((unit, found) for unit in BUDGETS if (found := getattr(self.file.study, unit)) is not None), None)

    def arm(self, name: str) -> Arm:
        """An arm by name."""
        return next(arm for arm in self.arms if arm.name == name)


def load_plan(path: str | Path, *, seeds: int | None = None) -> Plan:
    """Read a study from a TOML file; `seeds` takes the place of its own number."""
    path = Path(path)
    try:
        values = read_toml(path, "study", "recipes/studies/founding.toml")
    except InputError as error:
        if "Cannot declare" in str(error) or "overwrite" in str(error):
            raise InputError(f"{error}: a name stands there twice; every arm needs a name of its own") from None
        raise
    return parse_plan(values, name=path.stem, where=str(path), folder=path.resolve().parent, seeds=seeds)


def parse_plan(
    values: Mapping[str, Any], *, name: str, folder: Path, where: str = "the study", seeds: int | None = None
) -> Plan:
    """Check nested values; relative paths are looked up in `folder`."""
    if seeds is not None and isinstance(values.get("study"), dict):
        values = {**values, "study": {**values["study"], "seeds": seeds}}
    try:
        file = StudyFile.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where}: {first_error(error, StudyFile)}") from None
    try:
        return _plan(file, name, folder)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _plan(file: StudyFile, name: str, folder: Path) -> Plan:
    if not file.arms:
        raise InputError("there are no arms; write at least [arms.baseline] and one more")
    _check_names(list(file.arms))
    baseline = file.study.baseline or next(iter(file.arms))
    if baseline not in file.arms:
        raise InputError(f"baseline = {baseline!r} is no arm{nearest(baseline, file.arms)}")
    if file.rates and max(file.study.seed_list) >= RATE_SEEDS:
        raise InputError(f"seeds from {RATE_SEEDS} on are those that [rates] chooses with; take smaller ones for the study")
    source = beside(file.study.recipe, folder)
    base = Recipe.load(source)
    shared = with_places(file.set.flat(), folder)
    arms = tuple(_arm(key, section, base, shared, file, folder) for key, section in file.arms.items())
    if not file.study.different_data:
        _refuse_other_data(arms, baseline)
    return Plan(name, file, arms, baseline, tuple(file.study.seed_list), source)


def _arm(key: str, section: ArmSection, base: Recipe, shared: dict[str, Any], file: StudyFile, folder: Path) -> Arm:
    changes = with_places(section.flat(), folder)
    for taken in ("train.seed", "data.seed"):
        if taken in changes or taken in shared:
            raise InputError(f"{taken} is the study's own: it takes every seed of `seeds` in turn; leave it out")
    unit = next((unit for unit in BUDGETS if getattr(file.study, unit) is not None), None)
    own = [f"train.{name}" for name in BUDGETS if f"train.{name}" in changes]
    if own:
        raise InputError(f"arm {key} sets {own[0]}, but arms share one budget; set it in [study]: {own[0][6:]} = ...")
    if unit and (twice := [name for name in BUDGETS if f"train.{name}" in shared]):
        raise InputError(f"[set] has train.{twice[0]} and [study] {unit}; give the budget once, in [study]")
    if file.rates and "train.rate" in changes:
        raise InputError(f"arm {key} sets train.rate, which [rates] searches; leave one of them out")
    try:
        recipe = base.replace({**shared, **changes})
    except InputError as error:
        raise InputError(f"arm {key}: {str(error).removeprefix('the recipe: ')}") from None
    processes = section.processes or file.study.processes
    return Arm(key, section.note, changes, recipe, processes, _rates(key, section, file.rates))


def _rates(key: str, section: ArmSection, search: RatesSection | None) -> tuple[float, ...]:
    if section.rates is not None and search is None:
        raise InputError(f"arm {key} has rates, and nothing searches them; write [rates] with values for all arms")
    found = (section.rates or search.values) if search else []
    if search and (
        len(found) != len(search.values) or len({f"{rate:g}" for rate in found}) != len(found) or min(found) <= 0
    ):
        raise InputError(
            f"arm {key} tries the rates {found}; give {len(search.values)} different ones above 0, as every arm has as many"
        )
    return tuple(found)


def _check_names(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(f"an arm cannot be called {name!r}; use up to 100 letters, digits, '.', '_', '+' and '-'")
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise InputError(f"the arms {other!r} and {name!r} differ in capitals alone, and would share a folder")


def _refuse_other_data(arms: tuple[Arm, ...], baseline: str) -> None:
    first = next(arm for arm in arms if arm.name == baseline).recipe.data.model_dump()
    for arm in arms:
        for key, value in arm.recipe.data.model_dump().items():
            if value != first[key]:
                raise InputError(
                    f"arm {arm.name} has data.{key} = {value!r} and {baseline} has {first[key]!r}: losses on different "
                    "data cannot be compared; if you mean it, say different_data = true in [study]"
                )


def beside(path: str, folder: Path) -> Path:
    """A path of a study's file: beside the file first, then in the working directory."""
    return found if (found := folder / path).exists() else Path(path)


def with_places(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The user's files by their whole path, since a study need not lie beside its base recipe."""

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(item) for item in value]
        if isinstance(value, dict):
            return {key: placed(item) for key, item in value.items()}
        place, colon, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        return f"{resolve_file(place, folder)}:{attribute}" if colon and place.endswith(".py") else value

    return {key: placed(value) for key, value in changes.items()}
