"""What a study's directory says, read and judged: arms, differences, verdicts. Nothing here changes it.

Everything is computed from the trials' own files, so a study that is still going on, or was killed, can be opened as well.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.core.files import read_object
from keyhole.core.findings import Finding
from keyhole.studies.match import QUANTITIES, unequal
from keyhole.studies.plan import Plan
from keyhole.studies.prepare import STUDY, Prepared, read_known, stored_plan
from keyhole.studies.trial import RESULT

if TYPE_CHECKING:
    from keyhole.studies.report import Report
    from keyhole.studies.statistics import Difference, Estimate

FAILURES = "failures.json"
PREFIX_LIMIT = 1e-4
"""By how many nats a token a window's loss may differ from that of its prefixes, as in `keyhole.audits.prefix`: rounding in
float32 makes a ten-millionth."""
HIGHER_IS_BETTER = ("accuracy", "tokens_per_second")
UNITS = {"dev_loss": "nats", "dev_bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class TrialResult:
    """One arm with one seed."""

    arm: str
    seed: int
    path: Path
    state: str
    """"done", "diverged", "failed" or "missing"."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, see `keyhole.studies.measure`."""
    message: str = ""

    def value(self, key: str) -> float | None:
        """A measured number; None where there is none."""
        found = self.values.get(key)
        return float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True)
class ArmResult:
    """One arm with all its seeds."""

    name: str
    note: str
    changes: dict[str, Any]
    findings: list[Finding]
    """Of the audit before it trained, and of the prefix loss after."""
    trials: list[TrialResult]
    parameters: int
    flops_per_token: float | None
    rates: dict[float, float | None] = field(default_factory=dict)
    """The mean loss at each rate that was searched; None where it diverged."""
    rate: float | None = None
    """The rate chosen by the search."""

    @property
    def unfair(self) -> list[Finding]:
        """Findings that make its loss no evidence."""
        return [finding for finding in self.findings if finding.aspect == "honesty" and finding.verdict == "fails"]

    @property
    def honest(self) -> bool:
        """Whether no honesty finding fails."""
        return not self.unfair

    @property
    def done(self) -> list[TrialResult]:
        """The trials with a result."""
        return [trial for trial in self.trials if trial.state == "done"]

    def by_seed(self, key: str) -> dict[int, float]:
        """A measured number of every seed that has it."""
        found = {trial.seed: trial.value(key) for trial in self.done}
        return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}

    def judged(self, key: str) -> dict[int, float]:
        """The same with those that diverged or failed, or came to no number, as not a number.

        An arm must not win by the seeds it survived; one whose training failed by bad luck is trained again by --resume.
        """
        odd = {trial.seed for trial in self.done if (found := trial.value(key)) is not None and not math.isfinite(found)}
        return self.by_seed(key) | dict.fromkeys(self.lost | odd, math.nan)

    @property
    def lost(self) -> set[int]:
        """The seeds at which it was trained in vain."""
        return {trial.seed for trial in self.trials if trial.state in ("diverged", "failed")}

    def mean(self, key: str) -> float | None:
        """Its mean over seeds."""
        values = self.by_seed(key).values()
        return statistics.fmean(values) if values else None

    def estimate(self, key: str) -> Estimate | None:
        """Its mean over seeds, with an interval."""
        from keyhole.studies.statistics import estimate

        values = list(self.by_seed(key).values())
        return estimate(values) if values else None


