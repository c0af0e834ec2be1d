"""Many small runs, made without training: what a listing reads of a run is all there, and what is alike is linked."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from keyhole.core.config import Recipe
from keyhole.record.environment import RECIPE_DIGEST, text_digest

MIXERS = ("softmax", "linear", "ridge", "statespace", "average")
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = 20
STEPS = 1000


def make_runs(folder: Path, count: int, *, rows: int = 20) -> list[Path]:
    """Runs of studies, STUDY/runs/ARM/seed-N, that differ in mixer, rate and loss; seed and loss follow from the place."""
    alike = [_alike(folder / ".alike" / f"{mixer}-{rate}", mixer, rate) for mixer in MIXERS for rate in RATES]
    made = []
    for number in range(count):
        arm, seed = divmod(number, SEEDS)
        study, template = f"study-{arm // len(alike)}", alike[arm % len(alike)]
        run = folder / study / "runs" / template.name / f"seed-{seed}"
        step = run / "checkpoints" / f"step-{STEPS:08d}"
        step.mkdir(parents=True)
        for file in ("recipe.toml", "environment.json"):
            os.link(template / file, run / file)
        for file in ("state.json", "weights.safetensors", "optimizer.safetensors"):
            os.link(template / file, step / file)
        (run / "trial.json").write_text(json.dumps({"study": study, "arm": template.name, "seed": seed}))
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics(number, rows)))
        made.append(run)
    return made


def metrics(number: int, rows: int) -> list[dict[str, float]]:
    """The rows of one run: a dev loss in every fifth and in the last."""
    found = []
    for row in range(1, rows + 1):
        step = STEPS * row // rows
        loss = 1 + 3 / (1 + row) + number % 997 / 1000
        values = {"step": step, "loss": loss, "tokens": step * 768, "seconds": step / 100, "tokens_per_second": 76800.0}
        found.append({**values, "dev_loss": loss + 0.05} if row % 5 == 0 or row == rows else values)
    return found


def _alike(folder: Path, mixer: str, rate: float) -> Path:
    folder.mkdir(parents=True)
    text = Recipe().replace({"model.mixer": mixer, "train.rate": rate, "train.steps": STEPS}).to_toml()
    (folder / "recipe.toml").write_text(text)
    known = {RECIPE_DIGEST: text_digest(text), "parameters": 810_000, "data": {"hash": "0"}, "versions": {"torch": "2.13"}}
    (folder / "environment.json").write_text(json.dumps(known))
    digests = {}
    for file in ("weights.safetensors", "optimizer.safetensors"):
        (folder / file).write_bytes(file.encode())
        digests[file] = hashlib.sha256(file.encode()).hexdigest()
    state = {"format": 1, "step": STEPS, "done": True, "files": digests}
    (folder / "state.json").write_text(json.dumps(state))
    return folder
