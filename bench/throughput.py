"""A whole study, audits and measurements included, beside its trainings one after the other by the best peer."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Section, Settings, Table, spread, verdict
from bench.training import ALL_PEERS, column
from bench.workers import Shape, alternate, contenders
from keyhole.core.config import Recipe
from keyhole.studies.plan import parse_plan
from keyhole.studies.study import study

SHAPE = Shape(4, 4, 128, 64, 12, 65)
TARGET = 2.5
ARMS: dict[str, Any] = {
    "baseline": {},
    "sinusoidal": {"model": {"position": "sinusoidal"}},
    "shift": {"model": {"merge": "shift"}},
    "shuffle": {"model": {"merge": "shuffle"}},
}
NOTES = [
    "The study: four arms of .8M parameters on the built-in text, as many at once as there are cores, one thread each; its "
    "tokens over its whole time on the wall, with audits, start of workers, dev losses, checkpoints and measurements. The "
    "peers: their training steps alone, on all cores, one after the other. Everyone: layer norms, gelu, learned positions, "
    "fused AdamW.",
    "A ratio is taken within each round against the peer with the best median.",
]


def carry_out(folder: Path, steps: int, seeds: int) -> dict[str, float]:
    """One study from nothing; its tokens a second."""
    train = {"steps": steps, "batch": SHAPE.batch, "clip": 0.0, "eval_tokens": 8192, "optimizer": "adamw", "seed": 0}
    model = {"layers": SHAPE.layers, "heads": SHAPE.heads, "width": SHAPE.width, "position": "learned"}
    base = Recipe.parse({"data": {"block": SHAPE.time}, "model": model, "train": train})
    (folder / "base.toml").write_text(base.to_toml())
    values = {
        "study": {"recipe": "base.toml", "seeds": seeds},
        "arms": ARMS,
        "measure": {"tokens": 20000, "windows": 16},
    }
    began = time.perf_counter()
    result = study(parse_plan(values, name="throughput", folder=folder), folder / "out", quiet=True)
    seconds = time.perf_counter() - began
    done = [trial for arm in result.arms for trial in arm.done]
    if len(done) != len(ARMS) * seeds:
        raise RuntimeError(f"only {len(done)} of {len(ARMS) * seeds} trainings ended")
    tokens = sum(trial.values["tokens"] for trial in done)
    return {
        "tokens_per_second": tokens / seconds,
        "one_worker": statistics.median(trial.values["tokens_per_second"] for trial in done),
        "seconds": seconds,
        "tokens": tokens,
        "parameters": float(done[0].values["parameters"]),
    }


def measure(settings: Settings) -> Section:
    """Peers and a study in turns."""
    section = Section([], {})
    steps, seeds = (60, 1) if settings.quick else (1000, 2)
    rounds: list[dict[str, dict[str, Any]]] = []
    with contenders(ALL_PEERS, SHAPE, section.failures) as workers:
        for _ in range(settings.rounds):
            measured = alternate(workers, 1, settings.seconds, section.failures)[0]
            with tempfile.TemporaryDirectory() as folder:
                measured["study"] = carry_out(Path(folder), steps, seeds)
            rounds.append(measured)
    figures = Table(f"Studies: {SHAPE}", ("contender", "tokens/s", "range"), notes=NOTES)
    for name in ("study", *ALL_PEERS):
        values = column(rounds, name)
        figures.rows.append((name, *(spread(values, ",.0f") if values else ("failed", "-"))))
    figures.rows.append(("one worker, its steps alone", *spread(column(rounds, "study", "one_worker"), ",.0f")))
    best = max(
        (name for name in ALL_PEERS if column(rounds, name)), key=lambda name: statistics.median(column(rounds, name))
    )
    ratios = [found["study"]["tokens_per_second"] / found[best]["tokens_per_second"] for found in rounds if best in found]
    summary = Table("Studies: throughput", ("ratio", "median", "range", "target", ""))
    middle, extent = spread(ratios)
    reached = verdict(statistics.median(ratios), TARGET)
    summary.rows.append((f"study / {best}", middle, extent, f"{TARGET:g}", reached))
    section.tables += [figures, summary]
    section.figures["study"] = {"rounds": rounds, "ratios": ratios, "best_peer": best}
    return section
