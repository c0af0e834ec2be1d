"""Parameters and FLOPs, counted from the module itself; the parts always sum to the total.

A FLOP is one multiplication or one addition in a matrix product; element-wise work is not counted, as is the custom.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from keyhole.core.config import Model
from keyhole.model.guard import Guarded
from keyhole.model.lm import LM


@dataclass(frozen=True)
class Count:
    """How large a model is: parameters by what they belong to, and forward FLOPs for one row."""

    parameters: dict[str, int]
    flops: int | None
    tokens: int

    @property
    def total(self) -> int:
        """All parameters, shared ones once."""
        return sum(self.parameters.values())


def count(model: LM, tokens: int) -> Count:
    """Count a model for one row of `tokens`. FLOPs are None when a part of the user's does not declare its own."""
    groups = {"embedding": 0, "position": 0, "mixer": 0, "feed": 0, "norm": 0, "head": 0}
    for name, parameter in model.named_parameters():
        groups[_group(name)] += parameter.numel()
    return Count(groups, _flops(model, tokens), tokens)


def flops(model: Model, vocab: int, tokens: int, folder: Path | None = None) -> float:
    """Forward FLOPs per token of a model that need not be built; training takes three times as many."""
    with torch.device("meta"):
        counted = _flops(LM(model, vocab, tokens, folder or Path.cwd()), tokens)
    return float("nan") if counted is None else counted / tokens


def _group(name: str) -> str:
    step = next(step for step in name.split(".") if step not in ("blocks", "part") and not step.isdigit())
    return {"mixer_norm": "norm", "feed_norm": "norm"}.get(step, step)


def _flops(model: LM, tokens: int) -> int | None:
    total = 2 * tokens * model.head.numel()
    whole = [model.position, model.norm]
    for block in model.blocks:
        # A user's part that is not asked for its FLOPs may well have some.
        others = [*whole, block.mixer_norm, block.feed_norm, getattr(block.mixer, "merge", None)]
        if any(isinstance(part, Guarded) for part in others):
            return None
        if not (hasattr(block.mixer, "cost") and hasattr(block.feed, "flops")):
            return None
        total += block.mixer.cost(tokens).flops + block.feed.flops(tokens)
    return total
