"""Small searches over a bowl whose bottom is known, without any training."""

import math

from keyhole.core.config import Recipe
from keyhole.studies.search.plan import SearchPlan

SPACE = {
    "train.rate": {"low": 1e-3, "high": 1e-1, "log": True, "points": 5},
    "model.layers": {"low": 2, "high": 4},
    "model.position": ["rope", "learned"],
}
BOTTOM = {"train.rate": 0.02, "model.layers": 3, "model.position": "rope"}


def plan(sampler="random", space=None, given=None, **search):
    values = {"search": {"recipe": "none.toml", "sampler": sampler, "pruner": "none", **search}}
    values |= {"space": SPACE if space is None else space, "set": {"train.steps": 10} if given is None else given}
    return SearchPlan.parse(values, recipe=Recipe())


def bowl(settings):
    """0 at the bottom, rising on all sides."""
    rate = math.log10(settings["train.rate"] / BOTTOM["train.rate"])
    layers = settings["model.layers"] - BOTTOM["model.layers"]
    return rate**2 + 0.1 * layers**2 + 0.3 * (settings["model.position"] != BOTTOM["model.position"])


def finish(search, most=10_000):
    """Ask and tell, one by one."""
    done = 0
    while done < most and (asked := search.ask()):
        search.tell(asked[0].number, bowl(asked[0].settings))
        done += 1
    return search.trials()
