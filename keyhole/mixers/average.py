"""The floor that every mixer should beat: o_t = the mean of v_s over s <= t.

The fast form is a running sum; the state is that sum and a count. Padded tokens are in neither.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import HeadOutput, State, check_impl, wide
from keyhole.parts.contract import Linear


class Average(HeadOutput):
    """Each token reads the mean of all values so far: what can be had without choosing whom to read."""

    value: Linear

    def __init__(self, width: int, heads: int, block: int, merge: nn.Module | None = None) -> None:  # noqa: ARG002
        super().__init__(width, heads, merge, projections={"value": Linear(width, width, role="in")})

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
        """Read all tokens at once; `mask_BT` is True at real tokens."""
        check_impl(impl)
        v = self.split_heads(self.value(x_BTW))
        if impl == "reference":
            o = self._weights(v, mask_BT) @ v
        else:
            o, _, _ = _mean(v, mask_BT, *self._nothing(len(v), v))
        return self.join(o)[0]

    def begin(self, batch: int, like: torch.Tensor) -> State:
        """No sum and no count."""
        return State(self._nothing(batch, like), 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read the next tokens."""
        self.check_state(state, x_BTW)
        o, *memory = _mean(self.split_heads(self.value(x_BTW)), None, *state.memory)
        y, merge = self.join(o, state.merge)
        return y, State(tuple(memory), state.length + x_BTW.shape[1], merge)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """Weights 1/t, and what each head wrote."""
        v = self.split_heads(self.value(x_BTW))
        weights = self._weights(v, mask_BT)
        return Look(weights, self.merged(weights @ v))

    def cost(self, tokens: int) -> Cost:
        """Two projections; a running sum is no matrix product."""
        flops = self.value.flops(tokens) + self.out.flops(tokens)
        return Cost(self.own_parameters(), flops, self.begin(1, self.out.weight).bytes)

    def _nothing(self, batch: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = wide(like.dtype)
        sum_BH1D = like.new_zeros(batch, self.heads, 1, self.channels, dtype=exact)
        return sum_BH1D, like.new_zeros(batch, 1, 1, 1, dtype=exact)

    def _weights(self, v_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        """The definition: 1 / (how many real tokens so far) at each of them."""
        B, H, T, _ = v_BHTD.shape
        allowed = v_BHTD.new_ones(B, 1, T, T).tril()
        if mask_BT is not None:
            allowed = allowed * mask_BT[:, None, None, :]
        return (allowed / allowed.sum(-1, keepdim=True).clamp_min(1)).expand(B, H, T, T)


def _mean(
    v_BHTD: torch.Tensor, mask_BT: torch.Tensor | None, sum_BH1D: torch.Tensor, count_B111: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The means of the next tokens; the sum and the count after them."""
    v = v_BHTD.to(sum_BH1D.dtype)
    ones_BT = v.new_ones(len(v), v.shape[2]) if mask_BT is None else mask_BT.to(v)
    real = ones_BT[:, None, :, None]
    total, count = sum_BH1D + (v * real).cumsum(2), count_B111 + real.cumsum(2)
    return (total / count.clamp_min(1)).to(v_BHTD.dtype), total[:, :, -1:].clone(), count[:, :, -1:].clone()
