"""What a mixer may offer beyond `forward(x) -> y`, and what each offer unlocks.

    forward(x_BTW)                             the least a mixer can be: trained, sampled (by recomputing), audited
    forward(x_BTW, mask_BT)                    padding, left or right: True marks a real token
    forward(x_BTW, mask_BT, impl="reference")  the readable definition, for the faithfulness audit
    begin(batch, like) -> state                cached decoding: the state before the first token ...
    step(x_BTW, state) -> (y_BTW, state)       ... and the next tokens, one or many
    look(x_BTW, mask_BT) -> Look               pattern and per-head outputs, computed only when asked
    cost(tokens) -> Cost                       parameters, FLOPs and state bytes, declared

Built-in mixers offer all of it and have no other way in. A constructor that takes `position` or `merge` receives those
parts; one that does not can only be combined with positions that add to the embedding, and with heads that concatenate.
A mixer that takes positions but not every kind of them says so: `positions = ("turn",)`.

The three forms are equal: `impl="reference"` (the definition), the default (what trains), and `step` (the state given and
returned; what decodes). A state has `copy()`; `step` may use up the one it is given. Padding stands before a text or after
it: a padded token reads nothing, is read by nobody and changes no state; what stands in its own row of the result is no
concern, as long as it is finite.

Bytes of state are those in the mixer's own precision. FLOPs are those of the form that trains, counted as
`keyhole.mixers.flops` counts them; a mixer whose form depends on the machine names the one it counts,
`counted_form = "reference"`.

Legend: B rows, T tokens, W width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

Impl = Literal["auto", "reference", "blocked", "fused"]
"""The forms of softmax attention; every other mixer has "auto" and "reference"."""


@dataclass(frozen=True)
class Cost:
    """What a mixer costs for one row of a given length."""

    parameters: int
    flops: int
    state_bytes: int


@dataclass(frozen=True)
class Look:
    """What a mixer did: who read whom, and what each head wrote (after the merge, before the output projection).

    The pattern is the weight of each earlier value in each output: true attention weights, or implicit ones, which need not
    be positive or sum to one. Where values are not mixed by numbers (a state space, a recurrence) it says how in its mixer.
    """

    pattern_BHTT: torch.Tensor
    heads_BTHD: torch.Tensor


@runtime_checkable
class Decodes(Protocol):
    """A mixer with a state: it can go on from where it was."""

    def begin(self, batch: int, like: torch.Tensor) -> Any:
        """The state before the first token."""

    def step(self, x_BTW: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Read the next tokens. The state passed in is used up; copy it first to keep it."""
