"""The file of a search: what is searched, how, and how much of it.

[search]
recipe = "recipes/first.toml"
sampler = "tpe"
trials = 20

[space]
"train.rate" = { low = 1e-3, high = 1e-1, log = true }
"model.position" = ["rope", "learned"]

[set]
"train.steps" = 200
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from keyhole.core.config import Recipe, Section
from keyhole.core.errors import InputError, nearest
from keyhole.studies.space import Settings, Space, apply, flatten


class SearchSettings(Section):
    """The `[search]` table."""

    recipe: str = Field(min_length=1)
    """The recipe that is varied."""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """`grid` takes every combination, `random` any, `tpe` those that the results so far speak for."""
    trials: int | None = Field(None, ge=1)
    """How many points are tried; 20 when not given, and all of a grid."""
    pruner: Literal["median", "halving", "none"] = "median"
    """Which trials end early: worse than the median at the same step, not in the best third at its rungs, or none."""
    seed: int = Field(0, ge=0)
    """Of the sampler."""
    objective: str = Field("dev_loss", min_length=1)
    """What is measured at the end of a trial."""
    goal: Literal["lowest", "highest"] = "lowest"
    """Which objective is the best."""
    repeats: int = Field(1, ge=1)
    """Trainings of each trial, from the seeds 0, 1, ...; their mean counts."""


class SearchPlan(Section):
    """A search, checked: `[search]`, `[space]` and `[set]`."""

    search: SearchSettings
    space: dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)
    _recipe: Recipe = PrivateAttr(default_factory=Recipe)
    _space: Space = PrivateAttr(default_factory=lambda: Space(()))

    @property
    def recipe(self) -> Recipe:
        """The recipe with `[set]` applied: what every trial begins from."""
        return self._recipe

    @property
    def axes(self) -> Space:
        """What varies."""
        return self._space

    @property
    def trials(self) -> int:
        """How many trials there will be at most."""
        points = sum(1 for _ in self._space.grid()) if self.search.sampler == "grid" else 0
        return self.search.trials or points or 20

    @classmethod
    def load(cls, path: str | Path) -> SearchPlan:
        """Read the file of a search; its recipe is looked up beside it, then in the working directory."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            raise InputError(f"there is no search file {path}; give a TOML file with [search] and [space]") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a TOML file: {error}") from None
        return cls.parse(values, where=str(path), folder=path.resolve().parent)

    @classmethod
    def parse(
        cls, values: dict[str, Any], *, where: str = "the search", folder: Path | None = None, recipe: Recipe | None = None
    ) -> SearchPlan:
        """Check nested values; a recipe that is given takes the place of the file that `[search]` names."""
        try:
            plan = cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{where}: {_first_error(error)}") from None
        try:
            found = recipe or Recipe.load(_find(plan.search.recipe, folder))
            plan._recipe = apply(found, _one_level(plan.set))
            plan._space = Space.parse(flatten(plan.space), plan._recipe)
            plan._check()
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return plan

    def _check(self) -> None:
        both = sorted({axis.key for axis in self._space.axes} & _one_level(self.set).keys())
        if both:
            raise InputError(f"{', '.join(both)} stands under [space] and under [set]; leave it under one of them")
        if self.search.repeats > 1 and "train.seed" in self.set:
            raise InputError(
                f"train.seed is set, and repeats = {self.search.repeats} counts seeds from 0; drop one of them"
            )
        if self.search.sampler != "grid":
            return
        points = sum(1 for _ in self._space.grid())
        if self.search.trials is not None and self.search.trials < points:
            raise InputError(
                f"this grid has {points} points and trials = {self.search.trials} would leave some out; "
                'drop `trials`, take fewer values, or choose sampler = "random"'
            )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to go on. More trials may be asked for at any time."""
        return {
            **self.search.model_dump(exclude={"recipe", "trials"}),
            "space": self._space.to_dict(),
            "recipe": self._recipe.model_dump(mode="json"),
        }

    def settings_of(self, trial: Settings, repeat: int = 0) -> Recipe:
        """The recipe of one training of a trial."""
        recipe = apply(self._recipe, trial)
        return recipe.replace({"train.seed": repeat}) if self.search.repeats > 1 else recipe


def _find(recipe: str, folder: Path | None) -> Path:
    beside = (folder or Path()) / recipe
    return beside if beside.exists() else Path(recipe)


def _one_level(table: dict[str, Any]) -> dict[str, Any]:
    """`train.steps` under [set] without its quotes."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if "." not in key and isinstance(value, dict):
            found.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            found[key] = value
    return found


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    place = [str(step) for step in first["loc"]]
    dotted = ".".join(place)
    if first["type"] == "extra_forbidden":
        allowed = SearchSettings.model_fields if place[0] == "search" and len(place) > 1 else SearchPlan.model_fields
        return f"unknown key {dotted!r}{nearest(place[-1], allowed)}"
    if first["type"] == "missing":
        example = {"recipe": 'recipe = "recipes/first.toml"', "search": '[search] with recipe = "recipes/first.toml"'}
        return f"{dotted} is missing; add {example.get(place[-1], 'a table [space] that says what to vary')}"
    return f"{dotted} = {first['input']!r} is not valid: {first['msg'][0].lower()}{first['msg'][1:]}"
