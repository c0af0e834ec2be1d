"""What a report says, as plain data: tables of cells and sentences. Every format shows the same.

Arms always stand in the plan's order: a table ordered by loss would be a ranking by a single number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from keyhole.studies.match import unequal
from keyhole.studies.rates import at_the_edge
from keyhole.studies.report.wording import (
    MEASURES,
    budget,
    differing,
    estimated,
    judged,
    large,
    number,
    perplexity,
    purpose,
    rules,
)

if TYPE_CHECKING:
    from keyhole.studies.result import ArmResult, StudyResult
    from keyhole.studies.statistics import Difference

Tone = Literal["", "better", "worse", "unsure", "unfair", "faint"]


@dataclass(frozen=True)
class Cell:
    """A text in a table."""

    text: str
    tone: Tone = ""
    struck: bool = False
    """Struck out: the number was reached by reading the future."""
    brief: str = ""
    """What says the same where there is little room."""


@dataclass(frozen=True)
class Column:
    """A column's head."""

    name: str
    right: bool = False
    """Whether it holds numbers."""
    spare: bool = False
    """Whether it may be left out where there is little room."""


@dataclass(frozen=True)
class Table:
    """A table with a title, what it is about, and what must be said beside it."""

    key: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)


def tables(result: StudyResult) -> list[Table]:
    """All tables of a study that have something in them; the verdicts first."""
    made = [verdicts(result), spent(result), texts(result), past(result), rates(result), by_seed(result)]
    return [table for table in made if table is not None]


def verdicts(result: StudyResult) -> Table:
    """Every arm against the baseline. An arm that is not comparable has its loss struck out, its prefix loss beside it."""
    name, unit = MEASURES[result.measure]
    rows = []
    scored = {arm.name: prefix_mean(arm, "prefix") for arm in result.arms}
    for arm in result.arms:
        difference = result.differences.get(arm.name)
        fair = arm.honest
        row = [
            Cell(arm.name, "" if fair else "unfair"),
            _loss(arm, result.measure),
            _difference(difference),
            _verdict(difference, arm),
            Cell(number(scored[arm.name])),
            Cell(f"{len(arm.by_seed(result.measure))}/{len(arm.trials)}", "faint"),
            Cell(purpose(arm, result.plan.baseline), "faint"),
        ]
        rows.append(row)
    columns = [
        Column("arm"),
        Column(name, right=True),
        Column(f"difference{', ' + unit if unit else ''}", right=True),
        Column("verdict"),
        Column("loss by prefixes", right=True),
        Column("seeds", right=True, spare=True),
        Column("what it is", spare=True),
    ]
    if not any(value is not None for value in scored.values()):
        rows, columns = [row[:4] + row[5:] for row in rows], columns[:4] + columns[5:]
    return Table("verdicts", "Verdicts", columns, rows, _beside_verdicts(result))


def _loss(arm: ArmResult, measure: str) -> Cell:
    text = estimated(arm.estimate(measure))
    return Cell(text) if arm.honest else Cell(text, "unfair", struck=text != "-", brief=number(arm.mean(measure)))


