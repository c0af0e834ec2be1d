"""The rules of honesty, asked of a part: no result may depend on later tokens, on other rows, or on padding.

The probes themselves are in `keyhole.testing.probes`; here they are asked of a part in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.testing.probes import LOUD, Probed, batch_mates, future_gradient, padding, suffix, truncation
from keyhole.testing.rules import Measured, Rule, summing_weights
from keyhole.testing.subject import Subject, takes


def of_part(tested: Subject, **others: Any) -> Probed:
    """A part as the probes ask it. A mixer's mask is asked without positions, as a place is no content."""
    part = tested.make(**others)
    return Probed(
        call=part,
        draw=tested.input,
        change=lambda x: tested.normal(*x.shape, seed=6) * 3,
        lengths=tested.lengths,
        loudness=_loudness(part, tested),
        slopes=lambda x, cut: _slopes(part, x, cut),
        padded=part,
    )


@torch.no_grad()
def _loudness(part: nn.Module, tested: Subject) -> float:
    """How loud a text may be before the part itself runs out of numbers."""
    x = tested.input(9)
    return next((scale for scale in LOUD if bool(part(x * scale).isfinite().all())), 0.0)


def _slopes(part: nn.Module, x: torch.Tensor, cut: int) -> torch.Tensor | None:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = part(x)
        if not y.requires_grad:
            return None
        (found,) = torch.autograd.grad((y * summing_weights(y))[:, :cut].sum(), [x], allow_unused=True)
    return found


def _part_padding(tested: Subject) -> Measured:
    if tested.kind != "mixer":
        return Measured(0, missing=f"a {tested.kind} is given no mask: the mixer takes padding out")
    from keyhole.parts.merge import Concat
    from keyhole.parts.position import NoPosition

    plain = {"position": NoPosition(), "merge": Concat()}
    if not takes(tested.make(**plain), "mask"):
        return Measured(0, missing="forward takes no mask, so rows of different lengths cannot share a batch")
    return padding(of_part(tested, **plain))


def _asked(probe: Callable[..., Measured], **how: Any) -> Callable[[Subject], Measured]:
    return lambda tested: probe(of_part(tested), **how)


_WHY = "a part that reads the future has a low loss and writes nothing"
_REMEDY = "mask the future out; sums and norms over the sequence want their running form (cumsum instead of sum)"

HONESTY = (
    Rule(
        "suffix",
        "no result changes when later tokens do, from a multiple of 8 on",
        _asked(suffix, aligned=True),
        _WHY,
        _REMEDY,
        "honesty",
    ),
    Rule(
        "unaligned cuts",
        "no result changes when later tokens do, from within a block on",
        _asked(suffix, aligned=False),
        _WHY + "; what sums over whole blocks hides from cuts at their ends",
        _REMEDY,
        "honesty",
    ),
    Rule(
        "truncation",
        "no result changes when later tokens are left out",
        _asked(truncation),
        _WHY + "; when writing, later tokens are not there at all",
        _REMEDY,
        "honesty",
    ),
    Rule(
        "future gradient",
        "no gradient comes from later tokens",
        _asked(future_gradient),
        _WHY + "; training follows the gradient to whatever leaks",
        _REMEDY,
        "honesty",
    ),
    Rule(
        "batch-mates",
        "no result changes with the other rows of the batch, or without them",
        _asked(batch_mates),
        "rows that see each other leak, and no text is ever answered in the company it was trained in",
        "keep no statistics over the batch",
        "honesty",
    ),
    Rule(
        "padding",
        "padding of any content, on either side, changes nothing for real tokens, and a fully padded row stays finite",
        _part_padding,
        "rows of different lengths share a batch; what stands beside a text must not change it",
        "take padded tokens out of numerator, denominator and state alike",
        "honesty",
    ),
)