@dataclass(frozen=True)
class StudyResult:
    """A study, as far as it has come."""

    path: Path
    plan: Plan
    arms: list[ArmResult]
    known: dict[str, Any]
    """study.json: when and with what it was begun."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What failed when it was last carried out: task -> why."""

    @property
    def name(self) -> str:
        """The study's name."""
        return self.plan.name

    @property
    def measure(self) -> str:
        """What the verdicts are about."""
        return self.plan.file.study.compare

    def arm(self, name: str) -> ArmResult:
        """An arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """Every other arm against the baseline, paired by seed, with intervals, corrected over arms, and a verdict."""
        return self.compare(self.measure)

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict on every arm but the baseline."""
        return {name: difference.verdict for name, difference in self.differences.items()}

    def compare(self, key: str) -> dict[str, Difference]:
        """The same for another measured number, such as "accuracy"."""
        from keyhole.studies.statistics import compare

        return compare(
            self.plan.baseline,
            {arm.name: arm.judged(key) for arm in self.arms},
            lower_is_better=key not in HIGHER_IS_BETTER,
            honest={arm.name: arm.honest for arm in self.arms},
            unpaired=self.unpaired,
            unit=UNITS.get(key, ""),
        )

    @cached_property
    def paired(self) -> Finding:
        """Whether all arms of a seed read the same data in the same order and were measured on the same tokens."""
        other = [place for places in self._others.values() for place in places]
        return _paired(self.arms, other, different=self.plan.file.study.different_data)

    @cached_property
    def _others(self) -> dict[str, list[str]]:
        return _others(self.arms, self.arm(self.plan.baseline))

    @property
    def unpaired(self) -> list[str]:
        """The arms that cannot be compared for what they read, unless different data were asked for."""
        return [] if self.plan.file.study.different_data else [arm for arm, places in self._others.items() if places]

    @property
    def notes(self) -> list[str]:
        """What else a reader must know: what is not equal between arms, what failed."""
        rows = {arm.name: {key: arm.mean(key) for key in QUANTITIES} for arm in self.arms}
        return unequal(rows, self.plan.baseline) + [
            f"{arm.name}, seed {trial.seed}: {trial.state}{': ' + trial.message if trial.message else ''}"
            for arm in self.arms
            for trial in arm.trials
            if trial.state in ("diverged", "failed")
        ]

    @property
    def complete(self) -> bool:
        """Whether every trial has ended."""
        return all(trial.state in ("done", "diverged") for arm in self.arms for trial in arm.trials)

    def report(self, html: str | Path | None = None, md: str | Path | None = None, *, charts: bool = True) -> Report:
        """Write it up as Markdown, one HTML file and charts; into its directory where no other file is named."""
        from keyhole.studies.report import write_report

        return write_report(self, html, md, charts=charts)

    def _repr_html_(self) -> str:
        from keyhole.studies.report.html import to_fragment

        return to_fragment(self)

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"keyhole study {self.path / 'study.toml'} --out {self.path.with_name(self.path.name + '-again')}"


def open_study(path: str | Path) -> StudyResult:
    """Open a study's directory for reading."""
    path = Path(path)
    plan = stored_plan(path)
    known = read_known(path)
    failures = read_object(path / FAILURES, remedy=_anew(path)) if (path / FAILURES).is_file() else {}
    prepared = Prepared(plan, path, {}, {}, {})
    arms = [_arm(prepared, arm.name, known["arms"][arm.name], failures) for arm in plan.arms]
    return StudyResult(path, plan, arms, known, failures)


def _arm(prepared: Prepared, name: str, known: Mapping[str, Any], failures: Mapping[str, str]) -> ArmResult:
    from keyhole.studies.rates import choose

    root = prepared.out
    trials = [_trial(root, name, seed, failures) for seed in prepared.plan.seeds]
    rates, rate = choose(prepared.plan, root, name)
    return ArmResult(
        name=name,
        note=known["note"],
        changes=known["changes"],
        findings=_audited(root, name, failures, trained=any(trial.values for trial in trials))
        + _prefix_finding(name, trials),
        trials=trials,
        parameters=known["parameters"],
        flops_per_token=known["flops_per_token"],
        rates=rates,
        rate=rate,
    )


def _trial(root: Path, arm: str, seed: int, failures: Mapping[str, str]) -> TrialResult:
    place = f"runs/{arm}/seed-{seed}"
    path = root / place / RESULT
    if not path.is_file():
        message = failures.get(place, "")
        return TrialResult(arm, seed, root / place, "failed" if message else "missing", message=message)
    found = read_object(path, "state", remedy=_anew(root))
    return TrialResult(arm, seed, root / place, found["state"], found, found.get("message", ""))


