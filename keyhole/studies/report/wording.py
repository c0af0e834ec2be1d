"""How numbers and verdicts are written in a report: alike in the terminal, in Markdown, in HTML and in charts."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.studies.result import ArmResult, StudyResult
    from keyhole.studies.statistics import Difference, Estimate

MEASURES = {
    "dev_loss": ("dev loss", "nats"),
    "dev_bits_per_byte": ("dev bits per byte", "bits per byte"),
    "accuracy": ("accuracy", ""),
}
"""What verdicts may be about: what it is called, and its unit."""


def number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """A number for people: 1.2345, .0123, 12,345; a dash where there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "-"
    if abs(value) >= 1e6:
        return f"{value:{sign}.3g}"
    text = f"{value:{sign},.{digits}f}"
    if text.strip("+-0.,") == "" and text[:1] in "+-":
        text = text[1:]  # neither sign is true of what is rounded to nothing
    return text.replace("0.", ".", 1) if text.lstrip("+-").startswith("0.") else text


def perplexity(loss: float | None) -> str:
    """exp of a loss, with as many digits as people read."""
    if loss is None or loss > 700:
        return "-" if loss is None else "infinite"
    value = math.exp(loss)
    return number(value, 2 if value < 1000 else 0) if value < 1e9 else f"{value:.2e}"


def large(value: float | None) -> str:
    """A count: 812,345 or 3.21e+12."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.2e}"


def estimated(found: Estimate | None) -> str:
    """A mean with its interval: 1.2345 ± .0042, or both bounds where they are not as far on either side."""
    if found is None:
        return "-"
    if found.low is None or found.high is None or found.low == found.high:
        return number(found.mean)
    below, above = found.mean - found.low, found.high - found.mean
    digits = decimals(found.low, found.high)
    if math.isclose(below, above, rel_tol=1e-3):
        return f"{number(found.mean, digits)} ± {number(above, digits)}"
    return f"{number(found.mean, digits)} ({bounds(found.low, found.high, digits)})"


def differing(found: Difference) -> str:
    """A difference with the interval that is corrected over arms."""
    if found.mean is None:
        return "-"
    digits = decimals(found.low_holm, found.high_holm)
    if found.low_holm is None and found.high_holm is None:
        return number(found.mean, digits, "+")
    return f"{number(found.mean, digits, '+')} ({bounds(found.low_holm, found.high_holm, digits, '+')})"


def bounds(low: float | None, high: float | None, digits: int = 4, sign: str = "") -> str:
    """An interval; an end that is not there is said."""
    ends = ["no bound" if end is None else number(end, digits, sign) for end in (low, high)]
    return " to ".join(ends)


def decimals(low: float | None, high: float | None) -> int:
    """Two digits of the interval's half width, four decimals at least."""
    half = abs(high - low) / 2 if low is not None and high is not None else 0.0
    return 4 if half <= 0 else min(max(4, 1 - math.floor(math.log10(half))), 7)


def judged(found: Difference, arm: ArmResult) -> str:
    """A verdict in the words of a table."""
    if untrained(arm) and found.verdict == "undecided":
        failed = any(trial.state == "failed" for trial in arm.trials)
        return f"undecided: {'its trainings failed' if failed else 'not trained yet'}"
    if found.verdict == "not comparable":
        return f"not comparable ({', '.join(rules(arm))})" if arm.unfair else found.sentence
    if found.verdict == "not distinguishable" and found.seeds_to_decide:
        return f"not distinguishable; about {found.seeds_to_decide} seeds would tell"
    return found.sentence if found.verdict == "undecided" else found.verdict


def untrained(arm: ArmResult) -> bool:
    """Whether no training of an arm has come to an end."""
    return all(trial.state in ("missing", "failed") for trial in arm.trials)


def rules(arm: ArmResult) -> list[str]:
    """The rules of honesty that an arm breaks, by name."""
    return list(dict.fromkeys(finding.name or finding.statement for finding in arm.unfair))


def fault(arm: ArmResult) -> str:
    """What an arm that fails honesty does, as far as the rules say that it breaks."""
    return "reads the future" if set(rules(arm)) & FORESIGHT else "fails honesty"


FORESIGHT = {"suffix", "unaligned cuts", "truncation", "future gradient", "canary", "prefix loss"}
"""The rules that nothing breaks but what reads later tokens."""


def changed(changes: dict[str, Any]) -> str:
    """What an arm changes in the base recipe: position = "rope", train.rate = .01."""
    return ", ".join(f"{key.removeprefix('model.')} = {_value(value)}" for key, value in changes.items())


def purpose(arm: ArmResult, baseline: str) -> str:
    """What an arm is, in one line: what it changes, and its note."""
    said = [changed(arm.changes) or ("what the others are compared with" if arm.name == baseline else "changes nothing")]
    return " · ".join([*said, *([" ".join(arm.note.split())] if arm.note.strip() else [])])


def budget(result: StudyResult) -> str:
    """What every arm was promised alike."""
    if result.plan.budget is None:
        return "the base recipe's own budget"
    unit, amount = result.plan.budget
    return (
        f"{amount:,.0f} FLOPs"
        if unit == "flops" and amount < 1e9
        else f"{_amount(amount)} {unit.replace('flops', 'FLOPs')}"
    )


def _amount(amount: float) -> str:
    return f"{amount:.3g}" if amount >= 1e9 else f"{amount:,.6g}" if amount != int(amount) else f"{int(amount):,}"


def _value(value: Any) -> str:
    """A recipe's value as TOML writes it; a part as its name, with its options if it has any."""
    if isinstance(value, dict) and "name" in value:
        options = value.get("options") or {key: item for key, item in value.items() if key not in ("name", "options")}
        inner = ", ".join(f"{key} = {_value(item)}" for key, item in options.items())
        return f"{value['name']} ({inner})" if inner else str(value["name"])
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value, default=str)
