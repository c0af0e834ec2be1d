"""Sliding-window softmax: o_t = sum over t - w < s <= t of softmax_s(q_t . k_s / sqrt(D) + bias_ts) v_s.

By blocks of C queries, each beside the C + w - 1 keys that any of them may read: time and memory grow with T (C + w) and
not with T^2. Decoding keeps the last w - 1 keys and values.

4 D (C + w - 1) FLOPs a token and head; the state holds 2 (w - 1) D numbers a head.

Legend: B rows, T tokens, W width, H heads, D head width, N blocks, C queries of a block, S = C + w - 1 keys beside it.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import HeadMixer, State, check_impl, in_chunks
from keyhole.mixers.softmax import reference_weights

BLOCK = 64
"""The most queries that are taken together."""


def window_attention(
    q_BHTD: torch.Tensor,
    k_BHLD: torch.Tensor,
    v_BHLD: torch.Tensor,
    real_BL: torch.Tensor,
    window: int,
    bias_HNCS: torch.Tensor | None = None,
) -> torch.Tensor:
    """T queries over the L = w - 1 + T keys that end with theirs; keys that are not real are read by nobody."""
    T, D = q_BHTD.shape[2:]
    size, span = block_and_span(T, window)
    q = in_chunks(q_BHTD, size)
    missing = q.shape[2] * size - T
    k, v = (nn.functional.pad(x, (0, 0, 0, missing)).unfold(2, span, size) for x in (k_BHLD, v_BHLD))  # (B, H, N, D, S)
    real_BNS = nn.functional.pad(real_BL, (0, missing)).unfold(1, span, size)
    scores = q @ k * D**-0.5
    if bias_HNCS is not None:
        scores = scores + bias_HNCS
    ahead_CS = torch.arange(span, device=q.device) - torch.arange(size, device=q.device)[:, None]
    allowed = ((ahead_CS >= 0) & (ahead_CS < window)) & real_BNS[:, None, :, None, :]
    # A row with nothing to read is left unmasked for the softmax and zeroed after it, so that no NaN is ever made.
    reads_something = allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~allowed & reads_something, float("-inf")).softmax(-1) * reads_something
    return (weights @ v.mT).flatten(2, 3)[:, :, :T]


def block_and_span(tokens: int, window: int) -> tuple[int, int]:
    """How many queries a block has, and how many keys stand beside it."""
    size = min(tokens, BLOCK)
    return size, size + window - 1


class Window(HeadMixer):
    """Softmax attention over the last `window` tokens, by blocks: linear in the length, with a state of fixed size."""

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        window: int = 64,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(width, heads, position=position, merge=merge, qk_norm=qk_norm, bias=bias)
        if window < 1:
            raise InputError(f"window window = {window} is not valid; it is 1 (each token reads itself alone) or more")
        self.window = min(window, block)  # no text is longer

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
        """Read all tokens at once; `mask_BT` is True at real tokens."""
        check_impl(impl)
        q, k, v = self.project(x_BTW, start=0)
        if impl == "reference":
            return self.join(self._weights(q, k, mask_BT) @ v)[0]
        return self.join(self._mix(q, k, v, self.begin(len(q), q), mask_BT)[0])[0]

    def begin(self, batch: int, like: torch.Tensor) -> State:
        """No keys and no values yet."""
        both = like.new_zeros(2, batch, self.heads, self.window - 1, self.channels)
        return State((both,), 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read the next tokens, with the last w - 1 before them in the state."""
        self.check_state(state, x_BTW)
        q, k, v = self.project(x_BTW, state.length)
        o, both = self._mix(q, k, v, state, None)
        y, merge = self.join(o, state.merge)
        return y, State((both,), state.length + x_BTW.shape[1], merge)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """The weights and what each head wrote."""
        q, k, v = self.project(x_BTW, start=0)
        weights = self._weights(q, k, mask_BT)
        return Look(weights, self.merged(weights @ v))

    def cost(self, tokens: int) -> Cost:
        """One row of `tokens`; blocks count in full."""
        size, span = block_and_span(tokens, self.window)
        mixing = 4 * self.heads * self.channels * -(-tokens // size) * size * span
        flops = self.projection_flops(tokens) + mixing
        return Cost(self.own_parameters(), flops, self.begin(1, self.out.weight).bytes)

    def _mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, mask_BT: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, and the keys and values to keep."""
        T, kept = q.shape[2], self.window - 1
        both = torch.cat((state.memory[0], torch.stack((k, v))), 3)
        real_T = torch.ones(len(q), T, dtype=torch.bool, device=q.device) if mask_BT is None else mask_BT
        before_L = torch.arange(-kept, 0, device=q.device) + state.length >= 0
        real_BL = torch.cat((before_L.expand(len(q), kept), real_T), 1)
        o = window_attention(q, both[0], both[1], real_BL, self.window, self._block_bias(state.length, q))
        return o, both[:, :, :, T:].clone()

    def _block_bias(self, start: int, q: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(self.position, "bias"):
            return None
        size, span = block_and_span(q.shape[2], self.window)
        found = []
        for first in range(start, start + q.shape[2], size):
            # Places before the first and after the last token are read by nobody; a table has no entries for them.
            queries = torch.arange(first, first + size, device=q.device).clamp_max(start + q.shape[2] - 1)
            keys = torch.arange(first - self.window + 1, first - self.window + 1 + span, device=q.device)
            found.append(self.position.bias(queries, keys.clamp(0, start + q.shape[2] - 1)))
        return torch.stack(found, 1).to(q.dtype)

    def _weights(self, q: torch.Tensor, k: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        bias = None
        if hasattr(self.position, "bias"):
            time = torch.arange(q.shape[2], device=q.device)
            bias = self.position.bias(time, time).to(q.dtype)
        return reference_weights(q, k, bias, mask_BT, self.window)