def _anew(root: Path) -> str:
    """How a file of a study that can be made again is: nothing else needs to go for it."""
    return f"keyhole study {shlex.quote(str(root / STUDY))} --resume makes it anew"


def _audited(root: Path, arm: str, failures: Mapping[str, str], *, trained: bool) -> list[Finding]:
    """What the audit before training found; an arm that trained without one is no evidence of anything."""
    place = f"audits/{arm}"
    path = root / f"{place}.json"
    if path.is_file():
        found = read_object(path, "findings", remedy=_anew(root))["findings"]
        return [Finding(**one) for one in found]
    if not trained:
        return []
    why = f": {failures[place]}" if place in failures else ""
    return [
        Finding(
            name="audited",
            aspect="honesty",
            statement=f"{arm}: its model was asked every probe before it trained",
            expected=f"findings in {path}",
            measured=f"none{why}",
            verdict="fails",
            why="whether it reads the future is not known, and one that does wins every table",
            remedy=_anew(root),
        )
    ]


def _prefix_finding(arm: str, trials: list[TrialResult]) -> list[Finding]:
    """Whether the trained models foretell from prefixes alone as well as from whole windows."""
    scored = [found for trial in trials if (found := trial.values.get("prefix"))]
    if not scored:
        return []
    # The window that differs most: over all of them gains and losses could cancel.
    score, worst = max(((_apart(found), found) for found in scored), key=lambda pair: pair[0])
    holds = score <= PREFIX_LIMIT
    return [
        Finding(
            name="prefix loss",
            aspect="honesty",
            statement=f"{arm}: the trained model foretells from prefixes alone as well as from whole windows",
            expected=f"at most {PREFIX_LIMIT:g} nats between them in any window",
            measured=f"{worst['gap']:+.2g} nats ({worst['full']:.4f} whole, {worst['prefix']:.4f} by prefixes)",
            tolerance=f"{PREFIX_LIMIT:g} nats",
            score=score,
            limit=PREFIX_LIMIT,
            verdict="holds" if holds else "fails",
            why="only prefixes are there when a model writes: what whole windows gain on them is the future, read",
            remedy="" if holds else "find the part with keyhole audit, and compare arms by their prefix loss until then",
            evidence={"windows": worst["windows"], "seeds": len(scored)},
        )
    ]


def _apart(scored: Mapping[str, float]) -> float:
    """How far a window and its prefixes are from each other; what is no number could be any."""
    found = abs(scored.get("worst", scored["gap"]))
    return math.inf if math.isnan(found) else found


def _others(arms: list[ArmResult], baseline: ArmResult) -> dict[str, list[str]]:
    """What each arm read or was measured on that is not what the baseline did at that seed."""
    right = {trial.seed: trial.values["hashes"] for trial in baseline.done}
    found: dict[str, list[str]] = {}
    for arm in arms:
        found[arm.name] = []
        for trial in arm.done:
            hashes = trial.values["hashes"]
            first = right.setdefault(trial.seed, hashes)
            found[arm.name] += [f"{key} of {arm.name}, seed {trial.seed}" for key in hashes if hashes[key] != first[key]]
    return found


def _paired(arms: list[ArmResult], other: list[str], *, different: bool) -> Finding:
    seeds = len({trial.seed for arm in arms for trial in arm.done})
    said: dict[str, Any] = {
        "name": "pairing",
        "aspect": "honesty",
        "statement": "all arms of a seed read the same data in the same order, and are measured on the same tokens",
        "expected": "equal hashes",
        "why": "unpaired arms differ by luck as well",
    }
    if other and different:
        remedy = "that was asked for with different_data; compare bits per byte rather than losses"
        return Finding(**said, measured=f"different: {other[0]}", verdict="undecided", remedy=remedy)
    if other:
        return Finding(**said, measured=f"different: {', '.join(other[:3])}", verdict="fails", remedy="train those anew")
    return Finding(**said, measured=f"equal for {seeds} seed{'s' * (seeds != 1)}", verdict="holds")
