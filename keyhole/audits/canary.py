"""The canary: nobody can predict uniformly random tokens, so a model that does has seen them.

A small model with the audited part in its slot trains 300 steps on fresh random tokens and is then measured on others.
No causal model can be below ln V there, so whatever is catches leaks that no probe was written for.

Legend: N windows, T tokens, V symbols.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keyhole.audits.interval import mean_interval
from keyhole.core.config import Recipe, Spec
from keyhole.core.errors import InputError
from keyhole.core.findings import Finding
from keyhole.core.seeds import derive
from keyhole.model.guard import first_line
from keyhole.model.lm import LM, build
from keyhole.parts.loading import name_of
from keyhole.text.tasks import Noise, build_task
from keyhole.training.engine import Engine

STEPS = 300
SYMBOLS, BLOCK, BATCH = 16, 12, 48
LAYERS, WIDTH, HEADS = 3, 48, 4
RATE = 3e-3
WINDOWS = 2048
"""Windows that are measured: the mean loss is then known to about .001."""
FALSE_ALARM = 1e-4
"""How often an honest part may be accused by chance."""


def canary(
    part: str | type[nn.Module],
    kind: str,
    *,
    options: dict[str, Any] | None = None,
    folder: Path | None = None,
    seed: int = 0,
    steps: int = STEPS,
) -> Finding:
    """Train a small model with this part on random tokens and compare its loss with ln V."""
    said: dict[str, Any] = {
        "name": "canary",
        "statement": f"{part if isinstance(part, str) else part.__name__}: nothing is learned from random tokens",
        "why": "no causal model beats ln V on uniformly random tokens: who does has read them",
        "aspect": "honesty",
    }
    recipe = recipe_of(part, kind, options or {}, folder or Path.cwd(), seed)
    task = build_task(recipe.data.source, BLOCK)
    expected = f"a loss of at least ln {SYMBOLS} = {math.log(SYMBOLS):.4f}"
    try:
        model, diverged = _train(recipe, task, steps)
    except InputError as error:
        return Finding(**said, expected=expected, measured="nothing", verdict="undecided", remedy=f"no canary: {error}")
    except Exception as error:  # what a part raises in training is a finding, not an end
        told = f"no canary: training raised {first_line(error)}"
        return Finding(**said, expected=expected, measured="nothing", verdict="undecided", remedy=told)
    if diverged:
        told = f"its loss was no number at step {diverged}"
        return Finding(
            **said, expected=expected, measured=told, verdict="undecided", remedy="make it train first: norm or scale it"
        )
    return _judged(_losses(model, task, seed), said, expected, steps)


def _judged(losses_N: np.ndarray, said: dict[str, Any], expected: str, steps: int) -> Finding:
    mean, low, high = mean_interval(losses_N)
    sure = mean_interval(losses_N, FALSE_ALARM)[2]
    floor = math.log(SYMBOLS)
    gap, half = mean - floor, (high - low) / 2
    if not math.isfinite(mean):
        told = "the loss on fresh tokens is no number"
        return Finding(**said, expected=expected, measured=told, verdict="undecided", remedy="make it train first")
    fails = sure < floor
    evidence = {"loss": mean, "low": low, "high": high, "ln V": floor, "gap": gap, "windows": len(losses_N), "steps": steps}
    return Finding(
        **said,
        expected=expected,
        measured=f"{mean:.4f} ± {half:.4f}, {abs(gap):.4f} nats {'below' if gap < 0 else 'above'}",
        tolerance=f"{(sure - mean):.1g} nats, exceeded by chance once in {1 / FALSE_ALARM:,.0f}",
        score=max(0.0, -gap),
        limit=sure - mean,
        verdict="fails" if fails else "holds",
        remedy="the other probes say how it reads the future; where they hold, look for what crosses time in training"
        if fails
        else "",
        evidence=evidence,
    )


def recipe_of(part: str | type[nn.Module], kind: str, options: dict[str, Any], folder: Path, seed: int) -> Recipe:
    """A small model with this part in its slot; all else is plain."""
    name = part if isinstance(part, str) else name_of(part)
    return Recipe.parse(
        {
            "data": {"source": {"name": "task:noise", "symbols": SYMBOLS}, "block": BLOCK, "seed": seed},
            "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, kind: Spec(name=name, options=options)},
            "train": {"steps": STEPS, "batch": BATCH, "rate": RATE, "precision": "float32", "seed": seed},
        },
        folder=folder,
    )


def _train(recipe: Recipe, task: Any, steps: int) -> tuple[LM, int]:
    """The model after training, and the step at which it diverged (0 if it did not)."""
    assert isinstance(task, Noise)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.train.seed, "canary"))
        model = build(recipe, SYMBOLS)
        engine = Engine(model, recipe.train, device=device)
        for step in range(steps):
            x, y = task.samples(recipe.data.seed, "train", np.arange(step * BATCH, (step + 1) * BATCH))
            warm, cool = min(1.0, (step + 1) / 20), min(1.0, 3 * (steps - step) / steps)
            if not engine.advance(x, y, min(warm, cool)).finite:
                return engine.model, step + 1
    return engine.model, 0


@torch.no_grad()
def _losses(model: LM, task: Any, seed: int) -> np.ndarray:
    """(N,) the mean loss of each window that was never seen."""
    model.eval()
    found = []
    for first in range(0, WINDOWS, 256):
        x, y = (torch.from_numpy(ids) for ids in task.samples(seed, "canary", np.arange(first, first + 256)))
        logits = model(x.to(model.embedding.device)).double().cpu()
        found.append(nn.functional.cross_entropy(logits.mT, y, reduction="none").mean(1))
    return torch.cat(found).numpy()