def _difference(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell("-", "faint")
    unfair = difference.verdict == "not comparable"
    text = differing(difference)
    brief = text.replace(" (", "\n(")
    return Cell(text, "unfair" if unfair else "", struck=unfair and difference.mean is not None, brief=brief)


def _verdict(difference: Difference | None, arm: ArmResult) -> Cell:
    if difference is None:
        return (
            Cell("baseline", "faint") if arm.honest else Cell(f"baseline, not honest ({', '.join(rules(arm))})", "unfair")
        )
    tones: dict[str, Tone] = {"better": "better", "worse": "worse", "not comparable": "unfair"}
    return Cell(judged(difference, arm), tones.get(difference.verdict, "unsure"), brief=difference.verdict)


def _beside_verdicts(result: StudyResult) -> list[str]:
    said = []
    if any(not arm.honest for arm in result.arms):
        said.append("struck out: reached by reading the future, so no evidence; the loss by prefixes is what it is worth")
    windows = {found["windows"] for arm in result.arms for trial in arm.done if (found := trial.values.get("prefix"))}
    if windows:
        said.append(
            f"loss by prefixes: every token of {max(windows)} dev windows foretold from what stands before it alone; "
            "these windows are the same for all arms, but fewer than those of the dev loss: compare within the column"
        )
    return said


def prefix_mean(arm: ArmResult, key: str) -> float | None:
    """The mean over seeds of a loss on the windows that were scored prefix by prefix: "full", "prefix" or "gap"."""
    found = prefix_by_seed(arm, key)
    return statistics.fmean(found.values()) if found else None


def prefix_by_seed(arm: ArmResult, key: str) -> dict[int, float]:
    """The same for each seed."""
    scored = {trial.seed: trial.values["prefix"][key] for trial in arm.done if trial.values.get("prefix")}
    return {seed: float(value) for seed, value in scored.items() if value is not None and math.isfinite(value)}


SPENT: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "parameters": ("parameters", large),
    "flops": ("FLOPs", large),
    "steps": ("steps", large),
    "tokens": ("tokens", large),
    "seconds": ("seconds", lambda value: number(value, 1)),
    "tokens_per_second": ("tokens/s", large),
    "memory_mb": ("memory, MB", large),
}


def spent(result: StudyResult) -> Table | None:
    """What each arm is and has used: what was made equal, and what could not be."""
    if not any(arm.done for arm in result.arms):
        return None
    means = {arm.name: {key: arm.mean(key) for key in SPENT} for arm in result.arms}
    for arm in result.arms:
        means[arm.name]["parameters"] = arm.parameters
    base = means[result.plan.baseline]
    rows = [[Cell(arm.name), *(_beside_base(key, means[arm.name][key], base[key]) for key in SPENT)] for arm in result.arms]
    columns = [Column("arm")]
    for key, (name, _) in SPENT.items():
        known = {means[arm.name][key] for arm in result.arms} - {None}
        columns.append(Column(f"{name}{' (equal)' if len(known) == 1 and len(rows) > 1 else ''}", right=True))
    notes = [f"every arm was given the same: {budget(result)}"]
    notes += [f"not equal - {note}" for note in unequal(means, result.plan.baseline)]
    return Table("spent", "What was made equal, and what was not", columns, rows, notes)


def _beside_base(key: str, value: float | None, base: float | None) -> Cell:
    """A mean over seeds, with its ratio to the baseline's where that is another."""
    text = SPENT[key][1](value)
    if value and base and abs(value / base - 1) >= 0.005:
        return Cell(f"{text} ({number(value / base, 2)}x)", brief=text)
    return Cell(text, "faint" if value is None else "")


def texts(result: StudyResult) -> Table | None:
    """Perplexity on the study's own texts, read whole and prefix by prefix."""
    asked = result.plan.file.measure.texts
    if not asked or not any(arm.done for arm in result.arms):
        return None
    rows, notes = [], []
    tokens: dict[str, int] = {}
    for arm in result.arms:
        row = [Cell(arm.name)]
        for name in asked:
            scored = [trial.values.get("texts", {}).get(name, {}) for trial in arm.done]
            known = [found for found in scored if "loss" in found]
            notes += list(dict.fromkeys(f"{arm.name}, {name}: {f['reason']}" for f in scored if "reason" in f))
            if known:
                tokens[name] = known[0]["tokens"]
            whole, prefix = (_mean(found[key] for found in known) for key in ("loss", "prefix_loss"))
            struck = not arm.honest and whole is not None
            row += [Cell(perplexity(whole), "unfair" if struck else "", struck), Cell(perplexity(prefix))]
        rows.append(row)
    columns = [Column("arm")]
    for name in asked:
        columns += [Column(name, right=True), Column("by prefixes", right=True)]
    shown = [
        f"{name}: {_short(text)}{f' ({tokens[name]} tokens)' if name in tokens else ''}" for name, text in asked.items()
    ]
    return Table("texts", "Perplexity on texts", columns, rows, shown + notes)


