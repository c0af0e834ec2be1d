"""What a search's directory says: its trials, the best of them, and how to find out whether it is truly better.

best.toml       the best recipe; `keyhole train OUT/best.toml` trains it
confirm.toml    a study of the best against the recipe that was varied, on seeds that no trial had
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError
from keyhole.core.files import write_atomically
from keyhole.core.toml import dotted, to_toml
from keyhole.studies.plan import BUDGETS, StudySection
from keyhole.studies.search.display import ranked, state_of
from keyhole.studies.search.engine import Search
from keyhole.studies.search.plan import BASE, SearchPlan
from keyhole.studies.search.prepare import SEARCH, stored_search
from keyhole.studies.search.sampler import Trial
from keyhole.studies.search.space import apply

BEST, CONFIRM = "best.toml", "confirm.toml"
CONFIRM_SEEDS = 5
COMPARED = StudySection.model_fields["compare"].annotation


@dataclass(frozen=True)
class SearchResult:
    """A search, as far as it has come."""

    path: Path
    plan: SearchPlan
    trials: list[Trial]
    """By number."""

    @property
    def name(self) -> str:
        """The search's name."""
        return self.path.resolve().name

    @property
    def objective(self) -> str:
        """What was measured of every trial."""
        return self.plan.search.objective

    @cached_property
    def ranked(self) -> list[Trial]:
        """The trials with a value, the best first."""
        return ranked(self.trials, self.plan.goal)

    @property
    def best(self) -> Trial | None:
        """The best of those that came to a value."""
        return self.ranked[0] if self.ranked else None

    @property
    def counts(self) -> dict[str, int]:
        """How many trials are complete, pruned, diverged, failed, running; only what there is."""
        return dict(Counter(map(state_of, self.trials)))

    @property
    def best_recipe(self) -> Recipe:
        """The recipe of the best trial."""
        if self.best is None:
            raise InputError(f"no trial of {self.path} came to a value; see the reasons in its table of trials")
        return apply(self.plan.recipe, self.best.settings)

    def paths(self, trial: Trial) -> list[Path]:
        """The run directories of a trial, one for each seed."""
        return [self.path / "trials" / str(trial.number) / f"seed-{seed}" for seed in self.plan.seeds()]

    @property
    def command(self) -> str:
        """What repeats the search."""
        return f"keyhole search {shlex.quote(str(self.path / SEARCH))} --out NEW"

    @property
    def unconfirmed(self) -> str:
        """Why no study can compare the best with the recipe that was varied; nothing where one can."""
        if self.best is None:
            return "no trial came to a value"
        if not self.changes:
            return "the best is the recipe that was varied"
        if own := [key for key in self.changes if key.partition(".")[2] in BUDGETS]:
            return f"{own[0]} was searched, and a study compares under one budget"
        return ""

    @property
    def changes(self) -> dict[str, Any]:
        """What the best trial changes in the recipe that was varied, by recipe key."""
        if self.best is None:
            return {}
        before, after = self.plan.recipe.model_dump(), self.best_recipe.model_dump()
        keys = dict.fromkeys(".".join(key.split(".")[:2]) for key in self.best.settings)
        places = [key.partition(".") for key in keys]
        return {
            f"{section}.{name}": after[section][name]
            for section, _, name in places
            if after[section][name] != before[section][name]
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        best = self.best
        return {
            "search": self.name,
            "path": str(self.path),
            "objective": self.objective,
            "goal": self.plan.goal,
            "counts": self.counts,
            "best": None if best is None else self._plain(best) | {"recipe": str(self.path / BEST)},
            "confirm": None if self.unconfirmed else str(self.path / CONFIRM),
            "trials": [self._plain(trial) for trial in self.trials],
        }

    def _plain(self, trial: Trial) -> dict[str, Any]:
        measured = trial.state == "complete"
        return {
            "number": trial.number,
            "settings": trial.settings,
            "state": state_of(trial),
            "value": trial.value if measured else None,
            "values": list(trial.values) if measured else [],
            "reason": trial.failure or None,
            "runs": [str(path) for path in self.paths(trial)],
        }


def open_search(path: str | Path) -> SearchResult:
    """Read a search's directory."""
    path = Path(path)
    plan = stored_search(path)
    with Search(plan, path) as engine:
        return SearchResult(path, plan, engine.trials())


def write_best(result: SearchResult) -> None:
    """Write the best recipe, and the study that would confirm it."""
    if result.best is not None:
        write_atomically(result.path / BEST, result.best_recipe.to_toml())
    if result.unconfirmed:
        (result.path / CONFIRM).unlink(missing_ok=True)
    else:
        write_atomically(result.path / CONFIRM, confirming(result))


def confirming(result: SearchResult) -> str:
    """A study of the best against the recipe that was varied. Its seeds chose nothing, so that nothing flatters it."""
    recipe, changes = result.plan.recipe, result.changes
    used = {*result.plan.seeds(), recipe.data.seed}
    seeds = [seed for seed in range(len(used) + CONFIRM_SEEDS) if seed not in used][:CONFIRM_SEEDS]
    study: dict[str, Any] = {"recipe": BASE, "baseline": "base", "seeds": seeds}
    study["processes"] = result.plan.search.processes
    if result.objective in COMPARED.__args__:  # type: ignore[union-attr]
        study["compare"] = result.objective
    if any(key.startswith("data.") for key in changes):
        study["different_data"] = True
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    best = {"note": f"trial {result.best.number} of {result.name}" if result.best else "", **nested}
    note = {"note": "the recipe that was varied"}
    return to_toml({"study": study, dotted("arms", "base"): note, dotted("arms", "best"): best})
