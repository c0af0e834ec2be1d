"""What a report says in words: the verdict on each arm, how far the study is, what must be known to read it."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from keyhole.core.errors import KeyholeError
from keyhole.core.files import read_json
from keyhole.core.findings import Finding
from keyhole.studies.plan import RATE_SEEDS
from keyhole.studies.prepare import rate_place
from keyhole.studies.rates import at_the_edge
from keyhole.studies.report.tables import prefix_by_seed, prefix_mean
from keyhole.studies.report.wording import MEASURES, budget, fault, judged, number, rules, untrained
from keyhole.studies.trial import RESULT

if TYPE_CHECKING:
    from keyhole.studies.result import ArmResult, StudyResult
    from keyhole.studies.statistics import Difference

UNKNOWN = "unknown"


def headlines(result: StudyResult) -> dict[str, str]:
    """The verdict on each arm but the baseline, one sentence each, in the plan's order."""
    honestly = by_prefixes(result)
    return {
        name: _headline(result, result.arm(name), found, honestly.get(name)) for name, found in result.differences.items()
    }


def _headline(result: StudyResult, arm: ArmResult, found: Difference, honest: Difference | None) -> str:
    if found.verdict == "not comparable":
        return _unfair(result, arm, found, honest)
    return f"{judged(found, arm) if untrained(arm) else found.sentence}."


def _unfair(result: StudyResult, arm: ArmResult, found: Difference, honest: Difference | None) -> str:
    name = MEASURES[result.measure][0]
    if arm.honest:
        said = f"{found.sentence}."
    else:
        loss = arm.mean(result.measure)
        claimed = f"; its {name} of {number(loss)} is no evidence" if loss is not None else ""
        said = f"not comparable: it {fault(arm)} (caught by {', '.join(rules(arm))}){claimed}."
    whole, prefix = prefix_mean(arm, "full"), prefix_mean(arm, "prefix")
    if whole is None or prefix is None:
        return said
    if not arm.honest:
        said += f" On the same windows it scores {number(whole)} read whole and {number(prefix)} prefix by prefix."
    return f"{said} Prefix by prefix, where nothing can be read ahead, it is {honest.sentence}." if honest else said


def by_prefixes(result: StudyResult) -> dict[str, Difference]:
    """Arms that are not comparable, judged by their loss prefix by prefix, with which no part can cheat."""
    from keyhole.studies.statistics import compare

    baseline = result.plan.baseline
    judged = [baseline, *(name for name, found in result.differences.items() if found.verdict == "not comparable")]
    losses = {name: prefix_by_seed(result.arm(name), "prefix") for name in judged}
    if len(losses) < 2 or not any(losses.values()):
        return {}
    losses = {name: found | dict.fromkeys(result.arm(name).lost, math.nan) for name, found in losses.items()}
    return compare(baseline, losses, unpaired=result.unpaired)


def state(result: StudyResult) -> str:
    """How far the study is; empty where all is done."""
    waiting = [arm for arm in result.arms if not ruined(result, arm)]
    trials = [trial for arm in waiting for trial in arm.trials]
    missing = [trial for trial in trials if trial.state == "missing"]
    failed = [trial for trial in trials if trial.state == "failed"]
    if not missing and not failed:
        return ""
    done = len(trials) - len(missing) - len(failed)
    said = [f"{done} of {len(trials)} trainings are done: verdicts may change with the rest"]
    none = [arm.name for arm in waiting if all(trial.state == "missing" for trial in arm.trials)]
    said += [f"nothing is there yet of {', '.join(none)}"] if none else []
    said += [f"{len(failed)} failed"] if failed else []
    return f"{'; '.join(said)}. Go on with: {resume_command(result)}"


def ruined(result: StudyResult, arm: ArmResult) -> bool:
    """Whether an arm diverged at every rate that was tried, so that there is nothing to train it with."""
    search = result.plan.file.rates
    if search is None or arm.rate is not None:
        return False
    tried = [rate_place(arm.name, rate, RATE_SEEDS + seed) for rate in arm.rates for seed in range(search.seeds)]
    return all((result.path / place / RESULT).is_file() for place in tried)


def resume_command(result: StudyResult) -> str:
    """What carries the rest of a study out."""
    return f"keyhole study {shlex.quote(str(result.path / 'study.toml'))} --resume"


