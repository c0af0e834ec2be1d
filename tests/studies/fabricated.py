"""A study's directory made of seeded numbers, without training: what a report reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.core.config import Recipe
from keyhole.core.toml import to_toml

BLOCK, STEPS, WINDOWS = 64, 600, 24
TEXTS = {"normal": "Thank you so much for all your help with this !", "long": "It was the best of times, " * 12}


@dataclass
class Planned:
    """An arm, with the true losses that its numbers scatter around."""

    name: str
    shift: float = 0.0
    """Its true difference to the baseline."""
    leak: float = 0.0
    """How much its loss gains by reading the future; it then fails its audit."""
    note: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    diverged: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    rate: int = 2
    """Which of five rates is its best."""


ARMS = [
    Planned("baseline"),
    Planned("rope", -0.06, note="angles that turn", changes={"model.position": "rope"}),
    Planned("sinusoidal", 0.09, changes={"model.position": "sinusoidal"}, diverged=(3,)),
    Planned("shuffle", 0.004, changes={"model.merge": "shuffle"}, rate=4),
    Planned("reweight", 0.11, leak=0.31, note="heads by their norm", changes={"model.merge": "reweight"}),
    Planned("running", -0.002, note="the honest repair", changes={"model.merge": "reweight-running"}),
    Planned("shift", 0.02, changes={"model.merge": "shift"}, missing=(0, 1, 2, 3, 4)),
]


def many(count: int) -> list[Planned]:
    """Arms by the dozen."""
    shifts = np.random.default_rng(3).normal(0, 0.05, count)
    made = [Planned(f"arm-{place:02}", float(shift), rate=place % 5) for place, shift in enumerate(shifts)]
    made[0].shift, made[3].leak = 0.0, 0.25
    return made


def make_study(
    out: Path,
    arms: list[Planned] | None = None,
    *,
    seeds: int = 5,
    search: bool = True,
    measured: bool = True,
    study: dict[str, Any] | None = None,
) -> Path:
    """Write the directory; with `measured` false only losses are there, nothing by position and no texts."""
    arms = arms or ARMS
    out.mkdir(parents=True)
    rates = [0.003, 0.01, 0.03, 0.1, 0.3]
    measure = {"texts": TEXTS, "past": [2.0, 4.0], "windows": WINDOWS} if measured else {"windows": 0, "positions": False}
    sections: dict[str, dict[str, Any]] = {"study": {"recipe": "base.toml", "steps": STEPS, "seeds": seeds} | (study or {})}
    for arm in arms:
        nested: dict[str, Any] = {"note": arm.note}
        for key, value in arm.changes.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        sections[f"arms.{arm.name}"] = nested
    sections |= {"rates": {"values": rates}} if search else {}
    (out / "study.toml").write_text(to_toml(sections | {"measure": measure}))
    recipe = Recipe().replace({"data.block": BLOCK})
    (out / "base.toml").write_text(recipe.to_toml())
    known = {arm.name: _known(arm, place) | {"recipe": recipe.model_dump()} for place, arm in enumerate(arms)}
    begun = {"started": "2026-11-19T12:00:00+00:00", "precision": "bfloat16", "code": {}}
    _write(out / "study.json", {"name": "positions", "arms": known, **begun})
    for place, arm in enumerate(arms):
        random = np.random.default_rng([7, place])
        _write(out / "audits" / f"{arm.name}.json", {"findings": _findings(arm)})
        for seed in range(seeds):
            if seed not in arm.missing:
                _run(out / "runs" / arm.name / f"seed-{seed}", arm, place, seed, random, measured)
        for number, rate in enumerate(rates if search else []):
            loss = 1.45 + arm.shift - arm.leak + 0.05 * (number - arm.rate) ** 2
            _write(out / "rates" / arm.name / f"rate-{rate:g}-seed-10000" / "result.json", {"dev_loss": loss})
    return out


def _known(arm: Planned, place: int) -> dict[str, Any]:
    return {
        "note": arm.note,
        "changes": arm.changes,
        "parameters": 812_345 + 4096 * place,
        "flops_per_token": 1.6e6 + 1e4 * place,
    }


def _run(path: Path, arm: Planned, place: int, seed: int, random: np.random.Generator, measured: bool) -> None:
    luck = float(np.random.default_rng([11, seed]).normal(0, 0.03))
    loss = 1.5 + arm.shift - arm.leak + luck + float(random.normal(0, 0.008))
    rows = [_row(step, loss, random) for step in range(6, STEPS + 1, 6)]
    diverged = seed in arm.diverged
    rows = rows[:40] if diverged else rows
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "recipe.toml").write_text("")
    versions = {"python": "3.12.3", "keyhole": "0.1.0", "torch": "2.13.0"}
    machine = {"system": "Linux x86_64", "cores": 2, "capability": "AVX512", "threads": 1}
    _write(path / "environment.json", {"versions": versions, "machine": machine, "precision": {"name": "bfloat16"}})
    if diverged:
        _write(path / "result.json", {"state": "diverged", "message": "the loss was nan at step 240"})
        return
    _write(path / "result.json", {"state": "done", **_values(arm, place, seed, loss, measured)})


def _row(step: int, loss: float, random: np.random.Generator) -> dict[str, Any]:
    now = loss + 3.0 * math.exp(-step / 70)
    row = {"step": step, "tokens": step * 1024, "seconds": step / 30, "loss": now + float(random.normal(0, 0.03))}
    return row | ({"dev_loss": now} if step % 30 == 0 or step == STEPS else {})


def _values(arm: Planned, place: int, seed: int, loss: float, measured: bool) -> dict[str, Any]:
    seconds = 20 + place / 2 + seed / 10
    values: dict[str, Any] = {
        "dev_loss": loss,
        "accuracy": 0.6 - loss / 10,
        "dev_bits_per_byte": loss / math.log(2),
        "steps": STEPS,
        "tokens": STEPS * 1024,
        "seconds": seconds,
        "tokens_per_second": STEPS * 1024 / seconds,
        "memory_mb": 410.0 + place,
        "parameters": 812_345 + 4096 * place,
        "flops": 3 * (1.6e6 + 1e4 * place) * STEPS * 1024,
        "hashes": {"data": "d", "order": f"o{seed}", "evaluated": "e"},
    }
    if not measured:
        return values
    honest = loss + arm.leak * 2
    values["positions"] = [[at, loss + 2.2 / at**0.8] for at in range(1, BLOCK + 1)]
    values["prefix"] = {"full": loss + 0.2, "prefix": honest + 0.2, "gap": honest - loss, "windows": WINDOWS}
    values["texts"] = {
        name: {"loss": loss + more, "prefix_loss": honest + more, "tokens": 12}
        for more, name in zip((1.0, 2.0), TEXTS, strict=True)
    }
    values["past"] = {f"{factor}": _past(arm, factor, loss) for factor in (2, 4)}
    return values


def _past(arm: Planned, factor: int, loss: float) -> dict[str, Any]:
    if arm.name == "baseline":
        return {
            "block": BLOCK * factor,
            "reason": f"it has weights for each position of its block, and none for {BLOCK * factor}",
        }
    grows = 0.0 if arm.name == "rope" else 0.012
    at = range(1, BLOCK * factor + 1, 2)
    positions = [[p, loss + 2.2 / p**0.8 + grows * max(0, p - BLOCK)] for p in at]
    return {"block": BLOCK * factor, "loss": loss + grows * BLOCK * (factor - 1) / 2, "positions": positions}


def _findings(arm: Planned) -> list[dict[str, Any]]:
    names = ("suffix", "truncation", "batch-mates", "padding")
    found = [_finding(name, arm.name, "fails" if arm.leak and name in names[:2] else "holds") for name in names]
    return [*found, _finding("padding left", arm.name, "undecided")]


def _finding(name: str, arm: str, verdict: str) -> dict[str, Any]:
    fails = verdict == "fails"
    return {
        "name": name,
        "aspect": "honesty",
        "statement": f"{arm}: what stands before a cut does not change with what stands after it",
        "expected": "at most 1e-12",
        "measured": "0.7 at cut 33" if fails else "0",
        "tolerance": "1e-12",
        "verdict": verdict,
        "why": "a model that reads the future wins every table and writes nothing",
        "remedy": "use the running norm" if fails else "",
        "code": "w_BHT = (o_BHTD.square().sum(-1).cumsum(-1)).sqrt()" if fails else "",
    }


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