def _mean(values: Any) -> float | None:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else None


def _short(text: str, limit: int = 100) -> str:
    flat = " ".join(text.split())
    return f'"{flat[:limit]}..."' if len(flat) > limit else f'"{flat}"'


def past(result: StudyResult) -> Table | None:
    """The loss beyond the trained length."""
    factors = [f"{factor:g}" for factor in result.plan.file.measure.past]
    if not factors or not any(arm.done for arm in result.arms):
        return None
    rows, notes = [], []
    blocks: dict[str, int] = {}
    for arm in result.arms:
        row = [Cell(arm.name)]
        for factor in factors:
            found = [trial.values["past"][factor] for trial in arm.done if factor in trial.values.get("past", {})]
            if found:
                blocks[factor] = found[0]["block"]
            loss = _mean(one["loss"] for one in found if "loss" in one)
            struck = not arm.honest and loss is not None
            row.append(Cell(number(loss), "unfair" if struck else "" if loss is not None else "faint", struck))
            notes += [f"{arm.name}, {factor} times: {one['reason']}" for one in found[:1] if "reason" in one]
        rows.append(row)
    trained = result.plan.arm(result.plan.baseline).recipe.data.block
    columns = [Column("arm")]
    columns += [Column(f"{f} times{f' ({blocks[f]})' if f in blocks else ''}", right=True) for f in factors]
    title = f"Loss beyond the trained length of {trained} tokens"
    return Table("past", title, columns, rows, ["only tokens beyond the trained length count", *notes])


def rates(result: StudyResult) -> Table | None:
    """The search of rates: the mean dev loss at each, the best, and whether a better one may lie beyond."""
    search = result.plan.file.rates
    if search is None:
        return None
    rows, notes = [], []
    tried = sorted({rate for arm in result.arms for rate in arm.rates})
    for arm in result.arms:
        cells = []
        for rate in tried:
            loss = arm.rates.get(rate)
            text = number(loss) if loss is not None else "-" if rate in arm.rates else ""
            struck = not arm.honest and loss is not None
            tone: Tone = "unfair" if struck else "better" if rate == arm.rate else "" if loss is not None else "faint"
            cells.append(Cell(text, tone, struck))
        edge = at_the_edge(arm.rates, arm.rate)
        best = "-" if arm.rate is None else f"{arm.rate:.3g}{', at the edge' if edge else ''}"
        rows.append([Cell(arm.name), *cells, Cell(best, "unsure" if edge else "", brief=best.split(",")[0])])
        if edge and arm.rate is not None:
            notes.append(f"{arm.name}: the best rate is the {_end(list(arm.rates), arm.rate)} tried; try rates beyond it")
    count = "1 seed" if search.seeds == 1 else f"{search.seeds} seeds"
    head = f"mean dev loss at each rate over {count} of the search's own; -: it diverged, or is not done; empty: not tried"
    columns = [Column("arm"), *(Column(f"{rate:.3g}", right=True) for rate in tried), Column("best", right=True)]
    return Table("rates", "Learning rates searched", columns, rows, [head, *notes])


def _end(values: list[float], rate: float) -> str:
    return "lowest" if rate == min(values) else "highest"


def by_seed(result: StudyResult) -> Table | None:
    """The very numbers that everything else is computed from."""
    if not any(arm.done for arm in result.arms):
        return None
    rows = []
    for arm in result.arms:
        row = [Cell(arm.name)]
        for trial in arm.trials:
            value = trial.value(result.measure) if trial.state == "done" else None
            said = {"done": "-", "missing": "not yet"}.get(trial.state, trial.state)
            if value is None:
                row.append(Cell(said, "faint" if trial.state == "missing" else "worse"))
            else:
                row.append(Cell(number(value), "" if arm.honest else "unfair", struck=not arm.honest))
        rows.append(row)
    columns = [Column("arm"), *(Column(f"seed {seed}", right=True) for seed in result.plan.seeds)]
    return Table("seeds", f"{MEASURES[result.measure][0].capitalize()} of every seed", columns, rows)
