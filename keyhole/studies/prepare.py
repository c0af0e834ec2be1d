"""The start of a study's directory: what will be carried out, written down before anything is.

study.toml     the study, complete; `keyhole study OUT/study.toml` repeats it
base.toml      the recipe that it changes
code/          the user's own parts, as they were
study.json     what each arm comes to: recipe, size, budget; where and with what it was begun
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.core.config import Recipe, Spec
from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import read_object, sha256, storage_errors, write_atomically, write_json
from keyhole.core.toml import dotted, to_toml
from keyhole.record.create import begin_record, has_begun, portable, refuse_if_not_new
from keyhole.studies.match import Size, budgeted, size_of
from keyhole.studies.plan import RATE_SEEDS, Plan, load_plan
from keyhole.studies.trial import RESULT, Task

if TYPE_CHECKING:
    from keyhole.text import Dataset

STUDY, BASE, KNOWN = "study.toml", "base.toml", "study.json"
LOST = "restore it; without it the study can neither go on nor be told of, but its runs can (keyhole runs)"


@dataclass(frozen=True)
class Prepared:
    """A study whose directory is ready."""

    plan: Plan
    out: Path
    recipes: dict[str, Recipe]
    """Of each arm: with its budget and its precision, and paths that lead into the directory."""
    sizes: dict[str, Size]
    data: dict[str, str] = field(default_factory=dict)
    """Of each arm: the hash of the text that it reads, as it is now."""

    def audits(self) -> list[Task]:
        """One audit an arm, before it trains."""
        return [self._task("audit", f"audits/{arm.name}", arm.name) for arm in self.plan.arms]

    def rates(self) -> list[Task]:
        """The search of rates, if there is one: every arm tries the same, with the same seeds."""
        search = self.plan.file.rates
        if search is None:
            return []
        spare = loss_alone(self.plan.file.measure.tokens)
        return [
            self._task("trial", rate_place(arm.name, rate, seed), arm.name, seed, rate, spare)
            for seed in range(RATE_SEEDS, RATE_SEEDS + search.seeds)
            for place in range(len(search.values))
            for arm in self.plan.arms
            for rate in [arm.rates[place]]
        ]

    def trials(self, chosen: dict[str, float | None]) -> list[Task]:
        """Every arm with every seed, seed by seed: an interrupted study has pairs to compare. An arm may be left out."""
        measure = self.plan.file.measure.model_dump()
        return [
            self._task("trial", f"runs/{arm.name}/seed-{seed}", arm.name, seed, chosen[arm.name], measure)
            for seed in self.plan.seeds
            for arm in self.plan.arms
            if arm.name in chosen
        ]

    def _task(
        self,
        kind: Any,
        name: str,
        arm: str,
        seed: int = 0,
        rate: float | None = None,
        measure: dict[str, Any] | None = None,
    ) -> Task:
        changes: dict[str, Any] = {"train.seed": seed, "data.seed": seed}
        changes |= {} if rate is None else {"train.rate": rate}
        return Task(
            kind=kind,
            name=name,
            study=self.plan.name,
            arm=arm,
            seed=seed,
            recipe=self.recipes[arm].replace(changes).model_dump(),
            processes=self.plan.arm(arm).processes,
            measure=measure or {},
        )


def loss_alone(tokens: int) -> dict[str, Any]:
    """What is measured where something is searched, and not judged."""
    return {"tokens": tokens, "texts": {}, "positions": False, "past": [], "windows": 0}


def rate_place(arm: str, rate: float, seed: int) -> str:
    """Where a trial of a rate lies."""
    written = repr(rate).removesuffix(".0")  # all its digits: rates that are close must not share a folder
    return f"rates/{arm}/rate-{written}-seed-{seed}"


def prepare(plan: Plan, out: Path, *, resume: bool) -> Prepared:
    """Check all that can be checked, then write the study down; a resumed one must still be the study it was."""
    known = _known(out, resume)
    opened: dict[str, Dataset] = {}
    code: dict[str, Path] = {}
    recipes, sizes, data = {}, {}, {}
    precision = known.get("precision") or _precision(plan)
    for arm in plan.arms:
        dataset = _open(arm.recipe, opened)
        data[arm.name] = dataset.hash
        size = sizes[arm.name] = size_of(arm, dataset)
        recipe, _ = portable(budgeted(arm, plan.budget, size), code)
        if recipe.train.precision == "auto":
            # Probed once: a noisy probe must not give arms of one study different arithmetic.
            recipe = recipe.replace({"train.precision": precision})
        recipes[arm.name] = recipe
    prepared = Prepared(plan, out, recipes, sizes, data)
    if resume:
        _refuse_if_changed(prepared, known, code)
    _write(prepared, known, code, precision)
    return prepared


def _known(out: Path, resume: bool) -> dict[str, Any]:
    there = (out / KNOWN).is_file()
    if resume and not there:
        raise InputError(f"there is no study to resume in {out}; leave --resume out to start one")
    if there and not resume:
        raise InputError(f"{out} holds a study; add --resume to go on with it, or give --out another folder")
    if not there:
        refuse_if_not_new(out)
        return {}
    return read_known(out)


def read_known(out: Path) -> dict[str, Any]:
    """study.json, with all that a study of ours has in it."""
    known = read_object(out / KNOWN, "name", "precision", "code", "arms", remedy=LOST)
    for name, arm in known["arms"].items():
        if missing := {"note", "changes", "recipe", "parameters", "flops_per_token"} - arm.keys():
            raise StorageError(f"{out / KNOWN} is damaged (arm {name} has no {min(missing)!r}); {LOST}")
    return known


def _open(recipe: Recipe, opened: dict[str, Dataset]) -> Dataset:
    """What an arm reads. Opened here first, so that no two workers fill the same cache."""
    from keyhole.text import open_dataset

    key = recipe.data.model_dump_json()
    if key not in opened:
        opened[key] = open_dataset(recipe.data, recipe.folder)
    return opened[key]


def _precision(plan: Plan) -> str:
    return "auto" if all(arm.recipe.train.precision != "auto" for arm in plan.arms) else best_precision()


def best_precision() -> str:
    """What "auto" comes to on this machine."""
    import torch

    from keyhole.training.precision import choose_precision

    return choose_precision("auto", "cuda" if torch.cuda.is_available() else "cpu").name


def _refuse_if_changed(prepared: Prepared, known: dict[str, Any], code: dict[str, Path]) -> None:
    """Seeds, arms and measurements may be added; what an arm is may not change."""
    for name, source in code.items():
        if known["code"].get(name) not in (None, sha256(source)):
            raise InputError(f"{source} changed since {prepared.out} was started; resume with {prepared.out / STUDY}")
    for name, recipe in prepared.recipes.items():
        if name not in known["arms"]:
            continue
        before = known["arms"][name]["recipe"]
        if known["arms"][name].get("data", prepared.data[name]) != prepared.data[name]:
            raise InputError(
                f"the text of arm {name} changed since {prepared.out} was started, and its seeds would not be of one "
                f"kind: bring {recipe.data.source.name} back, or give --out another folder"
            )
        now = _plain(recipe.model_dump())
        for section, values in before.items():
            for key, value in values.items():
                if value != now[section][key]:
                    raise InputError(
                        f"arm {name} changed: {section}.{key} was {value!r} when {prepared.out} was started and is "
                        f"{now[section][key]!r} now; give --out another folder"
                    )
        _refuse_other_terms(prepared, name, known)
    if missing := known["arms"].keys() - prepared.recipes.keys():
        raise InputError(f"arm {sorted(missing)[0]} of {prepared.out} is gone; resume with {prepared.out / STUDY}")


def _refuse_other_terms(prepared: Prepared, name: str, known: dict[str, Any]) -> None:
    """Which rates an arm searches and how many processes train it stand in no recipe."""
    terms = {"rates": "the rates it searches", "processes": "the number of its processes"}
    now = _terms(prepared, name)
    for key, what in terms.items():
        if known["arms"][name].get(key, now[key]) != now[key]:
            raise InputError(
                f"arm {name} changed: {what} {'are' if key == 'rates' else 'is'} not what it was when {prepared.out} was "
                "started; give --out another folder"
            )


def _terms(prepared: Prepared, name: str) -> dict[str, Any]:
    arm, search = prepared.plan.arm(name), prepared.plan.file.rates
    rates = {"values": list(arm.rates), "seeds": search.seeds} if search else None
    return {"data": prepared.data[name], "rates": rates, "processes": arm.processes}


def _seeds_before(prepared: Prepared, known: dict[str, Any]) -> list[list[int]]:
    """The seeds that the study had at earlier times when some of its results could be seen."""
    before, last = known.get("seeds_before", []), known.get("seeds")
    seen = any((prepared.out / "runs").glob(f"*/*/{RESULT}"))
    return [*before, last] if last and last != list(prepared.plan.seeds) and seen else before


def _write(prepared: Prepared, known: dict[str, Any], code: dict[str, Path], precision: str) -> None:
    out, plan = prepared.out, prepared.plan
    if not known:
        begin_record(out)
    base, _ = portable(Recipe.load(plan.base), code)  # it may name a part that no arm keeps
    copy_code(code, out)
    write_atomically(out / BASE, base.to_toml())
    write_atomically(out / STUDY, _as_toml(prepared))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    arms = {
        arm.name: {
            "note": arm.note,
            "changes": _plain(arm.changes),
            "recipe": _plain(prepared.recipes[arm.name].model_dump()),
            "parameters": prepared.sizes[arm.name].parameters,
            "flops_per_token": prepared.sizes[arm.name].flops_per_token,
            **_terms(prepared, arm.name),
        }
        for arm in plan.arms
    }
    write_json(
        out / KNOWN,
        {
            "name": plan.name,
            "started": known.get("started", now),
            "command": known.get("command", sys.argv),
            "precision": precision,
            "seeds": list(plan.seeds),
            "seeds_before": _seeds_before(prepared, known),
            "code": known.get("code", {}) | {name: sha256(source) for name, source in code.items()},
            "arms": arms,
        },
    )
    has_begun(out)


def copy_code(code: dict[str, Path], out: Path) -> None:
    """Keep the user's own files as they are now."""
    with storage_errors(out, "writing the user's parts in"):
        for name, source in code.items():
            (out / "code").mkdir(parents=True, exist_ok=True)
            if source != (out / name).resolve():
                shutil.copyfile(source, out / name)


