"""What mixers with heads share: queries, keys and values from one projection, and the way back to the stream.

Legend: B rows, T tokens, W width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keyhole.parts.contract import Linear
from keyhole.parts.norm import RMSNorm


class HeadOutput(nn.Module):
    """The way back: merges (B, H, T, D) outputs and projects them to the stream. What it needs its subclass makes."""

    out: Linear
    merge: nn.Module | None

    def join(self, o_BHTD: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Merge the heads, going on from the merge's state where it has one, and write to the stream."""
        heads_BTHD = o_BHTD.transpose(1, 2)
        if state is not None:
            heads_BTHD, state = self.merge.step(heads_BTHD, state)
        elif self.merge is not None:
            heads_BTHD = self.merge(heads_BTHD)
        return self.out(heads_BTHD.flatten(2)), state

    def merged(self, o_BHTD: torch.Tensor) -> torch.Tensor:
        """What each head wrote, (B, T, H, D), after the merge and before the output projection."""
        heads_BTHD = o_BHTD.transpose(1, 2)
        return self.merge(heads_BTHD) if self.merge is not None else heads_BTHD

    def begin_merge(self, batch: int, like: torch.Tensor) -> Any:
        """The merge's state before the first token; None where it needs none."""
        return self.merge.begin(batch, like) if hasattr(self.merge, "begin") else None

    def own_parameters(self) -> int:
        """All parameters but those of position and merge, which are counted where they belong."""
        parts = [part for part in (getattr(self, "position", None), self.merge) if part is not None]
        shared = {id(p) for part in parts for p in part.parameters()}
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in shared)

    def merge_state_bytes(self) -> int:
        """What the merge keeps for one row."""
        state = self.begin_merge(1, self.out.weight)
        return 0 if state is None else state.numel() * state.element_size()


class HeadMixer(HeadOutput):
    """Projects tokens to (B, H, T, D) queries, keys and values; merges (B, H, T, D) outputs and projects them back."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.channels = heads, kv_heads or heads, width // heads
        key_width = self.groups * self.channels
        self.split = (width, key_width, key_width)
        self.qkv = Linear(width, sum(self.split), role="in", bias=bias, stack=self.split)
        self.out = Linear(width, width, role="out", bias=bias)
        self.position, self.merge = position, merge
        self.qk_norm = nn.ModuleList(RMSNorm(self.channels) for _ in range(2)) if qk_norm else None

    def project(self, x_BTW: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D), normed and turned, of tokens at positions from `start`."""
        B, T, _ = x_BTW.shape
        both = self.qkv(x_BTW)
        if self.groups == self.heads:
            # One copy brings all three to (B, H, T, D): the layout every kernel wants.
            q, k, v = both.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        else:
            q, k, v = (part.unflatten(-1, (-1, self.channels)).transpose(1, 2) for part in both.split(self.split, -1))
        if self.qk_norm is not None:
            q, k = self.qk_norm[0](q), self.qk_norm[1](k)
        turn = getattr(self.position, "turn", None)
        return (turn(q, start), turn(k, start), v) if turn else (q, k, v)

    def projection_flops(self, tokens: int) -> int:
        """The projections in and out."""
        return self.qkv.flops(tokens) + self.out.flops(tokens)
