"""The search of a learning rate: every arm tries the same rates, and is then trained anew with its best."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from keyhole.core.errors import StorageError
from keyhole.core.files import read_object, write_json
from keyhole.studies.plan import RATE_SEEDS, Plan
from keyhole.studies.prepare import rate_place
from keyhole.studies.trial import RESULT

CHOSEN = "rates/chosen.json"
"""Arm -> the rate that it is trained with, in a study's directory."""


def settle(plan: Plan, root: Path) -> dict[str, float]:
    """What each arm is trained with, written down once: a trial that failed and is made up for later changes it no more.

    An arm that diverged at every rate has none.
    """
    kept = _kept(root)
    chosen = kept | {
        arm.name: rate
        for arm in plan.arms
        if arm.name not in kept and (rate := choose(plan, root, arm.name)[1]) is not None
    }
    write_json(root / CHOSEN, chosen)
    return chosen


def choose(plan: Plan, root: Path, arm: str) -> tuple[dict[float, float | None], float | None]:
    """The mean dev loss at each rate, None where it diverged or is missing, and the rate where it is lowest.

    Once one was settled, it is that.
    """
    search = plan.file.rates
    if search is None:
        return {}, None
    seeds = range(RATE_SEEDS, RATE_SEEDS + search.seeds)
    found: dict[float, float | None] = {}
    for rate in plan.arm(arm).rates:
        losses = [_loss(root / rate_place(arm, rate, seed) / RESULT) for seed in seeds]
        known = [loss for loss in losses if loss is not None]
        found[rate] = statistics.fmean(known) if len(known) == len(losses) else None
    measured = {rate: loss for rate, loss in found.items() if loss is not None}
    best = min(measured, key=measured.__getitem__) if measured else None
    return found, _kept(root).get(arm, best)


def at_the_edge(rates: dict[float, float | None], rate: float | None) -> bool:
    """Whether the best rate is the first or last tried, so that a better one may lie beyond."""
    return rate is not None and rate in (min(rates), max(rates))


def _kept(root: Path) -> dict[str, float]:
    return read_object(root / CHOSEN) if (root / CHOSEN).is_file() else {}


def _loss(path: Path) -> float | None:
    if not path.is_file():
        return None
    try:
        loss = read_object(path).get("dev_loss")
    except StorageError:
        return None  # a damaged result counts as missing; --resume makes it again
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
