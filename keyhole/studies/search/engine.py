"""A search over recipe keys: ask for trials, tell what came of them. Its directory is the whole record.

    search.json       the plan and the recipe, written once
    trials.sqlite3    every trial, in Optuna's own form (`optuna-dashboard sqlite:///.../trials.sqlite3` shows it)
    askers/           one file for each process that asks, locked while it lives

A killed search loses nothing: what was told stays, and the trials that were running are handed out again, first and under
their own numbers, so that their runs go on where they stopped. Who asks is known by a lock and not by a heartbeat: the
system drops it at the moment of death, and nobody has to wait to be sure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import read_json, storage_errors, write_json
from keyhole.studies.search.plan import SearchPlan
from keyhole.studies.search.sampler import Sampler, Trial, decode, frozen, load_optuna
from keyhole.studies.search.space import Settings

NAME = "search"
KNOWN = "search.json"
LOOKS = 3
"""Measurements before the median judges a trial: the first ones say more of the rate's warm-up than of the rate."""


@dataclass(frozen=True)
class Proposal:
    """A trial to be carried out."""

    number: int
    settings: Settings
    recipes: tuple[Recipe, ...]
    """One training for each repeat."""
    attempt: int = 1
    """Above 1: it was begun before, and its runs may be resumed."""


class Search:
    """An open search. Several threads and several processes may use the same directory at once."""

    def __init__(self, plan: SearchPlan, folder: str | Path) -> None:
        self.plan = plan
        self.folder = Path(folder)
        highest = plan.goal == "highest"
        self._worst = -math.inf if highest else math.inf
        direction: Literal["maximize", "minimize"] = "maximize" if highest else "minimize"
        self._sampler = Sampler(plan.search.sampler, plan.axes, plan.search.seed, direction)
        self._threads = threading.RLock()
        optuna = load_optuna()
        with storage_errors(self.folder, "opening the search directory"):
            (self.folder / "askers").mkdir(parents=True, exist_ok=True)
            self._me = f"{os.getpid()}-{secrets.token_hex(4)}"
            self._life = (self.folder / "askers" / self._me).open("w")
        fcntl.flock(self._life, fcntl.LOCK_EX)
        try:
            with self._alone():
                self._same_plan()
                self._storage = optuna.storages.RDBStorage(
                    f"sqlite:///{self.folder.resolve() / 'trials.sqlite3'}",
                    engine_kwargs={"connect_args": {"timeout": 60}},
                )
                self._study = optuna.create_study(
                    study_name=NAME,
                    storage=self._storage,
                    load_if_exists=True,
                    direction=direction,
                    pruner=_pruner(optuna, plan.pruner),
                )
                self._study_id = self._storage.get_study_id_from_name(NAME)
        except BaseException:
            self._life.close()
            raise

    def ask(self, count: int = 1) -> list[Proposal]:
        """Up to `count` trials to carry out, those that a killed process left first; none when all is done."""
        with self._alone():
            trials = self.trials()
            given = [self._take_over(trial) for trial in self._left_behind(trials)[:count]]
            while len(given) < count and len(trials) < self.plan.trials:
                settings = self._sampler.propose(trials, len(trials), self.plan.what_is_wrong)
                if settings is None:
                    break
                trial = Trial(number=len(trials), state="running", settings=settings)
                self._study.add_trial(frozen(self.plan.axes, trial, user_attrs={"asker": self._me, "attempts": 1}))
                trials.append(trial)
                given.append(self._proposal(trial))
            return given

    def report(self, number: int, step: int, value: float, *, repeat: int = 0) -> bool:
        """Note a measurement on the way; True says: stop this trial, and `tell(number, pruned=True)`.

        The first repeat decides alone. A value that is no number ends the trial too, unless nothing may be pruned.
        """
        if repeat:
            return False
        with self._alone():
            self._running(number)
            finite = value if math.isfinite(value) else self._worst
            self._storage.set_trial_intermediate_value(self._id(number), step, finite)
            if self.plan.pruner == "none":
                return False
            kept = self._storage.get_trial(self._id(number))
            if self.plan.pruner == "median" and len(kept.intermediate_values) < LOOKS:
                return not math.isfinite(value)
            return not math.isfinite(value) or bool(self._study.pruner.prune(self._study, kept))

    def tell(
        self,
        number: int,
        values: float | Sequence[float] | None = None,
        *,
        pruned: bool = False,
        failure: str = "",
        note: str = "",
    ) -> Trial:
        """How a trial ended: with a value for each repeat, pruned, or with the sentence that says why it failed.

        nan and inf mean that training diverged: the trial is complete, and the worst there is, so that no sampler looks
        for more of its kind. `note` says how it did.
        """
        if (values is not None) + pruned + bool(failure) != 1:
            raise InputError("tell a trial's values, or pruned=True, or failure=..., and only one of them")
        state = load_optuna().trial.TrialState
        with self._alone():
            self._running(number)
            if failure:
                self._storage.set_trial_user_attr(self._id(number), "failure", failure)
                self._study.tell(number, state=state.FAIL)
            elif pruned:
                self._study.tell(number, state=state.PRUNED)
            else:
                given = [float(value) for value in (values if isinstance(values, Sequence) else [values])]  # type: ignore[arg-type]
                given = [value if math.isfinite(value) else self._worst for value in given]
                if len(given) != self.plan.search.repeats:
                    raise InputError(f"trial {number} has {len(given)} values for repeats = {self.plan.search.repeats}")
                self._storage.set_trial_user_attr(self._id(number), "values", given)
                if note:
                    self._storage.set_trial_user_attr(self._id(number), "failure", note)
                self._study.tell(number, math.fsum(given) / len(given))
            return self.trials()[number]

    def trials(self) -> list[Trial]:
        """All trials by number."""
        with self._stored():
            kept = self._study.get_trials(deepcopy=False)
        names = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        return [
            Trial(
                number=trial.number,
                state=names[trial.state.name],  # type: ignore[arg-type]
                settings={axis.key: decode(axis, trial.params[axis.key]) for axis in self.plan.axes.axes},
                value=trial.value,
                values=tuple(trial.user_attrs.get("values", ())),
                reports=dict(trial.intermediate_values),
                failure=trial.user_attrs.get("failure", ""),
                attempts=trial.user_attrs.get("attempts", 1),
            )
            for trial in kept
        ]

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best finite value; of equal ones the first."""
        ended = [trial for trial in self.trials() if trial.state == "complete"]
        finite = [trial for trial in ended if trial.value is not None and math.isfinite(trial.value)]
        sign = -1 if self.plan.goal == "highest" else 1
        return min(finite, key=lambda trial: sign * (trial.value or 0.0), default=None)

    @property
    def left(self) -> int:
        """How many trials have not ended."""
        return self.plan.trials - sum(trial.state != "running" for trial in self.trials())

    def close(self) -> None:
        """Let go of the directory; trials that were not told are handed out again to whoever asks next."""
        with self._threads:
            if not self._life.closed:
                self._storage.remove_session()
                self._storage.engine.dispose()
                (self.folder / "askers" / self._me).unlink(missing_ok=True)
                self._life.close()

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread of one process at a time."""
        with self._threads, self._stored(), (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """What the record cannot do, in one sentence."""
        optuna = load_optuna()
        from sqlalchemy.exc import SQLAlchemyError

        path = self.folder / "trials.sqlite3"
        try:
            with storage_errors(path, "writing"):
                yield
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            reason = str(getattr(error, "orig", None) or error.__cause__ or error).split("\n")[0]
            raise StorageError(f"the record {path} cannot be used: {reason}; free the disk, or restore it") from error

    def _same_plan(self) -> None:
        refuse_if_changed(self.plan, self.folder)
        if not (self.folder / KNOWN).exists():
            write_json(self.folder / KNOWN, self.plan.identity())

    def _left_behind(self, trials: list[Trial]) -> list[Trial]:
        """Running trials whose process is gone."""
        askers = {trial.number: trial.user_attrs.get("asker", "") for trial in self._study.get_trials(deepcopy=False)}
        gone = {asker: self._is_gone(asker) for asker in set(askers.values())}
        return [trial for trial in trials if trial.state == "running" and gone[askers[trial.number]]]

    def _is_gone(self, asker: str) -> bool:
        path = self.folder / "askers" / asker
        if asker == self._me:
            return False
        try:
            with path.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, IsADirectoryError):
            return True
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        return True

    def _take_over(self, trial: Trial) -> Proposal:
        attempts = trial.attempts + 1
        self._storage.set_trial_user_attr(self._id(trial.number), "asker", self._me)
        self._storage.set_trial_user_attr(self._id(trial.number), "attempts", attempts)
        return self._proposal(trial, attempts)

    def _proposal(self, trial: Trial, attempt: int = 1) -> Proposal:
        recipes = tuple(self.plan.settings_of(trial.settings, repeat) for repeat in range(self.plan.search.repeats))
        return Proposal(trial.number, trial.settings, recipes, attempt)

    def _id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _running(self, number: int) -> Any:
        """The trial, if it may still be told of."""
        try:
            trial = self._storage.get_trial(self._id(number))
        except KeyError:
            raise InputError(f"there is no trial {number}; {len(self.trials())} were asked for") from None
        if trial.state.is_finished():
            raise InputError(f"trial {number} has ended before ({trial.state.name.lower()}); it is told once")
        return trial


def refuse_if_changed(plan: SearchPlan, folder: Path) -> None:
    """A search goes on as the search it was."""
    path, mine = folder / KNOWN, plan.identity()
    if not path.exists():
        return
    theirs = read_json(path)
    changed = sorted(key for key in mine if theirs.get(key) != _as_json(mine[key]))
    if changed:
        raise InputError(
            f"{folder} holds another search ({', '.join(changed)} changed); "
            "go on with the same plan (more trials are fine), or give a new folder"
        )


def _pruner(optuna: Any, name: str) -> Any:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)
    return optuna.pruners.NopPruner()


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