def _as_toml(prepared: Prepared) -> str:
    """The study as one that stands in its own directory."""
    plan = prepared.plan
    values = plan.file.model_dump(exclude_none=True)
    values["study"] |= {"recipe": BASE, "baseline": plan.baseline, "seeds": list(plan.seeds)}
    sections: dict[str, dict[str, Any]] = {"study": values["study"]}
    if shared := plan.file.set.flat():
        sections["set"] = _nested(shared, prepared.recipes[plan.baseline])
    for arm in plan.arms:
        own = {"note": arm.note} if arm.note else {}
        own |= {key: getattr(plan.file.arms[arm.name], key) for key in ("processes", "rates")}
        sections[dotted("arms", arm.name)] = own | _nested(arm.changes, prepared.recipes[arm.name])
    sections |= {name: values[name] for name in ("rates", "measure") if name in values}
    return to_toml(sections)


def _nested(changes: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Changed keys with the values that the recipe has now, whose paths lead into the directory."""
    dumped = recipe.model_dump()
    nested: dict[str, Any] = {}
    for key in changes:
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = dumped[section][name]
    return nested


def _plain(value: Any) -> Any:
    """As JSON reads it back: tuples as lists, specs as they are written."""
    if isinstance(value, Spec):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def stored_plan(out: Path) -> Plan:
    """The plan of a study's directory."""
    if not (out / STUDY).is_file():
        raise InputError(f"{out} is no study: it has no {STUDY}; keyhole study STUDY.toml --out {out} makes one")
    plan = load_plan(out / STUDY)
    return Plan(read_known(out)["name"], plan.file, plan.arms, plan.baseline, plan.seeds, plan.base)
