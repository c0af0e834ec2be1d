"""What a mixer may offer beyond `forward(x) -> y`, and what each offer unlocks.

    forward(x_BTW)                             the least a mixer can be: trained, sampled (by recomputing), audited
    forward(x_BTW, mask_BT)                    padding: True marks a real token
    forward(x_BTW, mask_BT, impl="reference")  the readable definition, for the faithfulness audit
    begin(batch, like) -> state                cached decoding: the state before the first token ...
    step(x_BTW, state) -> (y_BTW, state)       ... and the next tokens, one or many
    look(x_BTW, mask_BT) -> Look               pattern and per-head outputs, computed only when asked
    cost(tokens) -> Cost                       parameters, FLOPs and state bytes, declared

Built-in mixers offer all of it and have no other way in. A constructor that takes `position` or `merge` receives those
parts; one that does not can only be combined with positions that add to the embedding, and with heads that concatenate.

Legend: B rows, T tokens, W width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

Impl = Literal["auto", "reference", "blocked", "fused"]


@dataclass(frozen=True)
class Cost:
    """What a mixer costs for one row of a given length."""

    parameters: int
    flops: int
    state_bytes: int


@dataclass(frozen=True)
class Look:
    """What a mixer did: who read whom, and what each head wrote (after the merge, before the output projection)."""

    pattern_BHTT: torch.Tensor
    heads_BTHD: torch.Tensor


@runtime_checkable
class Decodes(Protocol):
    """A mixer with a state: it can go on from where it was."""

    def begin(self, batch: int, like: torch.Tensor) -> Any:
        """The state before the first token."""

    def step(self, x_BTW: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Read the next tokens. The state passed in is used up; copy it first to keep it."""
