"""What stops a run: numbers that are none, and losses that only rise."""

from __future__ import annotations

from typing import Any

from keyhole.core.findings import Finding
from keyhole.training.engine import Step

PATIENCE = 50
MARGIN = 1.0


def not_a_number(step: int, seen: Step) -> Finding:
    """The finding for a loss or gradient that is not finite. The weights were not moved by it."""
    return Finding(
        statement=f"loss and gradient are finite at step {step}",
        expected="finite numbers",
        measured=f"loss {seen.loss}, gradient norm {seen.grad_norm}",
        verdict="fails",
        why="one NaN reaches every weight at the next step; the run was stopped before that",
        remedy="lower train.rate, lengthen train.warmup, set train.clip, or look for a division by zero in your own parts",
        evidence={"step": step, "loss": str(seen.loss), "grad_norm": str(seen.grad_norm)},
    )


class Watch:
    """Calls divergence when the loss stays well above both its start and ln V for many steps."""

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform
        self.first: float | None = None
        self.above = 0

    def see(self, loss: float) -> Finding | None:
        """Look at a step's loss."""
        self.first = loss if self.first is None else self.first
        limit = max(self.first, self.uniform) + MARGIN
        self.above = self.above + 1 if loss > limit else 0
        if self.above < PATIENCE:
            return None
        return Finding(
            statement="the loss does not diverge",
            expected=f"at most {limit:.3f} (a model that knows nothing has ln V = {self.uniform:.3f})",
            measured=f"{loss:.3f}, above that for {PATIENCE} steps on end",
            tolerance=f"{MARGIN} nat",
            verdict="fails",
            why="the model is worse than guessing evenly, and not recovering",
            remedy="lower train.rate, lengthen train.warmup or set train.clip",
            evidence={"loss": loss, "first_loss": self.first, "uniform": self.uniform},
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"first": self.first, "above": self.above}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.first, self.above = state["first"], state["above"]
