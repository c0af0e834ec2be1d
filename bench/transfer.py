"""Does the best rate stay where it is as the model widens? Rates x widths x seeds, under `standard` and under `mup`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.report import Section, Settings, Table, verdict
from bench.workers import ROOT
from keyhole.core.config import Recipe
from keyhole.model.lm import build
from keyhole.text import Dataset, open_dataset
from keyhole.training.engine import Engine
from keyhole.training.schedule import build_schedule

RECIPE = ROOT / "recipes" / "width-transfer.toml"
WIDTHS, HEAD = (64, 128, 256, 512), 16
POWERS = {"standard": range(-12, -5), "mup": range(-9, -4)}
"""Rates as powers of 2: wide enough that no best rate lies at an end."""
QUICK_WIDTHS, QUICK_POWERS, QUICK_STEPS = (32, 64), range(-9, -6), 4
MOST_UNDER_MUP, LEAST_UNDER_STANDARD = 2, 4


@dataclass(frozen=True)
class Trial:
    """One training, and the mean loss over its last tenth; infinite where the loss stopped being a number."""

    init: str
    width: int
    power: int
    seed: int
    loss: float


def train_once(recipe: Recipe, data: Dataset) -> float:
    """The loss that a recipe ends with. No token is read twice: its training loss is as honest as a dev loss, and free."""
    train = recipe.train
    steps = train.steps or 1
    engine = Engine(build(recipe, data.vocab), train)
    schedule = build_schedule(train.schedule, train.warmup)
    losses = []
    for number in range(steps):
        step = engine.advance(*data.batch(number * train.batch, train.batch), schedule.factor(number, number / steps))
        if not step.finite:
            return math.inf
        losses.append(step.loss)
    return statistics.fmean(losses[-max(1, steps // 10) :])


def sweep(settings: Settings) -> Iterator[Trial]:
    """Every trial; data and first values go by the seed, so that all rates meet the same."""
    widths = QUICK_WIDTHS if settings.quick else WIDTHS
    for seed in range(settings.rounds):
        recipe = Recipe.load(RECIPE).replace({"data.seed": seed, "train.seed": seed})
        if settings.quick:
            recipe = recipe.replace({"train.steps": QUICK_STEPS})
        data = open_dataset(recipe.data, recipe.folder)
        for width in widths:
            for init, powers in POWERS.items():
                for power in QUICK_POWERS if settings.quick else powers:
                    changes = {"model.init": init, "model.width": width, "model.heads": width // HEAD}
                    loss = train_once(recipe.replace({**changes, "train.rate": 2.0**power}), data)
                    yield Trial(init, width, power, seed, loss)


def losses(trials: Sequence[Trial], init: str, width: int) -> dict[int, list[float]]:
    """Each power of 2, with a loss for each seed."""
    found: dict[int, list[float]] = {}
    for trial in trials:
        if (trial.init, trial.width) == (init, width):
            found.setdefault(trial.power, []).append(trial.loss)
    return found


@dataclass(frozen=True)
class Best:
    """The best rate of a width, by the mean over seeds and by each seed alone, as powers of 2."""

    init: str
    width: int
    power: int
    by_seed: list[int]
    loss: float
    deviation: float
    at_an_end: bool


def best(trials: Sequence[Trial], init: str, width: int) -> Best:
    """The rate with the lowest mean loss."""
    found = losses(trials, init, width)
    power = min(found, key=lambda p: statistics.fmean(found[p]))
    seeds = range(len(found[power]))
    by_seed = [min(found, key=lambda p: found[p][seed]) for seed in seeds]
    at_an_end = power in (min(found), max(found))
    return Best(init, width, power, by_seed, *mean_and_deviation(found[power]), at_an_end)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Over seeds; both infinite where one of them is."""
    if math.inf in values:
        return math.inf, math.inf
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def rate_table(trials: Sequence[Trial], init: str) -> Table:
    """The final loss of every rate at every width; the lowest of a width is marked."""
    widths = sorted({trial.width for trial in trials})
    chosen = {width: best(trials, init, width).power for width in widths}
    table = Table(f"Final loss under {init}: mean and standard deviation over seeds, * the best of its width", ())
    table.header = ("rate", *(f"width {width}" for width in widths))
    for power in sorted(losses(trials, init, widths[0])):
        cells = []
        for width in widths:
            mean, deviation = mean_and_deviation(losses(trials, init, width)[power])
            shown = f"{mean:.3f} +- {deviation:.3f}" if math.isfinite(mean) else "diverged"
            cells.append(f"{shown} {'*' if chosen[width] == power else ' '}")
        table.rows.append((f"2^{power}", *cells))
    return table


def measure(settings: Settings) -> Section:
    """The sweep, and how far the best rate moves from the narrowest model to the widest."""
    trials = list(sweep(settings))
    widths = sorted({trial.width for trial in trials})
    header = ("parameterization", "width", "best rate", "by single seeds", "loss", "")
    table = Table("The best rate of each width", header)
    figures: dict[str, Any] = {"trials": [asdict(trial) for trial in trials], "best": [], "moved": {}}
    for init in POWERS:
        rows = [best(trials, init, width) for width in widths]
        for row in rows:
            single = f"2^{min(row.by_seed)} to 2^{max(row.by_seed)}"
            loss = f"{row.loss:.3f} +- {row.deviation:.3f}"
            table.rows.append((init, str(row.width), f"2^{row.power}", single, loss, "at an end" if row.at_an_end else ""))
            figures["best"].append(asdict(row))
        powers = [row.power for row in rows]
        figures["moved"][init] = 2.0 ** (max(powers) - min(powers))
    table.notes = list(_verdicts(figures["moved"], widths))
    return Section([*(rate_table(trials, init) for init in POWERS), table], figures)


def _verdicts(moved: dict[str, float], widths: Sequence[int]) -> Iterator[str]:
    reach = f"the best rate of widths {widths[0]} to {widths[-1]} moves by a factor of"
    met = verdict(moved["mup"], MOST_UNDER_MUP, at_most=True)
    yield f"mup: {reach} {moved['mup']:g}, at most {MOST_UNDER_MUP}: {met}"
    met = verdict(moved["standard"], LEAST_UNDER_STANDARD)
    yield f"standard: {reach} {moved['standard']:g}, at least {LEAST_UNDER_STANDARD}: {met}"
