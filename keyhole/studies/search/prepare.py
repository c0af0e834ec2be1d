"""The start of a search's directory: what is searched, written down so that it can be repeated and goes on anywhere.

search.toml      the search, complete; `keyhole search OUT/search.toml` repeats it
base.toml        the recipe that it varies, with what `[set]` says
code/            the user's own parts, as they were
"""

from __future__ import annotations

import json
from pathlib import Path

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError
from keyhole.core.files import read_json, sha256, write_atomically
from keyhole.core.toml import to_toml
from keyhole.record.create import begin_record, refuse_if_not_new
from keyhole.studies.prepare import best_precision, copy_code
from keyhole.studies.search.engine import KNOWN, refuse_if_changed
from keyhole.studies.search.plan import BASE, SearchPlan
from keyhole.studies.search.sampler import Sampler

SEARCH = "search.toml"


def prepare_search(plan: SearchPlan, out: Path, *, resume: bool) -> SearchPlan:
    """Check all that can be checked, then write the search down; returns it as it stands in its directory."""
    _refuse_if_taken(out, resume)
    values, code, recipe = plan.portable()
    if recipe.train.precision == "auto" and "train.precision" not in values["space"]:
        # Probed once: a noisy probe must not give trials of one search different arithmetic.
        known = read_json(out / KNOWN)["recipe"]["train"]["precision"] if resume else best_precision()
        recipe = recipe.replace({"train.precision": known})
    if not resume:
        # Nothing is left behind where no trial can be made, and no two workers make the same text ready at once.
        Sampler(plan.search.sampler, plan.axes, plan.search.seed).propose([], 0, plan.what_is_wrong)
        _open_text(recipe)
    _refuse_other_code(code, out)
    if not resume:
        begin_record(out)
    copy_code(code, out)
    stored = Recipe.parse(recipe.model_dump(), folder=out.resolve())
    plan = SearchPlan.parse(values, where=str(out / SEARCH), folder=out.resolve(), recipe=stored)
    refuse_if_changed(plan, out)
    write_atomically(out / BASE, recipe.to_toml())
    # Quoted, since `model.mixer` and `model.mixer.lam` may both be searched.
    space = {json.dumps(key): axis for key, axis in values["space"].items()}
    write_atomically(out / SEARCH, to_toml({"search": values["search"], "space": space}))
    return plan


def stored_search(out: Path) -> SearchPlan:
    """The plan of a search's directory."""
    if not (out / SEARCH).is_file() or not (out / KNOWN).is_file():
        raise InputError(f"{out} is no search: it has no {SEARCH}; keyhole search SEARCH.toml --out {out} makes one")
    return SearchPlan.load(out / SEARCH)


def _refuse_if_taken(out: Path, resume: bool) -> None:
    there = (out / KNOWN).is_file()
    if resume and not there:
        raise InputError(f"there is no search to resume in {out}; leave --resume out to start one")
    if there and not resume:
        raise InputError(f"{out} holds a search; add --resume to go on with it, or give --out another folder")
    if not there:
        refuse_if_not_new(out)


def _refuse_other_code(code: dict[str, Path], out: Path) -> None:
    for name, source in code.items():
        if (out / KNOWN).is_file() and (out / name).is_file() and sha256(out / name) != sha256(source):
            raise InputError(f"{source} changed since {out} was started; resume with {out / SEARCH}")


def _open_text(recipe: Recipe) -> None:
    from keyhole.text import open_dataset

    open_dataset(recipe.data, recipe.folder)
