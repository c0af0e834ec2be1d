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
from keyhole.core.files import sha256
from keyhole.record.create import portable, portable_value
from keyhole.studies.plan import beside, with_places
from keyhole.studies.search.space import Settings, Space, apply, flatten

LOSSES = ("dev_loss", "dev_perplexity", "dev_sentence_perplexity", "dev_bits_per_byte")
"""What falls and rises with the dev loss, so that a trial can be judged by it on the way."""
OBJECTIVES = {
    **dict.fromkeys((*LOSSES, "train_loss"), "lowest"),
    "accuracy": "highest",
    "tokens_per_second": "highest",
    **dict.fromkeys(("seconds", "memory_mb", "parameters", "flops", "flops_per_token", "steps", "tokens"), "lowest"),
}
"""Every number that is measured of a trial, and which of it is the best where the search does not say."""
BASE = "base.toml"
"""The recipe, in the search's own directory."""
Goal = Literal["lowest", "highest"]
Pruner = Literal["median", "halving", "none"]


class SearchSettings(Section):
    """The `[search]` table."""

    recipe: str = Field(min_length=1)
    """The recipe that is varied."""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """`grid` takes every combination, `random` any, `tpe` those that the results so far speak for."""
    trials: int | None = Field(None, ge=1)
    """How many points are tried; 20 when not given, and all of a grid."""
    pruner: Pruner | None = None
    """Which trials end early: worse than the `median` dev loss at the same step, not in the best third at its rungs
    (`halving`), or `none`. The median where the objective is a dev loss; other objectives cannot be judged on the way."""
    seed: int = Field(0, ge=0)
    """Of the sampler."""
    objective: str = Field("dev_loss", min_length=1)
    """What is measured at the end of a trial."""
    goal: Goal | None = None
    """Which objective is the best: the lowest, but for accuracy and tokens_per_second."""
    repeats: int = Field(1, ge=1)
    """Trainings of each trial, from the seeds 0, 1, ... of weights and data alike; their mean counts."""
    tokens: int = Field(0, ge=0)
    """How many dev tokens the end of a trial is measured on, always the same; 0 reads the whole dev split."""
    processes: int = Field(1, ge=1)
    """How many processes train one run together, started by torchrun."""


class SearchPlan(Section):
    """A search, checked: `[search]`, `[space]` and `[set]`."""

    search: SearchSettings
    space: dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)
    _recipe: Recipe = PrivateAttr(default_factory=Recipe)
    _space: Space = PrivateAttr(default_factory=lambda: Space(()))
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

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

    @property
    def goal(self) -> Goal:
        """Which objective is the best."""
        return self.search.goal or OBJECTIVES[self.search.objective]  # type: ignore[return-value]

    @property
    def pruner(self) -> Pruner:
        """What ends trials early."""
        return self.search.pruner or ("median" if self.search.objective in LOSSES else "none")

    @classmethod
    def load(cls, path: str | Path, *, trials: int | None = None) -> SearchPlan:
        """Read the file of a search; its recipe is looked up beside it, then in the working directory.

        `trials` takes the place of its own number.
        """
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            raise InputError(f"there is no search file {path}; give a TOML file with [search] and [space]") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a TOML file: {error}") from None
        if trials is not None and isinstance(values.get("search"), dict):
            values["search"]["trials"] = trials
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
            found = recipe or Recipe.load(beside(plan.search.recipe, folder or Path()))
            plan._folder = folder or found.folder
            plan._recipe = apply(found, plan._placed(_one_level(plan.set), found))
            plan._space = Space.parse(plan._placed(flatten(plan.space), found), plan._recipe)
            plan._check()
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return plan

    def _placed(self, table: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
        """The user's files by their whole path, where the search does not lie beside its recipe."""
        return table if self._folder == recipe.folder else with_places(table, self._folder)

    def _check(self) -> None:
        asked = self.search
        if asked.objective not in OBJECTIVES:
            raise InputError(f"objective = {asked.objective!r} is not measured{nearest(asked.objective, OBJECTIVES)}")
        if asked.objective not in LOSSES and asked.pruner not in (None, "none"):
            raise InputError(
                f"pruner = {asked.pruner!r} ends trials by their dev loss, which does not tell of {asked.objective}; "
                "leave pruner out, or search for the lowest dev_loss"
            )
        if asked.objective in LOSSES and self.goal == "highest" and self.pruner != "none":
            raise InputError(f'{self.pruner} pruning keeps the lowest losses; for the highest say pruner = "none"')
        both = sorted({axis.key for axis in self._space.axes} & _one_level(self.set).keys())
        if both:
            raise InputError(f"{', '.join(both)} stands under [space] and under [set]; leave it under one of them")
        seeds = sorted({"train.seed", "data.seed"} & _one_level(self.set).keys())
        if asked.repeats > 1 and seeds:
            raise InputError(f"{seeds[0]} is set, and repeats = {asked.repeats} counts seeds from 0; drop one of them")
        if asked.sampler != "grid":
            return
        points = sum(1 for _ in self._space.grid())
        if asked.trials is not None and asked.trials < points:
            raise InputError(
                f"this grid has {points} points and trials = {asked.trials} would leave some out; "
                'drop `trials`, take fewer values, or choose sampler = "random"'
            )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to go on. More trials may be asked for at any time."""
        return {
            **self.search.model_dump(exclude={"recipe", "trials"}),
            "space": self._space.to_dict(),
            "recipe": self._recipe.model_dump(mode="json"),
            "code": {name: sha256(source) for name, source in self.code().items()},
        }

    def code(self) -> dict[str, Path]:
        """The user's own files that it names, by the names that they have in its record."""
        return self.portable()[1]

    def portable(self) -> tuple[dict[str, Any], dict[str, Path], Recipe]:
        """The search as its record stores it: its file's values, the user's files, and the recipe with `[set]` applied."""
        code: dict[str, Path] = {}
        recipe, _ = portable(self._recipe, code)
        space = portable_value(flatten(self.space), self._folder, code)
        search = self.search.model_dump(exclude_none=True) | {"recipe": BASE}
        return {"search": search, "space": space}, code, recipe

    def settings_of(self, trial: Settings, repeat: int = 0) -> Recipe:
        """The recipe of one training of a trial."""
        recipe = apply(self._recipe, trial)
        return recipe.replace({"train.seed": repeat, "data.seed": repeat}) if self.search.repeats > 1 else recipe

    def seeds(self) -> list[int]:
        """Of the trainings of a trial."""
        return list(range(self.search.repeats)) if self.search.repeats > 1 else [self._recipe.train.seed]

    def what_is_wrong(self, settings: Settings) -> str:
        """Why these settings make no recipe together, or nothing."""
        try:
            self.settings_of(settings)
        except InputError as error:
            return str(error)
        return ""


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