def warnings(result: StudyResult) -> list[str]:
    """What may mislead: an unpaired study, a dishonest baseline, runs that ended badly, rates at the edge, added seeds."""
    said = []
    if result.paired.verdict != "holds":
        said.append(f"{result.paired.statement}: {result.paired.measured}; {result.paired.remedy}")
    if not (baseline := result.arm(result.plan.baseline)).honest:
        said.append(f"the baseline {baseline.name} itself {fault(baseline)}: nothing can be compared with it")
    for arm in result.arms:
        said += _ended_badly(arm)
        if ruined(result, arm):
            said.append(f"{arm.name} diverged at every learning rate that was tried, and was not trained")
    edge = [arm.name for arm in result.arms if at_the_edge(arm.rates, arm.rate)]
    if edge:
        said.append(f"the best rate is the first or last tried for {', '.join(edge)}: a better one may lie beyond")
    return said + _changed_on_the_way(result)


def _changed_on_the_way(result: StudyResult) -> list[str]:
    """What was not the same from the first trial to the last."""
    said = [
        f"{place} failed: the rate was chosen from the others" for place in result.failures if place.startswith("rates/")
    ]
    if result.plan.budget and result.plan.budget[0] == "seconds":
        said.append("the budget is of seconds: how far a trial came depends on what else the machine did meanwhile")
    made = _environments(result)
    if other := [name for name in ("versions", "machine", "precision") if len(made.get(name, ())) > 1]:
        said.append(f"trials were made with different {' and '.join(other)} (below): what is small may come from that")
    if earlier := result.known.get("seeds_before"):
        counts = [str(len(seeds)) for seeds in [*earlier, result.plan.seeds]]
        said.append(
            f"seeds were added when results were there ({', then '.join(counts)}): who looks, adds and looks again finds "
            "differences that are not there more often than in 5 % of studies"
        )
    return said


def _ended_badly(arm: ArmResult) -> list[str]:
    """Trainings that diverged or failed; those that ended alike are told together."""
    alike: dict[str, list[str]] = {}
    for trial in arm.trials:
        if trial.state in ("diverged", "failed"):
            message = f": {' '.join(trial.message.split())}" if trial.message else ""
            alike.setdefault(f"{trial.state}{message}", []).append(str(trial.seed))
    return [f"{arm.name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: {ended}" for ended, seeds in alike.items()]


def reading(result: StudyResult) -> list[str]:
    """How the numbers are meant."""
    compared = len(result.differences)
    return [
        "A verdict compares an arm with the baseline seed by seed: both trained on the same data in the same order.",
        "A mean stands with its 95 % interval: of a hundred such intervals, about 95 hold the true mean.",
        "Intervals of differences are corrected for "
        f"{compared} arm{'s' * (compared != 1)} by Holm's procedure: a false better or worse has a chance of 5 % in all.",
        "Not distinguishable is no proof of equality; so many seeds would find such a difference 4 times in 5.",
        "Not comparable: an arm that fails honesty. Its loss is struck out; prefix by prefix it cannot read ahead.",
    ]


def findings(result: StudyResult) -> dict[str, list[Finding]]:
    """What audits found on each arm: what fails first, then what is undecided."""
    order = {"fails": 0, "undecided": 1, "holds": 2}
    return {arm.name: sorted(arm.findings, key=lambda found: order[found.verdict]) for arm in result.arms}


def tally(found: list[Finding]) -> str:
    """So many hold, fail, are undecided."""
    if not found:
        return "not audited yet"
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("fails", "undecided", "holds")}
    said = {"fails": "fail" if counts["fails"] != 1 else "fails", "undecided": "undecided", "holds": "hold"}
    return ", ".join(f"{count} {said[verdict]}" for verdict, count in counts.items() if count)


def environment(result: StudyResult) -> dict[str, str]:
    """With what the trials were made; all values where machines differed."""
    shown = {name: "; ".join(values) for name, values in _environments(result).items()}
    return {"begun": str(result.known.get("started", UNKNOWN)), "budget": budget(result), **shown}


def _environments(result: StudyResult) -> dict[str, list[str]]:
    """The different values of all trials, in order."""
    seen: dict[str, dict[str, None]] = {}
    for trial in (trial for arm in result.arms for trial in arm.trials):
        for name, value in _environment(trial.path).items():
            seen.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in seen.items()}


def _environment(path: Any) -> dict[str, str]:
    try:
        known = read_json(path / "environment.json")
    except KeyholeError:
        return {}  # not begun, or damaged: the report tells of the others
    versions, machine = known.get("versions", {}), known.get("machine", {})
    precision, data = known.get("precision", {}), known.get("data", {})
    return {
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value) or UNKNOWN,
        "machine": ", ".join(
            f"{value} {name}" if isinstance(value, int) else str(value) for name, value in machine.items()
        ),
        "precision": str(precision.get("name", UNKNOWN)),
        "data": str(data.get("hash", UNKNOWN))[:16],
    }
