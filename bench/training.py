"""Training speed and peak memory beside the peers': alternated in one run, medians, ratios of each round."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from bench.report import Section, Settings, Table, spread, verdict
from bench.workers import Shape, alternate, contenders

OURS = ("keyhole", "keyhole-rms-relu2", "keyhole-float32")
PEERS = {"float32": ("gpt2-float32", "xt-float32"), "bf16": ("gpt2-bf16", "xt-bf16")}
ALL_PEERS = (*PEERS["float32"], *PEERS["bf16"])
TARGETS = {
    Shape(4, 4, 128, 64, 12, 65): {"float32": 2.2, "bf16": 1.8},
    Shape(6, 6, 192, 256, 16, 65): {"float32": 2.1, "bf16": 1.4},
    Shape(6, 6, 384, 256, 16, 65): {"float32": 2.1, "bf16": 1.25},
    Shape(3, 3, 48, 128, 32, 20000): {"float32": 2.0, "bf16": 2.0},
}
NOTES = [
    "keyhole: layer norms and gelu as in the peers; keyhole-rms-relu2: rms norms and squared relu; both in the precision "
    "that the library chooses here. Everyone: fused AdamW, learned positions, tied head, no dropout, no clipping.",
    "A ratio is taken within each round against the peer of that precision with the best median; shown are the "
    "median and the range over rounds. The targets are for keyhole; the other rows are for comparison.",
]

Rounds = list[dict[str, dict[str, Any]]]


class Ratio(NamedTuple):
    """How many times as fast as the best peer of one precision."""

    ours: str
    peer: str
    values: list[float]
    target: float

    @property
    def median(self) -> float | None:
        """Over the rounds, if there were any."""
        return statistics.median(self.values) if self.values else None


def column(rounds: Rounds, name: str, key: str = "tokens_per_second") -> list[float]:
    """One figure of one contender, over the rounds that it lived to see."""
    return [measured[name][key] for measured in rounds if name in measured]


def ratios(rounds: Rounds, targets: dict[str, float]) -> list[Ratio]:
    """Ours against the best of the peers in each precision."""
    found = []
    for precision, target in targets.items():
        present = [name for name in PEERS[precision] if column(rounds, name)]
        if not present:
            continue
        best = max(present, key=lambda name: statistics.median(column(rounds, name)))
        for ours in ("keyhole", "keyhole-rms-relu2"):
            both = [measured for measured in rounds if ours in measured and best in measured]
            values = [m[ours]["tokens_per_second"] / m[best]["tokens_per_second"] for m in both]
            found.append(Ratio(ours, best, values, target))
    return found


def memory(rounds: Rounds) -> dict[str, Any]:
    """Our peak beside the least of the peers'."""
    ours = column(rounds, "keyhole", "peak_mb")
    peers = {name: max(column(rounds, name, "peak_mb")) for name in ALL_PEERS if column(rounds, name)}
    least = min(peers, key=peers.__getitem__) if peers else None
    return {"ours": max(ours) if ours else None, "peer": least, "least": peers[least] if least else None}


def speed_table(shape: Shape, rounds: Rounds, facts: dict[str, dict[str, Any]]) -> Table:
    """Every contender's own figures."""
    header = ("contender", "tokens/s", "range", "peak MB", "from training", "parameters")
    table = Table(f"Training: {shape}", header)
    for name in (*OURS, *ALL_PEERS):
        if not column(rounds, name):
            table.rows.append((name, "failed", "-", "-", "-", "-"))
            continue
        peak = max(column(rounds, name, "peak_mb"))
        training = peak - facts[name]["before_training_mb"]
        figures = spread(column(rounds, name), ",.0f")
        table.rows.append((name, *figures, f"{peak:,.0f}", f"{training:,.0f}", f"{facts[name]['parameters']:,}"))
    return table


def ratio_rows(shape: Shape, rounds: Rounds, targets: dict[str, float]) -> list[tuple[str, ...]]:
    """Ratios and memory of one shape, each beside its target."""
    rows = []
    for ratio in ratios(rounds, targets):
        reached = verdict(ratio.median, ratio.target) if ratio.ours == "keyhole" else "-"
        middle, extent = spread(ratio.values)
        rows.append((_short(shape), f"{ratio.ours} / {ratio.peer}", middle, extent, f"{ratio.target:g}", reached))
    found = memory(rounds)
    if found["ours"] and found["least"]:
        values = f"{found['ours']:,.0f} / {found['least']:,.0f} MB"
        reached = verdict(found["ours"], found["least"], at_most=True)
        rows.append((_short(shape), f"peak memory / {found['peer']}", values, "", "at most 1", reached))
    return rows


def measure(settings: Settings) -> Section:
    """All contenders over all shapes."""
    summary = Table("Training: ratios to the best peers", ("shape", "ratio", "median", "range", "target", ""), notes=NOTES)
    section = Section([], {})
    for shape, targets in TARGETS.items():
        with contenders((*OURS, *ALL_PEERS), shape, section.failures) as workers:
            facts = {worker.name: worker.facts for worker in workers}
            rounds = alternate(workers, settings.rounds, settings.seconds, section.failures)
        section.tables.append(speed_table(shape, rounds, facts))
        summary.rows.extend(ratio_rows(shape, rounds, targets))
        section.figures[_short(shape)] = {
            "rounds": rounds,
            "facts": facts,
            "ratios": [{**ratio._asdict(), "median": ratio.median} for ratio in ratios(rounds, targets)],
            "memory": memory(rounds),
        }
    section.tables.append(summary)
    return section


def _short(shape: Shape) -> str:
    return ", ".join(map(str, tuple(shape)))
