"""Mixers whose output is a sum of values by numbers: o_t = sum over s <= t of w_ts v_s, w from queries and keys.

Such a mixer gives its weights (the definition) and a way to mix from a state on (the form that trains and decodes); what
stands here turns these two into all that `keyhole.mixers.contract` lists.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import HeadMixer, State, check_impl


class WeightedMixer(HeadMixer, ABC):
    """A mixer with heads that says what its weights are, how it mixes from a memory on, and how many FLOPs that takes."""

    @abstractmethod
    def weights(self, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        """Who reads whom, (B, H, T, T): the definition."""

    @abstractmethod
    def first(self, batch: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The memory before the first token, in `like`'s precision or a wider one."""

    @abstractmethod
    def mix(
        self,
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        memory: tuple[torch.Tensor, ...],
        mask_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The outputs of the next tokens, and the memory after them."""

    @abstractmethod
    def mixing_flops(self, tokens: int) -> int:
        """FLOPs of `mix` for one row."""

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
        """Read all tokens at once; `mask_BT` is True at real tokens."""
        check_impl(impl)
        q, k, v = self.project(x_BTW, start=0)
        if impl == "reference":
            o = self.weights(q, k, mask_BT) @ v
        else:
            o, _ = self.mix(q, k, v, self.first(len(q), q), mask_BT)
        return self.join(o)[0]

    def begin(self, batch: int, like: torch.Tensor) -> State:
        """The state before the first token."""
        return State(self.first(batch, like), 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read the next tokens."""
        self.check_state(state, x_BTW)
        q, k, v = self.project(x_BTW, state.length)
        o, memory = self.mix(q, k, v, state.memory)
        y, merge = self.join(o, state.merge)
        return y, State(memory, state.length + x_BTW.shape[1], merge)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """The weights and what each head wrote."""
        q, k, v = self.project(x_BTW, start=0)
        weights = self.weights(q, k, mask_BT)
        return Look(weights, self.merged(weights @ v))

    def cost(self, tokens: int) -> Cost:
        """One row of `tokens` in the form that trains."""
        flops = self.projection_flops(tokens) + self.mixing_flops(tokens)
        return Cost(self.own_parameters(), flops, self.begin(1, self.out.weight).bytes)
